"""A gate on activations, parameters, views and odd tensors: the gradient is the same for each kind of x and mask."""

import numpy as np
import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError

NAN = float("nan")
KEEP = torch.tensor([[True, False, True], [False, True, True]])


def activation(values=None):
    return torch.randn(2, 3, requires_grad=True) * 1 if values is None else values * 1


class Marked(torch.Tensor):
    """A tensor of a user's own kind."""


def made_in_inference_mode():
    with torch.inference_mode():
        return KEEP.clone()


def of_numpy():
    """An activation in memory that torch does not own."""

    class Borrowed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(np.ones((2, 3), dtype=np.float32))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Borrowed.apply(torch.ones(2, 3, requires_grad=True))


KINDS = {
    "a mask of an activation": (activation(), KEEP),
    "a row of the mask": (activation(), KEEP[:1]),
    "0-dim": (activation(), torch.tensor(True)),
    "bool": (activation(), True),
    "callable": (activation(), lambda gradient: gradient > 0),
    "a mask of inference mode": (activation(), made_in_inference_mode()),
    "a mask of another kind": (activation(), KEEP.as_subclass(Marked)),
    "x of another kind": (activation().as_subclass(Marked), KEEP),
    "a leaf": (torch.ones(2, 3, requires_grad=True), KEEP),
    "a parameter": (nn.Parameter(torch.ones(2, 3)), KEEP),
    "a view of a parameter": (nn.Parameter(torch.ones(3, 2)).t(), KEEP),
    "a view of an activation": (torch.ones(3, 2, requires_grad=True).mul(1).t(), KEEP),
    "no gradient": (torch.ones(2, 3), KEEP),
    "complex": (torch.ones(2, 3, dtype=torch.complex64, requires_grad=True) * 1, KEEP),
    "memory of numpy": (of_numpy(), KEEP),
}


@pytest.mark.parametrize(("x", "keep"), KINDS.values(), ids=KINDS.keys())
def test_the_gradient_flows_where_keep(x, keep):
    gated = gg.gate(x, keep)
    if x.requires_grad:
        arriving = torch.ones_like(x)
        (gradient,) = torch.autograd.grad(gated, x, arriving)
        wide = torch.as_tensor(keep(arriving) if callable(keep) else keep).expand(2, 3)
        assert torch.equal(gradient.as_subclass(torch.Tensor), torch.where(wide, arriving, 0).as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    ("x", "keep", "error", "words"),
    [
        ([1.0], KEEP, ArgumentTypeError, "`x` is the list"),
        (activation(), KEEP.float(), ArgumentTypeError, "numbers would be ambiguous"),
        (activation(), torch.ones(3, 2, dtype=torch.bool), ArgumentValueError, "does not broadcast"),
        (activation(), torch.ones(2, 3, dtype=torch.bool, device="meta"), ArgumentValueError, "is on meta"),
    ],
)
def test_what_is_wrong_is_told_as_ever(x, keep, error, words):
    with pytest.raises(error, match=words):
        gg.gate(x, keep)


def test_without_recording_there_are_only_the_values():
    x = activation()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            gated = gg.gate(x, KEEP)
        assert gated is not x
        assert not gated.requires_grad
        assert gated.is_leaf
        assert torch.equal(gated, x)
    with torch.no_grad():
        gg.gate(x, KEEP).zero_()
    assert x.any(), "x is not written to"


def test_the_gradient_of_the_result_is_the_arriving_one():
    gated = gg.gate(activation(), KEEP)
    gated.retain_grad()
    (gated * 3).sum().backward()
    assert torch.equal(gated.grad, torch.full((2, 3), 3.0))


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "activation"])
@pytest.mark.parametrize(
    "gate",
    [
        lambda x: gg.gate(x, KEEP),
        lambda x: gg.gate(x, KEEP[:, :1]),
        lambda x: gg.gate(x, lambda gradient: gradient > 0),
        lambda x: gg.scale_grad(x, KEEP.float()),
        lambda x: gg.clip_grad(x, max_norm=0.5, per_sample=True),
        gg.reverse_grad,
        gg.finite_grad,
    ],
    ids=["mask", "rows", "callable", "factor", "clip", "reverse", "finite"],
)
def test_many_gradients_come_back_at_once(gate, leaf):
    """The whole Jacobian in one call, by torch's older vmap and by its newer one."""
    x = torch.randn(2, 3, requires_grad=True)
    y = gate(x if leaf else x * 2)

    def back(gradient):
        return torch.autograd.grad(y, x, gradient, retain_graph=True)[0]

    arriving = torch.eye(6).reshape(6, 2, 3)
    one_by_one = torch.stack([back(gradient) for gradient in arriving])
    assert torch.equal(torch.vmap(back)(arriving), one_by_one)
    (batched,) = torch.autograd.grad(y, x, arriving, is_grads_batched=True)
    assert torch.equal(batched, one_by_one)
