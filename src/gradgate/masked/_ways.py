"""Which way a call takes: may the host look at the values, are they worth cutting, does autograd record?"""

from __future__ import annotations

import torch

from gradgate._torch_compat import has_data, is_traced
from gradgate.masked._blocks import LANES
from gradgate.masked._valid import SMALL

__all__ = ["SMALL", "goes_by_blocks", "may_look", "nowhere_empty", "recorded"]


def goes_by_blocks(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Tell whether tensors take the way through the blocks.

    Args:
        x: The values.
        mask: The mask.

    Returns:
        False while something traces, on other devices, and for small tensors.
    """
    return (
        x.numel() >= SMALL
        and may_look(x, mask)
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_conj() or x.is_neg())  # their bits are not their values
        and x.element_size() in LANES
    )


def may_look(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Tell whether the host may look at values without making a device wait.

    Args:
        x: The values.
        mask: The mask.

    Returns:
        True for real values on the CPU while nothing traces.
    """
    return not is_traced() and x.is_cpu and mask.is_cpu and has_data(x, mask)


def recorded(x: torch.Tensor) -> bool:
    """Tell whether autograd records what is done with x.

    Args:
        x: The values.

    Returns:
        False for certain only; forward mode and torch.func count as recording.
    """
    return (x.requires_grad and torch.is_grad_enabled()) or is_traced()


def nowhere_empty(number: torch.Tensor) -> bool:
    """Tell whether the host sees that something is kept in every slice.

    Args:
        number: How many elements are kept in each slice.

    Returns:
        False as well where it may not look.
    """
    return may_look(number, number) and bool(number.item() if number.numel() == 1 else number.all())
