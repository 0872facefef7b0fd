"""What is refused, and in which words: what happened, why, and the fix as code."""

import re

import pytest
import torch

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError

X = torch.ones(2, 3, requires_grad=True)
ONCE = torch.ones(2, 3, requires_grad=True, device="meta")


def refused(error, what, fix):
    return pytest.raises(error, match=rf"^{re.escape(what)}\nWhy: .+\.\nFix: {re.escape(fix)}")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gate", lambda x: gg.gate(x, True)),
        ("scale_grad", lambda x: gg.scale_grad(x, 2.0)),
        ("reverse_grad", gg.reverse_grad),
        ("clip_grad", lambda x: gg.clip_grad(x, max_norm=1.0)),
        ("finite_grad", gg.finite_grad),
    ],
)
def test_x_that_is_no_tensor(name, call):
    with refused(ArgumentTypeError, f"{name}(): `x` is the list [1.0, 2.0].", "x=torch.as_tensor(x)"):
        call([1.0, 2.0])


@pytest.mark.parametrize(
    ("keep", "what", "fix"),
    [
        ([True, False], "the list [True, False]", "keep=torch.as_tensor(keep, dtype=torch.bool)"),
        (1, "the int 1", "keep=torch.as_tensor(keep, dtype=torch.bool)"),
        (torch.ones(2, 3), "a float32 tensor of shape (2, 3)", "keep=keep != 0"),
        (torch.ones(2, 3, dtype=torch.int64), "an int64 tensor of shape (2, 3)", "keep=keep != 0"),
    ],
    ids=str,
)
def test_keep_of_the_wrong_kind(keep, what, fix):
    with refused(ArgumentTypeError, f"gate(): `keep` is {what}.", fix):
        gg.gate(X, keep)


def test_keep_that_does_not_broadcast():
    rows = torch.tensor([True, False])
    with refused(
        ArgumentValueError,
        "gate(): `keep` has shape (2,), which does not broadcast to x of shape (2, 3).",
        "keep=keep.reshape(*keep.shape, 1)   # one answer for each row",
    ):
        gg.gate(X, rows)
    assert torch.equal(gg.gate(X, rows.reshape(*rows.shape, 1)), X)
    with refused(
        ArgumentValueError,
        "gate(): `keep` has shape (6,), which does not broadcast to x of shape (2, 3).",
        "keep=keep.reshape(2, 3)",
    ):
        gg.gate(X, torch.ones(6, dtype=torch.bool))
    with pytest.raises(ArgumentValueError, match=r"`keep` has shape \(2, 2, 3\)") as caught:
        gg.gate(X, torch.ones(2, 2, 3, dtype=torch.bool))
    assert not caught.value.fix  # nothing that is known to work


@pytest.mark.parametrize("keep", [None, "yes", {1: 2}], ids=str)
def test_what_cannot_become_a_mask_has_no_fix(keep):
    with pytest.raises(ArgumentTypeError, match="gate\\(\\): `keep` is") as caught:
        gg.gate(X, keep)
    assert not caught.value.fix


def test_keep_on_another_device():
    with refused(ArgumentValueError, "gate(): `keep` is on meta, x is on cpu.", "keep=keep.to('cpu')"):
        gg.gate(X, torch.ones(2, 3, dtype=torch.bool, device="meta"))
    # A 0-dim tensor on the CPU is as good as a number.
    assert gg.gate(ONCE, torch.tensor(True)).device.type == "meta"
    gg.gate(ONCE, torch.tensor(True)).sum().backward()


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (lambda g: g, ArgumentTypeError, "gate(): `keep(grad)` is a float32 tensor of shape (2, 3)."),
        (lambda g: None, ArgumentTypeError, "gate(): `keep(grad)` is None."),
        (lambda g: g[:, :2] > 0, ArgumentValueError, "gate(): `keep(grad)` has shape (2, 2), which does not broadcast"),
    ],
)
def test_the_answer_of_a_callable(answer, error, what):
    with pytest.raises(error, match=re.escape(what)):
        gg.gate(X, answer).sum().backward()


