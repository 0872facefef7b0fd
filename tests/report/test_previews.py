"""Stored samples on the page: pictures where they are pictures, numbers otherwise, and never a crash."""

import base64
import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradgate._payload import encode
from gradgate.records import Incident
from gradgate.report import _columns
from gradgate.report._columns import Budget, choose_previews, look_at
from tests.report.made import MemoryBook

Pair = namedtuple("Pair", ["left", "right"])


def parts(tree, budget=None):
    return {part["path"]: part for part in look_at(encode(tree), budget or Budget())}


def pixels(part):
    data = list(base64.b64decode(part["pixels"]))
    return torch.tensor(data).reshape(part["height"], part["width"], part["channels"])


def test_a_grey_picture_is_shown_pixel_by_pixel():
    image = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    image[0, 0, 2, 3] = math.nan
    part = parts({"image": image})["image"]
    assert (part["kind"], part["height"], part["width"], part["channels"]) == ("picture", 8, 8, 1)
    assert (part["shape"], part["dtype"], part["bad"]) == ([1, 1, 8, 8], "f32", 1)
    shown = pixels(part)[:, :, 0]
    assert shown[2, 3] == 255
    assert shown[0, 0] == 0
    assert shown[7, 7] == 254
    expected = (image[0, 0].nan_to_num() * 254).round()
    assert ((shown - expected).abs() <= 1)[shown < 255].all()


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1, 3, 32, 48), "picture"),
        ((3, 32, 48), "picture"),
        ((1, 32, 48, 3), "picture"),
        ((32, 48, 4), "picture"),
        ((1, 32, 48), "picture"),
        ((32, 48), "picture"),
        ((1, 1, 32, 48), "picture"),
        ((1, 37), "numbers"),
        ((37,), "numbers"),
        ((), "numbers"),
        ((0, 5), "numbers"),
        ((2, 5, 8, 8), "numbers"),
        ((1, 2, 9), "numbers"),
    ],
    ids=str,
)
def test_what_looks_like_a_picture_is_one(shape, kind):
    assert parts(torch.rand(shape))[""]["kind"] == kind


def test_channels_first_and_last_are_the_same_picture():
    image = torch.rand(3, 16, 20)
    first, last = parts(image[None])[""], parts(image.movedim(0, -1)[None].contiguous())[""]
    assert torch.equal(pixels(first), pixels(last))


def test_a_large_picture_becomes_small_and_keeps_its_nan():
    image = torch.rand(1, 3, 300, 200)
    image[0, 1, 150, 100] = math.inf
    part = parts(image)[""]
    assert max(part["height"], part["width"]) <= 64
    assert part["bad"] == 1
    assert (pixels(part) == 255).sum() == 1


@pytest.mark.parametrize(("dtype", "name"), [(torch.uint8, "u8"), (torch.float64, "f64"), (torch.int64, "i64")])
def test_the_ends_of_the_range(dtype, name):
    part = parts(torch.full((1, 1, 8, 8), 3).to(dtype))[""]
    assert part["dtype"] == name
    assert (part["low"], part["high"]) == (3, 3)
    assert (part["black"], part["white"]) == ((0, 255) if dtype is torch.uint8 else (3, 3))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.uint8],
)
def test_numbers_of_each_kind(dtype):
    values = torch.tensor([[1, 2, 64]], dtype=dtype)
    part = parts(values)[""]
    assert part["values"] == [1, 2, 64]
    assert (part["low"], part["high"], part["bad"]) == (1, 64, 0)
    assert math.isclose(part["mean"], 67 / 3, rel_tol=1e-3)


def test_numbers_that_are_not_finite():
    part = parts(torch.tensor([math.nan, math.inf, -math.inf, 2.0]))[""]
    assert part["values"] == ["nan", "inf", "-inf", 2]
    assert (part["low"], part["high"], part["mean"], part["bad"]) == (2, 2, 2, 3)
    part = parts(torch.full((3,), math.nan))[""]
    assert (part["low"], part["mean"], part["bad"]) == (None, None, 3)


