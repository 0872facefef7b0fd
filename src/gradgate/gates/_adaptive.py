"""Clipping of parameter gradients by what is usual for each parameter, or by the size of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from gradgate._checks import check_module, wrong_value
from gradgate._torch_private import whole_tensor

_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in its median absolute deviations."""
_LEAST_SPREAD = 0.01
"""The least spread of a history, as a share of its median: norms that never change are no reason to clip."""
_LEAST_WEIGHT = 1e-3
"""The least norm of a weight: one that is 0 can still learn."""


class AdaptiveClip:
    """Clips the gradient of each parameter by its own history, or by the size of its weights, and counts.

    Call it between backward and `optimizer.step()`, with FSDP2 in every process. A gradient that is not finite stays as
    it is and is not in the history: `gg.Guard` finds the sample that made it.

    By `"history"`, the norm of a gradient may be `median + threshold * spread` of its last `window` norms; the spread
    is 1.4826 times their median absolute deviation, and at least 0.01 of the median. A gradient that is larger is
    scaled down to that, and counts in the history with it.

    By `"ratio"`, the gradient of each row of a weight (of a whole bias, or one that is sparse) may be `threshold` times
    the norm of that row, which counts as 0.001 at least.

    Args:
        model: The model; parameters without a gradient are skipped.
        by: `"history"` or `"ratio"`.
        threshold: How many spreads over the median, 6 by default; or the ratio, 0.01 by default.
        window: How many norms of each parameter are remembered.
        warmup: How many norms of a parameter are needed before it is clipped.

    Raises:
        ArgumentTypeError: The model is no module.
        ArgumentValueError: A number is out of range.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> clip = gg.AdaptiveClip(model, warmup=3)
        >>> for norm in (3.0, 4.0, 5.0, 100.0):
        ...     model.weight.grad = torch.tensor([[norm, 0.0]])
        ...     _ = clip()  # then optimizer.step()
        >>> round(model.weight.grad[0, 0].item(), 4), clip.clipped  # 4 + 6 * 1.4826 * 1
        (12.8956, {'weight': 1})
    """

    def __init__(
        self,
        model: torch.nn.Module,
        by: Literal["history", "ratio"] = "history",
        *,
        threshold: float | None = None,
        window: int = 200,
        warmup: int = 20,
    ) -> None:
        check_module(model, name="model", function="AdaptiveClip")
        if by not in ("history", "ratio"):
            raise wrong_value(by, "by", "AdaptiveClip", 'it is "history" or "ratio".', 'by="history"')
        self.by = by
        self.threshold = (6.0 if by == "history" else 0.01) if threshold is None else threshold
        for name, value, least in (("threshold", self.threshold, 0), ("window", window, 1), ("warmup", warmup, 1)):
            if isinstance(value, bool) or not value >= least:
                why = f"it is a number from {least} on."
                raise wrong_value(value, name, "AdaptiveClip", why, f"{name}={least + 5}")
        if warmup > window:
            why = f"only window={window} norms are remembered."
            raise wrong_value(warmup, "warmup", "AdaptiveClip", why, f"warmup={window}")
        self.window = window
        self.warmup = warmup
        self.steps = 0
        self._parameters = dict(model.named_parameters())
        self._history = torch.full((len(self._parameters), window), float("nan"))
        self._counts = torch.zeros(len(self._parameters), dtype=torch.int64)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Clip the gradients that are there, in place, and return how many were clipped, without a host sync."""
        found = [(row, one, one.grad) for row, one in enumerate(self._parameters.values()) if one.grad is not None]
        self.steps += 1
        if not found:
            return torch.zeros((), dtype=torch.int64)
        device = found[0][2].device
        self._history, self._counts = self._history.to(device), self._counts.to(device)
        rows = torch.tensor([row for row, _, _ in found], device=device)
        if self.by == "ratio":
            scales = [self._ratio(weight, gradient) for _, weight, gradient in found]
            clipped = torch.stack([whole_tensor((scale < 1).any()).to(device) for scale in scales])
        else:
            norms = torch.stack([whole_tensor(_norm(gradient)).float().to(device) for _, _, gradient in found])
            factors = self._by_history(rows, norms)
            scales, clipped = list(factors.unbind()), factors < 1
        for (_, _, gradient), scale in zip(found, scales, strict=True):
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        self._counts[rows] += clipped
        return clipped.sum()

    @property
    def clipped(self) -> dict[str, int]:
        """How often each parameter was clipped; those that never were are not in it."""
        counts = dict(zip(self._parameters, self._counts.tolist(), strict=True))
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the counts, to save them with a checkpoint."""
        return {"history": self._history.clone(), "counts": self._counts.clone(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the history of a saved run.

        Args:
            state: What `state_dict` returned, of a model with the same parameters and the same `window`.

        Raises:
            ArgumentValueError: It has another shape.
        """
        history = state.get("history")
        if not isinstance(history, torch.Tensor) or history.shape != self._history.shape:
            why = f"it has the norms of each parameter, of shape {tuple(self._history.shape)}."
            raise wrong_value(history, "history", "AdaptiveClip.load_state_dict", why, "")
        self._history, self._counts, self.steps = history.clone(), state["counts"].clone(), state["steps"]

    def __repr__(self) -> str:
        return f"AdaptiveClip(by={self.by!r}, steps={self.steps}, clipped={sum(self.clipped.values())})"

    def _by_history(self, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Return the factor of each gradient, and record its norm."""
        history = self._history[rows]
        middle = history.nanquantile(0.5, dim=1)
        spread = _NORMAL * (history - middle[:, None]).abs().nanquantile(0.5, dim=1)
        limit = middle + self.threshold * torch.maximum(spread, _LEAST_SPREAD * middle)
        known = history.isfinite().sum(1) >= self.warmup
        usual = ~known | (norms <= limit) | ~norms.isfinite()
        factors = torch.where(usual, 1.0, limit / norms)
        noted = torch.where(norms.isfinite(), norms * factors, float("nan"))
        self._history[rows, (self.steps - 1) % self.window] = noted
        return factors

    def _ratio(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        by_row = weight.dim() > 1 and not gradient.is_sparse
        limit, norm = self.threshold * _norm(weight, by_row).clamp(min=_LEAST_WEIGHT), _norm(gradient, by_row)
        return torch.where((norm > limit) & norm.isfinite(), limit / norm, 1.0)


def _norm(x: torch.Tensor, by_row: bool = False) -> torch.Tensor:
    values = x.coalesce().values() if x.is_sparse else x
    dims = tuple(range(1, x.dim())) if by_row else None
    norm: torch.Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=by_row)
    return norm