@pytest.mark.parametrize(
    ("factor", "error", "what", "fix"),
    [
        ("2", ArgumentTypeError, "is the str '2'.", "factor=2.0"),
        (None, ArgumentTypeError, "is None.", "factor=1.0"),
        (1j, ArgumentTypeError, "is the complex 1j.", "factor=1.0"),
        (True, ArgumentTypeError, "is the bool True.", "gg.gate(x, True)"),
        (torch.tensor([True, False, True]), ArgumentTypeError, "is a bool tensor of shape (3,).", "gg.gate(x, factor)"),
        (torch.tensor([1j]), ArgumentTypeError, "is a complex64 tensor of shape (1,).", "factor=factor.real"),
        (float("nan"), ArgumentValueError, "is the float nan.", "factor=1.0"),
        (float("-inf"), ArgumentValueError, "is the float -inf.", "factor=1.0"),
        (torch.ones(3, requires_grad=True), ArgumentValueError, "requires grad.", "factor=factor.detach()"),
        (torch.ones(3, device="meta"), ArgumentValueError, "is on meta, x is on cpu.", "factor=factor.to('cpu')"),
        (
            torch.ones(2),
            ArgumentValueError,
            "has shape (2,), which does not broadcast to x of shape (2, 3).",
            "factor=factor.reshape(*factor.shape, 1)",
        ),
    ],
    ids=str,
)
def test_factors(factor, error, what, fix):
    with refused(error, f"scale_grad(): `factor` {what}", fix):
        gg.scale_grad(X, factor)
    with refused(error, f"reverse_grad(): `strength` {what}", fix.replace("factor", "strength")):
        gg.reverse_grad(X, factor)


def test_limits():
    with refused(
        ArgumentValueError,
        "clip_grad(): neither `max_norm` nor `max_value` is given.",
        "gg.clip_grad(x, max_norm=1.0)",
    ):
        gg.clip_grad(X)
    with refused(ArgumentTypeError, "clip_grad(): `max_norm` is the str '1'.", "max_norm=1.0"):
        gg.clip_grad(X, max_norm="1")
    with refused(ArgumentTypeError, "clip_grad(): `max_value` is a float32 tensor of shape ().", "max_value=1.0"):
        gg.clip_grad(X, max_value=torch.tensor(1.0))
    with refused(ArgumentValueError, "clip_grad(): `max_norm` is the int 0.", "gg.gate(x, False)"):
        gg.clip_grad(X, max_norm=0)
    for bad in (-1.0, float("nan")):
        with refused(ArgumentValueError, f"clip_grad(): `max_value` is the float {bad}.", "max_value=1.0"):
            gg.clip_grad(X, max_value=bad)
    with refused(
        ArgumentValueError,
        "clip_grad(): `max_value` for a complex64 tensor of shape (2,).",
        "gg.clip_grad(x, max_norm=2.0)",
    ):
        gg.clip_grad(torch.ones(2, dtype=torch.complex64), max_value=2.0)
    with refused(ArgumentValueError, "clip_grad(): `per_sample` for a tensor without dimensions.", "per_sample=False"):
        gg.clip_grad(torch.tensor(1.0), max_norm=1.0, per_sample=True)


def test_fill():
    with refused(ArgumentTypeError, "finite_grad(): `fill_value` is None.", "fill_value=0.0"):
        gg.finite_grad(X, None)
    for bad in (float("nan"), float("inf"), 1e39):
        with refused(ArgumentValueError, f"finite_grad(): `fill_value` is the float {bad}.", "fill_value=0.0"):
            gg.finite_grad(X, bad)
    with pytest.raises(ArgumentValueError, match=r"is the float 100000.0.\nWhy: .* gradient of float16 has"):
        gg.finite_grad(X.half(), 1e5)
    assert gg.finite_grad(torch.ones(2, dtype=torch.int64)).dtype is torch.int64


def test_straight_through():
    soft = torch.rand(3)
    with refused(
        ArgumentTypeError,
        "straight_through(): `hard` is an int64 tensor of shape (3,), `soft` is a float32 tensor of shape (3,).",
        "gg.straight_through(hard.to(soft.dtype), soft)",
    ):
        gg.straight_through(torch.ones(3, dtype=torch.int64), soft)
    with pytest.raises(ArgumentTypeError, match="both have one floating dtype"):
        gg.straight_through(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    with refused(
        ArgumentValueError,
        "straight_through(): `hard` is a float32 tensor of shape (1,), `soft` is a float32 tensor of shape (3,).",
        "gg.straight_through(hard.expand_as(soft), soft)",
    ):
        gg.straight_through(torch.ones(1), soft)
    with refused(
        ArgumentValueError,
        "straight_through(): `hard` is a float32 tensor of shape (), `soft` is a float32 tensor of shape () on meta.",
        "gg.straight_through(hard.to(soft.device), soft)",
    ):
        gg.straight_through(torch.ones(()), soft[0].to("meta"))
    with refused(ArgumentTypeError, "straight_through(): `hard` is the float 1.0.", "hard=torch.as_tensor(hard)"):
        gg.straight_through(1.0, soft)
    with pytest.raises(ArgumentTypeError, match=r"straight_through\(\): `soft` is None."):
        gg.straight_through(soft, None)


def test_meters():
    with refused(ArgumentTypeError, "gate(): `meter` is the bool True.", "meter=gg.GateMeter()"):
        gg.gate(X, True, meter=True)
    with refused(
        ArgumentValueError, "reverse_grad(): a meter cannot count inside torch.compile or torch.func.", "meter=None"
    ):
        torch.func.grad(lambda x: gg.reverse_grad(x, meter=gg.GateMeter()).sum())(torch.ones(3))
