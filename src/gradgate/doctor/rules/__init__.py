"""All rules, and the diagnosis that they give together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gradgate.doctor._case import SEVERITIES, Case
from gradgate.doctor.rules import _errors, _gradients, _nonfinite, _setup
from gradgate.records import Finding

# --- all rules --------------------------------------------------------------------------------------------------------

Rule = Callable[[Case], Iterator[Finding]]

# Each explains what a step may raise; if none does, `find_raised` says at least where it was.
_ON_ERRORS: tuple[Rule, ...] = (
    _errors.find_overwrites,
    _errors.find_leaf_edits,
    _gradients.find_loss_without_graph,
    _gradients.find_unused_in_grad,
    _errors.find_second_backward,
    _errors.find_inference_tensors,
)
_ALWAYS: tuple[Rule, ...] = (
    _errors.find_backward_missing,
    _gradients.find_cuts,
    _nonfinite.find_nonfinite,
    _gradients.find_zeros,
    _gradients.find_sizes,
    _nonfinite.find_traps,
    _setup.find_recording_off,
    _setup.find_written_modes,
    _setup.find_eval_left_on,
    _setup.find_statistics,
    _setup.find_unregistered,
    _setup.find_optimizer_faults,
)


def apply_rules(case: Case) -> tuple[Finding, ...]:
    """Return what all rules find in a step, in the order of time; `fold` brings the worst to the front."""
    findings = [finding for rule in _ON_ERRORS for finding in rule(case)]
    if case.exception is not None and not any(finding.severity == "error" for finding in findings):
        findings += _errors.find_raised(case)
    findings += [finding for rule in _ALWAYS for finding in rule(case)]
    harmful = {place for f in findings if f.code == "GG502" for place in (f.where, *f.also)}
    return tuple(dict.fromkeys(f for f in findings if not (f.code == "GG501" and harmful & {f.where, *f.also})))


# --- one cause, one finding -------------------------------------------------------------------------------------------

# The first finding on the left explains those on the right: the beginnings of "code severity", and a text in the title.
_EXPLAINS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("GG907",), ("GG4", "GG307", "GG302", "GG303", "GG002"), ""),
    (("GG104", "GG801"), ("GG201", "GG101", "GG103", "GG904", "GG806", "GG905"), ""),
    (("GG901", "GG908"), ("GG902 warning", "GG904"), ""),
    (("GG902",), ("GG102", "GG901", "GG904", "GG905", "GG103"), ""),
    (("GG4", "GG502"), ("GG4", "GG002", "GG307"), ""),
    (("GG6", "GG7", "GG804"), ("GG002",), ""),
    (("GG201",), ("GG904", "GG905", "GG806"), ""),
    (("GG101", "GG102"), ("GG904", "GG905"), ""),
    (("GG101", "GG102"), ("GG002",), "NoneType"),
    (("GG30",), ("GG306",), ""),
    (("GG905",), ("GG903",), ""),
    (("GG",), ("GG006",), ""),
)


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Leave one finding for each cause, with its consequences in it, the worst first."""
    kept = list(dict.fromkeys(findings))
    for causes, effects, text in _EXPLAINS:
        cause = next((f for f in kept if _matches(f, causes)), None)
        if cause is not None:
            kept = _folded(kept, cause, [f for f in kept if _matches(f, effects) and text in f.title])
    for cause in list(kept):
        if cause in kept:
            kept = _folded(kept, cause, [f for f in kept if _is_same(cause, f)])
    return tuple(sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity)))


def _matches(finding: Finding, beginnings: tuple[str, ...]) -> bool:
    return finding.severity != "info" and f"{finding.code} {finding.severity}".startswith(beginnings)


def _is_same(cause: Finding, other: Finding) -> bool:
    """Return whether a finding says the same again: at the same line, or the same note for another layer."""
    if cause.code == other.code:
        return cause.severity == "info" == other.severity or cause.where == other.where is not None
    return other.severity == "warning" and cause.severity == "error" and cause.where in other.also


def _folded(kept: list[Finding], cause: Finding, effects: list[Finding]) -> list[Finding]:
    effects = [effect for effect in effects if effect is not cause]
    if not effects:
        return kept
    lines = [f"{effect.code}: {effect.title}{f' ({effect.where})' if effect.where else ''}" for effect in effects]
    severity = min((f.severity for f in (cause, *effects)), key=SEVERITIES.index)
    # The same line in two modules, or in two steps, is reported once.
    consequences = dict.fromkeys((*cause.consequences, *(line for line in lines if cause.title not in line)))
    folded = replace(cause, severity=severity, consequences=tuple(consequences))
    return [folded if f is cause else f for f in kept if f is cause or f not in effects]
