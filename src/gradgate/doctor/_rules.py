"""All rules, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradgate.doctor._case import Case
from gradgate.doctor._cuts import find_cuts, find_loss_without_graph
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._graph import draw
from gradgate.doctor._modes import (
    find_eval_left_on,
    find_inference_tensors,
    find_recording_off,
    find_statistics,
    find_written_modes,
)
from gradgate.doctor._nonfinite import find_nonfinite
from gradgate.doctor._optimizers import find_optimizer_faults
from gradgate.doctor._overwrites import find_leaf_edits, find_overwrites
from gradgate.doctor._raised import find_backward_missing, find_raised, find_unused_in_grad
from gradgate.doctor._second_backward import find_second_backward
from gradgate.doctor._traps import find_traps
from gradgate.doctor._zeros import find_sizes, find_zeros
from gradgate.records import Finding

Rule = Callable[[Case], Iterator[Finding]]

# Each explains what a step may raise; if none does, `find_raised` says at least where it was.
_ON_ERRORS: tuple[Rule, ...] = (
    find_overwrites,
    find_leaf_edits,
    find_loss_without_graph,
    find_unused_in_grad,
    find_second_backward,
    find_inference_tensors,
)
_ALWAYS: tuple[Rule, ...] = (
    find_backward_missing,
    find_cuts,
    find_nonfinite,
    find_zeros,
    find_sizes,
    find_traps,
    find_recording_off,
    find_written_modes,
    find_eval_left_on,
    find_statistics,
    find_optimizer_faults,
)
_ORDER = ("error", "warning", "info")


def conclude(case: Case) -> Diagnosis:
    """Let every rule look at a case."""
    findings = [finding for rule in _ON_ERRORS for finding in rule(case)]
    if case.exception is not None and not any(finding.severity == "error" for finding in findings):
        findings += find_raised(case)
    findings += [finding for rule in _ALWAYS for finding in rule(case)]
    bitten = {place for f in findings if f.code == "GG502" for place in (f.where, *f.also)}
    kept = dict.fromkeys(f for f in findings if not (f.code == "GG501" and bitten & {f.where, *f.also}))
    said = tuple(sorted(kept, key=lambda f: _ORDER.index(f.severity)))
    return Diagnosis(said, case.exception, *draw(case, said))
