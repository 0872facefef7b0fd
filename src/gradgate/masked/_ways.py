"""Which way a call takes: may the host look at the values, are they worth cutting, does autograd record?"""

from __future__ import annotations

from typing import Literal

import torch

from gradgate._torch_compat import has_data, is_traced
from gradgate.masked._bits import LANES

__all__ = ["goes_by_blocks", "may_look", "may_read", "nowhere_empty", "recorded"]

Work = Literal["total", "fill", "many steps", "few steps"]

# From how many elements on bytes are quicker than torch.where, for the sum of a single slice and for a new tensor; and
# pieces quicker than a whole new tensor, for many steps that then stay in the cache and for few.
WORTH: dict[Work, float] = {"total": 1 << 13, "fill": 1 << 14, "many steps": 1 << 15, "few steps": 3 << 16}


def goes_by_blocks(x: torch.Tensor, mask: torch.Tensor, work: Work = "few steps") -> bool:
    """Tell whether tensors take the way through the blocks.

    Args:
        x: The values.
        mask: The mask.
        work: What is done with them.

    Returns:
        False while something traces, on other devices, and for small tensors.
    """
    return x.numel() >= WORTH[work] and may_read(x, mask)


def may_read(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Tell whether values may be read here and now, just as they lie in memory.

    Args:
        x: The values.
        mask: The mask.

    Returns:
        False as well for subclasses, other layouts, and bits that are not the values.
    """
    return (
        may_look(x, mask)
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_conj() or x.is_neg())
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
