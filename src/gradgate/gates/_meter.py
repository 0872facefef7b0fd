"""How much gradient a gate has let through: counted where the gradient is, read as plain numbers."""

from __future__ import annotations

import math

import torch

__all__ = ["GateMeter"]


class GateMeter:
    """Counts what reaches a gate and what leaves it, since it was made or last reset.

    Give it to a gate as `meter=`. It counts during backward, on the device of the gradient and without waiting for
    it; only reading a number waits. One meter may serve several gates; it then tells their sum.

    An element is *stopped* when the gate withholds or replaces it: closed by `keep`, met by a factor of 0, or not
    finite at `finite_grad`. Elements that are only scaled or clipped *pass*; the norms tell by how much. Of a sparse
    gradient the stored elements count. Under a gradient scaler the norms are those of the scaled gradient.

    Examples:
        >>> meter = gg.GateMeter()
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> gg.gate(x, torch.tensor([[True], [False]]), meter=meter).sum().backward()
        >>> meter
        GateMeter(passed=2, stopped=2, norm_in=2, norm_out=1.414)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        self._elements = 0
        self._stopped: dict[torch.device, torch.Tensor] = {}
        self._squares: dict[torch.device, torch.Tensor] = {}

    def count(self, arrived: torch.Tensor, left: torch.Tensor | None, stopped: torch.Tensor | int) -> None:
        """Add one gradient; the gates call this.

        Args:
            arrived: The gradient that reached the gate.
            left: What went on upstream, None for nothing.
            stopped: How many of its elements were withheld or replaced.
        """
        device = arrived.device
        if device not in self._stopped:
            wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
            self._stopped[device] = torch.zeros((), dtype=torch.int64, device=device)
            self._squares[device] = torch.zeros(2, dtype=wide, device=device)
        with torch.no_grad():
            self._elements += arrived.numel()
            self._stopped[device] += stopped
            self._squares[device][0] += self._square_of_norm(arrived)
            if left is not None:
                self._squares[device][1] += self._square_of_norm(left)

    def _square_of_norm(self, gradient: torch.Tensor) -> torch.Tensor:
        values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=self._squares[gradient.device].dtype)
        return norm.square()

    @property
    def passed(self) -> int:
        """How many elements went on upstream."""
        return self._elements - self.stopped

    @property
    def stopped(self) -> int:
        """How many elements were withheld or replaced."""
        return sum(int(count) for count in self._stopped.values())

    @property
    def norm_in(self) -> float:
        """The norm of all that reached the gate."""
        return math.sqrt(sum(float(squares[0]) for squares in self._squares.values()))

    @property
    def norm_out(self) -> float:
        """The norm of all that went on upstream."""
        return math.sqrt(sum(float(squares[1]) for squares in self._squares.values()))

    def __repr__(self) -> str:
        return (
            f"GateMeter(passed={self.passed}, stopped={self.stopped}, "
            f"norm_in={self.norm_in:.4g}, norm_out={self.norm_out:.4g})"
        )
