"""Every kind of finding has at least three faulty programs and two healthy look-alikes, and all of them end well."""

import re
from pathlib import Path

import pytest

import gradgate.doctor
from tests.doctor import (  # noqa: F401 - each fills the tables
    quiet,
    test_cuts,
    test_modes,
    test_nonfinite,
    test_optimizers,
    test_overwrites,
    test_second_backward,
    test_traps,
    test_unlearned,
    test_zeros,
)
from tests.doctor.programs import FAULTY, HEALTHY, check_faulty, check_healthy

SOURCES = [path.read_text(encoding="utf-8") for path in Path(gradgate.doctor.__file__).parent.rglob("*.py")]
CODES = sorted({code for source in SOURCES for code in re.findall(r"\b(GG\d{3})\b", source)})
# What is not a finding about a step of the user: notes, and what only says that the step raised or did not repeat.
OTHERS = {"GG001", "GG002", "GG003", "GG004", "GG005"}
# What only a run of several steps shows has its programs in `tests/doctor/corpus`.
# A watch alone sees GG308 and GG309.
OTHERS |= {"GG006", "GG308", "GG309", "GG905", "GG906", "GG907"}


@pytest.mark.parametrize("code", [code for code in CODES if code not in OTHERS])
def test_it_has_programs(code):
    assert len(FAULTY[code]) >= 3
    assert len(HEALTHY[code]) >= 2


def rows(table):
    return [pytest.param(code, program, id=f"{code}-{program.__name__}") for code in table for program in table[code]]


@pytest.mark.parametrize(("code", "program"), rows(FAULTY))
def test_the_line_is_named(code, program):
    check_faulty(code, program)


@pytest.mark.parametrize(("code", "program"), rows(HEALTHY))
def test_no_false_alarm(code, program):
    check_healthy(code, program)
