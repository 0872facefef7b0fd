"""The law: a guarded step is, to the bit, the step of the batch without the samples it dropped.

2,000 random cases here; 20,000 with `python -m tests.guard 20000`.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.guard.cases import check

CASES = 2000
CHUNK = 100


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_the_law_holds_for_random_trainings(first):
    for seed in range(first, first + CHUNK):
        check(seed)


@given(seed=st.integers(min_value=CASES, max_value=2**31))
def test_the_law_holds_for_trainings_that_hypothesis_chooses(seed):
    check(seed)


@pytest.mark.slow
def test_the_cases_cover_every_stage_and_cause():
    """A law that is only tested where it is easy is no law."""
    seen = {(incident.stage, incident.cause) for seed in range(150) for incident in check(seed).dropped}
    assert seen >= {
        ("forward", "exception"),
        ("loss", "exception"),
        ("forward", "non-finite loss"),
        ("loss", "non-finite loss"),
        ("backward", "non-finite gradient"),
    }
