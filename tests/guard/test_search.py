"""The search over rows, with tests that are plain functions: nothing of torch is needed here."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gradgate.guard._search import Verdict, isolate


def failing_with(*groups):
    """A test that fails if any of these groups of rows is there as a whole."""

    def test(rows):
        return Verdict.SAME if any(set(group) <= set(rows) for group in groups) else Verdict.PASSES

    return test


@given(st.integers(2, 200), st.data())
def test_single_bad_rows_are_found_within_the_bound(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=max(1, size // 4)))
    search = isolate(list(range(size)), failing_with(*({row} for row in bad)))
    if search.everyone:  # possible only if all that were tried alone are bad
        assert len(bad) >= 4
        return
    assert sorted(search.groups) == [(row,) for row in sorted(bad)]
    assert search.tests <= 2 * len(bad) * (math.log2(size / len(bad)) + 2) + 10


@given(st.integers(3, 60), st.data())
def test_rows_that_fail_only_together_are_found_together(size, data):
    group = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=3))
    search = isolate(list(range(size)), failing_with(group))
    assert search.groups == [tuple(sorted(group))]


@given(st.integers(6, 60), st.data())
def test_a_pair_and_a_single_row_are_told_apart(size, data):
    one, two, three = data.draw(st.lists(st.integers(0, size - 1), min_size=3, max_size=3, unique=True))
    search = isolate(list(range(size)), failing_with({one}, {two, three}))
    blamed = {row for group in search.groups for row in group}
    assert one in blamed
    assert blamed <= {one, two, three}


def test_everyone_fails_is_said_after_a_handful_of_tests():
    search = isolate(list(range(1000)), lambda rows: Verdict.SAME)
    assert search.everyone
    assert not search.groups
    assert search.tests <= 14


def test_a_row_that_fails_only_alone_is_innocent():
    """Rows 0 to 9 fail unless somebody else is there; only row 20 is bad in company."""

    def test(rows):
        return Verdict.SAME if 20 in rows or set(rows) <= set(range(10)) else Verdict.PASSES

    assert isolate(list(range(30)), test).groups == [(20,)]


def test_a_model_that_needs_its_full_size_is_searched_at_full_size():
    sizes = []

    def test(rows):
        sizes.append(len(rows))
        if len(rows) % 8:
            return Verdict.OTHER
        return Verdict.SAME if 5 in rows else Verdict.PASSES

    assert isolate(list(range(16)), test).groups == [(5,)]
    assert max(sizes) == 16


def test_nothing_is_blamed_where_no_test_says_anything():
    search = isolate(list(range(16)), lambda rows: Verdict.OTHER)
    assert not search.groups
    assert not search.everyone


def test_one_row_that_fails_is_everyone():
    assert isolate([0], lambda rows: Verdict.SAME).everyone


def test_tests_see_rows_in_the_order_of_the_batch():
    def test(rows):
        assert rows == sorted(rows)
        return Verdict.SAME if {3, 11} & set(rows) else Verdict.PASSES

    assert isolate(list(range(16)), test).groups == [(3,), (11,)]
