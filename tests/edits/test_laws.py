"""The laws of an edit, against the element-by-element oracle, for random tensors, indices and values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from tests import witness
from tests.edits import oracle, strategies


def numpy_style(x, index):
    """What an index with negative steps chooses: torch's rule, the slices done by flipping first."""
    places = torch.arange(x.numel()).reshape(x.shape)
    items = list(index if isinstance(index, tuple) else (index,))
    if strategies.positive(index):
        return places[index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    at = items.index(Ellipsis) if any(item is Ellipsis for item in items) else len(items)
    items[at : at + 1] = [slice(None)] * (x.dim() - used)
    dim = 0
    for number, item in enumerate(items):
        if isinstance(item, slice) and (item.step or 1) < 0:
            # A permutation in the place of a slice, then the slice is a whole one again.
            places = places.index_select(dim, torch.tensor(range(x.shape[dim])[item], dtype=torch.int64))
            items[number] = slice(None)
        dim += item is not None
    return places[tuple(items)]


@st.composite
def cases(draw, indices):
    shape = draw(strategies.shapes())
    index = draw(indices(shape))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=torch.float64)
    places = numpy_style(x, index)
    value = torch.rand(strategies.values_for(draw, tuple(places.shape)), dtype=torch.float64) + 0.5
    if draw(st.booleans()):
        x, value = x.round(), value.round()  # ties and zeros
    return x, index, places, value


@pytest.mark.parametrize("name", oracle.NAMES)
@given(case=cases(strategies.basic_indices))
def test_a_basic_index(name, case):
    check(name, *case)


@pytest.mark.parametrize("name", oracle.NAMES)
@given(case=cases(strategies.advanced_indices))
def test_index_tensors_and_masks_mixed_with_slices(name, case):
    check(name, *case)


def check(name, x, index, places, value):
    if name == "power":
        x = x.abs() + 0.5

    def ours(x, value):
        return getattr(gg.at(x)[index], name)(value)

    def theirs(x, value):
        return oracle.edit(x.reshape(-1), (places,), name, value).reshape(x.shape)

    witness.check_against(ours, theirs, (x, value))
    assert torch.equal(gg.at(x)[index].get(), x.reshape(-1)[places])


@given(case=cases(strategies.advanced_indices))
def test_get_gives_the_gradient_of_indexing(case):
    x, index, places, _ = case
    witness.check_against(lambda x: gg.at(x)[index].get(), lambda x: x.reshape(-1)[places], (x,))


@given(case=cases(strategies.advanced_indices))
def test_apply_acts_as_often_as_a_place_is_named(case):
    x, index, places, _ = case

    def slowly(x):
        new = list(x.reshape(-1).unbind()) if x.numel() else []
        for place in places.reshape(-1).tolist():
            new[place] = torch.sin(new[place]) * 2
        return torch.stack(new).reshape(x.shape) if new else x.clone()

    witness.check_against(lambda x: gg.at(x)[index].apply(lambda part: torch.sin(part) * 2), slowly, (x,))


@given(case=cases(strategies.advanced_indices))
def test_setting_what_is_there_changes_nothing(case):
    x, index, _, _ = case
    assert torch.equal(gg.at(x)[index].set(gg.at(x)[index].get()), x)


@given(case=cases(strategies.advanced_indices))
def test_the_result_is_new_memory_and_reads_what_was_set(case):
    x, index, places, value = case
    new = gg.at(x)[index].set(value)
    assert not x.numel() or new.data_ptr() != x.data_ptr()
    assert new.shape == x.shape
    untouched = torch.ones(x.numel(), dtype=torch.bool).index_fill(0, places.reshape(-1), False).reshape(x.shape)
    assert torch.equal(new[untouched], x[untouched])


# --- out of range --------------------------------------------------------------------------------------------------


@st.composite
def wild_cases(draw):
    """Index tensors with entries out of range in one or two dimensions."""
    shape = draw(strategies.shapes(smallest=0).filter(bool))
    count = draw(st.integers(0, 4))
    width = draw(st.integers(1, len(shape)))
    index = tuple(
        torch.tensor(draw(st.lists(st.integers(-6, 6), min_size=count, max_size=count)), dtype=torch.int64)
        for _ in range(width)
    )
    x = torch.randn(shape, dtype=torch.float64).round()
    return x, index, torch.rand(count, *shape[width:], dtype=torch.float64) + 0.5


@pytest.mark.parametrize("name", oracle.NAMES)
@given(case=wild_cases())
def test_drop_is_the_edit_without_the_entries_that_are_out_of_range(name, case):
    x, index, value = case
    if name == "power":
        x = x.abs() + 0.5
    inside = torch.ones(len(value), dtype=torch.bool)
    for i, size in zip(index, x.shape, strict=False):
        inside &= (i >= -size) & (i < size)

    def without(x, value):
        if not inside.any():
            return x.clone()
        return oracle.edit(x, tuple(i[inside] for i in index), name, value[inside])

    witness.check_against(lambda x, v: getattr(gg.at(x)[index], name)(v, mode="drop"), without, (x, value))


@given(case=wild_cases())
def test_clip_is_the_edit_at_the_nearest_places(case):
    x, index, value = case
    if 0 in x.shape[: len(index)] and len(value):
        return  # there is no nearest place; test_errors has it
    near = tuple(i.clamp(-size, size - 1) if size else i for i, size in zip(index, x.shape, strict=False))
    witness.check_against(
        lambda x, v: gg.at(x)[index].set(v, mode="clip"), lambda x, v: oracle.edit(x, near, "set", v), (x, value)
    )


@given(case=wild_cases())
def test_get_fills_what_is_out_of_range(case):
    x, index, value = case
    rows = []
    for entry in zip(*(i.tolist() for i in index), strict=True):
        inside = all(-size <= i < size for i, size in zip(entry, x.shape, strict=False))
        rows.append(x[entry] if inside else torch.full(value.shape[1:], 7.0, dtype=x.dtype))
    expected = torch.stack(rows) if rows else value
    assert torch.equal(gg.at(x)[index].get(fill_value=7), expected)
