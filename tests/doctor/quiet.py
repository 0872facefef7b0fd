"""Modes as they ought to be written: nothing in this file does nothing."""

import torch
from torch import nn

from tests.doctor.programs import X, healthy


@healthy("GG802", "GG803")
def blocks_and_decorators():
    layer = nn.Linear(4, 1)

    @torch.no_grad()
    def validate():
        return layer(X).mean()

    def step():
        with torch.no_grad():
            layer(X)
        validate()
        return layer(X).mean()

    return step, layer


@healthy("GG802", "GG803")
def a_function_of_the_same_name():
    layer = nn.Linear(4, 1)

    def no_grad():
        return layer.zero_grad()

    async def undecorated():
        return layer(X)

    def step():
        no_grad()
        assert undecorated is not None
        return layer(X).mean()

    return step, layer
