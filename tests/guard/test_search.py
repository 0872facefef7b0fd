"""The search over rows, with tests that are plain functions: nothing of torch is needed here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradgate.guard._search import Search, Verdict


def searched(size, test, hint=()):
    """Search as the guard does: try the batch without what was found, and go on while it fails. Counts the calls."""
    search = Search(list(range(size)), test, hint)
    calls = 0
    for _ in search.run():
        found = {row for group in search.groups for row in group}
        calls += 1
        if test([row for row in range(size) if row not in found]) is not Verdict.SAME:
            break
    return search, search.tests + calls


def failing_with(*groups):
    """A test that fails if any of these groups of rows is there as a whole."""

    def test(rows):
        return Verdict.SAME if any(set(group) <= set(rows) for group in groups) else Verdict.PASSES

    return test


def hints(size):
    return st.sets(st.integers(0, size - 1))


@given(st.integers(2, 130), st.data())
def test_one_bad_row_is_found_within_the_bound_whatever_the_hint(size, data):
    bad, hint = data.draw(st.integers(0, size - 1)), data.draw(hints(size))
    search, calls = searched(size, failing_with({bad}), hint)
    assert search.groups == [(bad,)]
    assert 3 + calls <= 2 * math.log2(size) + 6  # the step itself and at most two replays come before


@given(st.integers(2, 200), st.data())
def test_bad_rows_are_found_within_the_bound_whatever_the_hint(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=max(1, size // 4)))
    hint = data.draw(st.just(bad) | hints(size))
    search, calls = searched(size, failing_with(*({row} for row in bad)), hint)
    if search.everyone:  # possible only if all that were tested alone are bad
        assert len(bad) >= 4
        return
    assert sorted(search.groups) == [(row,) for row in sorted(bad)]
    assert 3 + calls <= 2 * len(bad) * math.log2(size) + 6


@given(st.integers(6, 60), st.data())
def test_rows_that_fail_only_together_are_found_together(size, data):
    group = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=3))
    search, _ = searched(size, failing_with(group), data.draw(st.just(group) | hints(size)))
    assert search.groups == [tuple(sorted(group))]


@given(st.integers(6, 60), st.data())
def test_a_pair_and_a_single_row_are_told_apart(size, data):
    one, two, three = data.draw(st.lists(st.integers(0, size - 1), min_size=3, max_size=3, unique=True))
    search, _ = searched(size, failing_with({one}, {two, three}))
    blamed = {row for group in search.groups for row in group}
    assert one in blamed
    assert blamed <= {one, two, three}


SIZES = {
    "pairs": lambda size: size % 2 == 1,
    "triplets": lambda size: size % 3 != 0,
    "fours": lambda size: size % 4 != 0,
    "no multiple of three": lambda size: size % 3 == 0,
    "at least four": lambda size: size < 4,
    "three at most": lambda size: size > 3,
    "thirty at most": lambda size: size > 30,
}


@pytest.mark.parametrize("fails", SIZES.values(), ids=SIZES)
def test_a_fault_of_the_size_is_nobodys(fails):
    for size in filter(fails, range(1, 60)):
        for hint in ((), (size // 2,), range(size // 2)):
            search, calls = searched(size, lambda rows: Verdict.SAME if fails(len(rows)) else Verdict.PASSES, hint)
            assert not search.groups
            assert calls <= 60


def test_everyone_fails_is_said_after_a_handful_of_tests():
    search, _ = searched(1000, lambda rows: Verdict.SAME)
    assert search.everyone
    assert not search.groups
    assert search.tests <= 14


def test_a_batch_that_is_too_large_is_given_up_soon():
    search, _ = searched(1000, lambda rows: Verdict.SAME if len(rows) >= 1000 else Verdict.PASSES)
    assert not search.groups
    assert not search.everyone
    assert search.tests <= 100


def test_a_row_that_fails_only_alone_is_innocent():
    """Rows 0 to 9 fail unless somebody else is there; only row 20 is bad in company."""

    def test(rows):
        return Verdict.SAME if 20 in rows or set(rows) <= set(range(10)) else Verdict.PASSES

    for hint in ((), (20,), (3, 20)):
        assert searched(30, test, hint)[0].groups == [(20,)]


def test_a_model_that_needs_its_full_size_is_searched_at_full_size():
    sizes = []

    def test(rows):
        sizes.append(len(rows))
        if len(rows) % 8:
            return Verdict.OTHER
        return Verdict.SAME if 5 in rows else Verdict.PASSES

    search = Search(list(range(16)), test)
    next(search.run())
    assert search.groups == [(5,)]
    assert max(sizes) == 16


def test_a_row_that_fails_only_at_its_place_is_found():
    """Row 11 fails as the eleventh of at least eleven: no small group shows it, but the rest passes without it."""

    def test(rows):
        return Verdict.SAME if 11 in rows[10:] else Verdict.PASSES

    assert searched(12, test)[0].groups == [(11,)]


def test_nothing_is_blamed_where_no_test_says_anything():
    search, _ = searched(16, lambda rows: Verdict.OTHER)
    assert not search.groups
    assert not search.everyone


def test_one_row_that_fails_is_everyone():
    assert searched(1, lambda rows: Verdict.SAME)[0].everyone


def test_groups_are_tested_in_the_order_of_the_batch():
    def test(rows):
        assert rows == sorted(rows)
        return Verdict.SAME if {3, 11} & set(rows) else Verdict.PASSES

    assert sorted(searched(16, test)[0].groups) == [(3,), (11,)]
