"""How far each gate goes: the rows of the truth table for the room of gates."""

import torch

import gradgate as gg
from tests.gates import oracles
from tests.truth import Row

X = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
EMPTY = torch.zeros(3, 0)
KEEP = torch.tensor([[True], [False], [True]])
FACTOR = torch.tensor([0.5, 0.0, -2.0, 1.0])

NO_FORWARD_MODE = "The rule depends on the incoming gradient, and forward mode has none; it raises."


def chosen(gradient):
    return gradient.real > 0


ROWS = [
    Row("gg.gate", gg.gate, (X, KEEP), (EMPTY, KEEP), oracle=oracles.gate),
    Row(
        "gg.gate (callable)",
        lambda x: gg.gate(x, chosen),
        (X,),
        (EMPTY,),
        no={"jvp": NO_FORWARD_MODE},
        oracle=lambda x: oracles.Plain.apply(x, lambda g: torch.where(chosen(g), g, torch.zeros_like(g))),
    ),
    Row(
        "gg.scale_grad",
        lambda x: gg.scale_grad(x, FACTOR),
        (X,),
        (torch.zeros(0, 4),),
        oracle=lambda x: oracles.scale_grad(x, FACTOR),
    ),
    Row(
        "gg.reverse_grad",
        lambda x: gg.reverse_grad(x, 0.5),
        (X,),
        (EMPTY,),
        oracle=lambda x: oracles.reverse_grad(x, 0.5),
    ),
    Row(
        "gg.clip_grad",
        lambda x: gg.clip_grad(x, max_norm=0.5),
        (X,),
        (EMPTY,),
        no={"jvp": NO_FORWARD_MODE},
        oracle=lambda x: oracles.Plain.apply(x, half_a_unit),
    ),
    Row("gg.finite_grad", gg.finite_grad, (X,), (EMPTY,), no={"jvp": NO_FORWARD_MODE}, oracle=oracles.finite_grad),
    Row(
        "gg.straight_through",
        lambda x: gg.straight_through(x.detach().sgn(), x * x),
        (X,),
        (EMPTY,),
        oracle=lambda x: oracles.straight_through(x.sgn(), x * x),
    ),
    Row("gg.check", lambda x: gg.check(x, "finite") * 2, (X,), (EMPTY,), oracle=lambda x: x * 2),
]


def half_a_unit(gradient):
    norm = gradient.abs().square().sum().sqrt()
    return gradient * torch.where(norm > 0.5, 0.5 / norm, 1.0).to(gradient.dtype)
