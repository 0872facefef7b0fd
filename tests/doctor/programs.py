"""Small programs with one fault each, and healthy ones that look like them.

A program is a function that returns a step, or a step and its model. In its source, `# HERE` marks the line that the
finding must name, and `# ALSO` a line that it must name besides.
"""

import contextlib
import inspect
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import gradgate as gg

X = torch.linspace(-1, 1, 24).reshape(6, 4)

FAULTY = defaultdict(list)
HEALTHY = defaultdict(list)


def two():
    """A model in two parts, the same each time."""
    torch.manual_seed(1)
    return nn.ModuleDict({"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 1)})


def faulty(code):
    """Register a program in which the doctor must find this."""

    def register(program):
        FAULTY[code].append(program)
        return program

    return register


def healthy(*codes):
    """Register a program that looks like these faults and is none."""

    def register(program):
        for code in codes:
            HEALTHY[code].append(program)
        return program

    return register


@contextlib.contextmanager
def silence():
    """Let torch's own warnings pass: the doctor says it better."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def marked(program, mark):
    """The places of the lines of a program that carry a mark."""
    program = inspect.unwrap(program)
    lines, first = inspect.getsourcelines(program)
    file = Path(inspect.getsourcefile(program)).relative_to(Path.cwd())
    return [f"{file}:{first + n}" for n, line in enumerate(lines) if f"# {mark}" in line]


def examine(program):
    """Run the step of a program under the doctor."""
    made = program()
    step, model = made if isinstance(made, tuple) else (made, None)
    try:
        return gg.diagnose(step, model=model)
    finally:
        torch.set_grad_enabled(True)


def check_faulty(code, program):
    """The doctor finds the fault, at the marked lines."""
    diagnosis = examine(program)
    found = [finding for finding in diagnosis.findings if finding.code == code]
    here = marked(program, "HERE")
    if not found:  # it follows from another finding
        lines = [(f, line) for f in diagnosis.findings for line in f.consequences if line.startswith(f"{code}: ")]
        assert lines, f"{code} not found, but: {diagnosis}"
        assert all(any(place in line for _, line in lines) for place in here), str(diagnosis)
        return lines[0][0]
    finding = next((finding for finding in found if finding.where in here), found[0])
    assert finding.title
    assert finding.reason
    if here:
        assert finding.where in here, str(diagnosis)
        assert finding.source
    for place in marked(program, "ALSO"):
        assert place in finding.also, str(diagnosis)
    return finding


def check_healthy(code, program):
    """The doctor has nothing to complain of."""
    diagnosis = examine(program)
    # GG802 and GG803 are found by reading the file, and a file of programs has programs with those.
    ignored = {"GG802", "GG803"} - {code}
    assert not [finding for finding in diagnosis.at_least("warning") if finding.code not in ignored], str(diagnosis)
    assert diagnosis.exception is None