def test_the_parts_of_a_tree_have_paths():
    tree = {
        "x": [torch.ones(2), (None, "n/a")],
        "pair": Pair(1, 2.5),
        "flag": True,
        7: math.nan,
        "object": object(),
        "complex": torch.ones(2, dtype=torch.complex64),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
    }
    found = parts(tree)
    assert found["x[0]"]["values"] == [1, 1]
    texts = {path: part["text"] for path, part in found.items() if part["kind"] == "text"}
    assert texts == {
        "x[1][0]": "null",
        "x[1][1]": "n/a",
        "pair.left": "1",
        "pair.right": "2.5",
        "flag": "true",
        "7": "nan",
        "object": "not stored: builtins.object",
        "complex": "(tensor)",
        "float8": "f8_e4m3 of shape [2]",
    }


def test_many_parts_long_texts_and_deep_trees_are_cut():
    found = look_at(encode([torch.ones(1)] * 40), Budget())
    assert len(found) == 13
    assert found[-1]["text"] == "and more"
    assert len(look_at(encode("x" * 10_000), Budget())[0]["text"]) == 301
    deep = None
    for _ in range(40):
        deep = [deep]
    assert look_at(encode(deep), Budget())[0]["text"] == "nested too deeply"


def test_what_is_over_the_budget_is_shown_in_less():
    image = torch.rand(1, 3, 64, 64)
    assert parts(image, Budget(pixels=100))[""]["kind"] == "numbers"
    part = parts(torch.rand(100_000), Budget(values=1000))[""]
    assert part["part"]
    budget = Budget()
    look_at(encode(torch.rand(1, 1, 3000, 3000)), budget)
    assert budget.values > 1_000_000


@given(st.binary(max_size=200))
def test_bytes_that_are_no_sample_are_told_not_raised(data):
    (part,) = look_at(data, Budget())
    assert part["text"].startswith("The stored sample cannot be shown")


@given(st.data())
def test_damaged_samples_are_never_a_crash(data):
    whole = bytearray(encode({"x": torch.rand(1, 3, 8, 8), "y": [torch.ones(3), "text"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    for part in look_at(bytes(whole[: data.draw(st.integers(0, len(whole)))]), Budget()):
        assert part["kind"] in ("picture", "numbers", "text")


# --- which are shown -----------------------------------------------------------------------------------------------


def recorded(number, **more):
    return Incident(id=str(number), stage="loss", cause="exception", sample_id=str(number), **more)


def test_one_of_each_kind_comes_first_then_the_newest(monkeypatch):
    monkeypatch.setattr(_columns, "_SHOWN", 4)
    incidents = [recorded(0, where="rare.py:1"), *(recorded(number) for number in range(1, 50))]
    book = MemoryBook(incidents, {one.id: encode(torch.tensor([int(one.id)])) for one in incidents})
    shown = choose_previews(book, incidents)
    assert [place for place, _ in shown["of"]] == [0, 47, 48, 49]
    for place, sample in shown["of"]:
        assert shown["samples"][sample][0]["values"] == [place]


def test_the_same_sample_is_stored_once():
    incidents = [recorded(number) for number in range(5)]
    book = MemoryBook(incidents, {one.id: encode(torch.ones(1)) for one in incidents})
    shown = choose_previews(book, incidents)
    assert len(shown["samples"]) == 1
    assert shown["of"] == [(place, 0) for place in range(5)]


@pytest.mark.slow
def test_large_samples_do_not_make_a_large_page():
    incidents = [recorded(number) for number in range(60)]
    book = MemoryBook(incidents, {one.id: encode(torch.rand(1, 3, 64, 64)) for one in incidents})
    shown = choose_previews(book, incidents)
    bytes_of_pictures = sum(len(part.get("pixels", "")) for sample in shown["samples"] for part in sample)
    assert 100_000 < bytes_of_pictures < 400_000
