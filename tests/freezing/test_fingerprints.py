"""Any movement is found; a single one is named with the value it had."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, FrozenMovedError
from gradgate.freezing._verify import fingerprint

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.int64,
]


@given(st.integers(1, 200), st.sampled_from(DTYPES), st.data())
def test_one_moved_element_is_named_with_its_old_value(count, dtype, data):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(4).to(dtype)
    then = fingerprint(values)
    assert then.moved(values.clone()) is None
    place = data.draw(st.integers(0, count - 1))
    moved = values.clone()
    moved[place] = torch.tensor(17.0).to(dtype)
    found = then.moved(moved)
    assert (found.first, found.last) == (place, place)
    assert found.before == values[place].item()


@given(st.integers(2, 300), st.data())
def test_several_moved_elements_are_found_and_the_first_is_within_what_is_named(count, data):
    values = torch.randn(count)
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=9, unique=True))
    moved = values.clone()
    moved[places] += 1
    found = fingerprint(values).moved(moved)
    assert found.first <= min(places) <= found.last
    assert found.last - found.first < 32


WIDTHS = [(torch.float32, torch.int32, 32), (torch.float64, torch.int64, 64), (torch.bfloat16, torch.int16, 16)]


@pytest.mark.parametrize(("dtype", "word", "bits"), WIDTHS)
def test_every_single_bit_counts(dtype, word, bits):
    values = torch.zeros(70, dtype=dtype)
    then = fingerprint(values)
    for bit in range(bits):
        moved = values.clone()
        moved.view(word)[65] ^= -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit
        found = then.moved(moved)
        assert found is not None
        assert found.first == found.last == 65
        assert found.before == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("count", [2, 3, 31, 32, 64])
def test_changed_signs_do_not_cancel(dtype, count):
    """A changed sign is the highest bit, which modular sums lose most easily."""
    values = torch.randn(64).to(dtype)
    moved = values.clone()
    moved[:count] = -moved[:count]
    assert fingerprint(values).moved(moved).first == 0


def test_empty_and_noncontiguous():
    assert fingerprint(torch.zeros(0)).moved(torch.zeros(0)) is None
    values = torch.randn(6, 70).t()
    assert fingerprint(values).moved(values.contiguous()) is None


def test_nan_is_itself():
    values = torch.full((5,), float("nan"))
    assert fingerprint(values).moved(values.clone()) is None


def test_swapped_elements_are_found():
    values = torch.arange(100.0)
    moved = values.clone()
    moved[[3, 70]] = moved[[70, 3]]
    assert fingerprint(values).moved(moved) is not None


def test_it_is_a_sixteenth_of_a_copy():
    sums = fingerprint(torch.zeros(320_000)).sums
    assert sums.numel() * sums.element_size() * 16 == 320_000 * 4


def test_pins_name_the_element_of_the_parameter():
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    pins = [gg.pin(weight, rows=[0, 2]), gg.pin(weight, frozen=torch.arange(12).reshape(3, 4) == 9)]
    weight.data[1, 1] = 50  # free
    for pin in pins:
        pin.verify()
    weight.data[2, 1] = 60
    for pin in pins:
        with pytest.raises(FrozenMovedError, match=r"parameter\[2, 1\] is frozen and moved: it was 9\.0 and is 60\.0"):
            pin.verify()


def test_several_are_told_as_several():
    model = torch.nn.Linear(40, 2)
    handle = gg.freeze(model)
    model.weight.data *= 2
    with pytest.raises(FrozenMovedError, match=r"weight\[0, 0\] to weight\[0, 31\] are frozen, and several of them"):
        gg.freezing.assert_frozen(handle)


def test_assert_frozen_is_an_assertion_and_wants_handles():
    model = torch.nn.Linear(2, 2)
    handle, pin = gg.freeze(model, "bias"), gg.pin(model.weight, rows=[0])
    gg.freezing.assert_frozen(handle, pin)
    model.weight.data[0, 0] += 1
    with pytest.raises(AssertionError, match=r"Fix: handle\.accept"):
        gg.freezing.assert_frozen(handle, pin)
    with pytest.raises(ArgumentTypeError, match="the module Linear is no handle"):
        gg.freezing.assert_frozen(model)


def test_what_is_free_cannot_be_verified():
    model = torch.nn.Linear(2, 2)
    handle, pin = gg.freeze(model, "bias"), gg.pin(model.weight, rows=[0])
    handle.thaw()
    pin.release()
    with pytest.raises(ArgumentValueError, match="this FreezeHandle freezes nothing any more"):
        handle.verify()
    with pytest.raises(ArgumentValueError, match="this Pin freezes nothing any more"):
        pin.verify()
