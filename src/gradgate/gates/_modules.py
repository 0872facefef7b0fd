"""The gates as modules, for nn.Sequential: settings that can be changed while training, and no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gradgate._names import describe
from gradgate._torch_private import SettingsModule
from gradgate.errors import ArgumentTypeError
from gradgate.gates._functions import (
    Keep,
    check_answer,
    check_factor,
    check_fill_value,
    check_limit,
    check_per_sample,
    clip_grad,
    finite_grad,
    gate,
    reverse_grad,
    scale_grad,
)
from gradgate.gates._rules import GateMeter


class GateModule(SettingsModule):
    """What the modules share: their settings are plain attributes that move with the module, saved only on request."""

    # Tensors among them are no buffers: DistributedDataParallel would overwrite each rank's mask by that of rank 0.

    settings: ClassVar[tuple[str, ...]] = ()
    function: ClassVar[Callable[..., torch.Tensor]]

    def __init__(self, meter: GateMeter | None, save: bool) -> None:
        super().__init__()
        self.meter = meter
        self.save = save

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settings:  # also of a setting that is changed while training, as far as it goes without x
            like = value if isinstance(value, torch.Tensor) else torch.zeros(1, dtype=torch.float64)
            _CHECKS[name](value, like, name, type(self).__name__)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = {name: getattr(self, name) for name in self.settings}
        return type(self).function(x, **settings, meter=self.meter)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={_shown(getattr(self, name))}" for name in self.settings)

    def move_settings(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in self.settings:
            if isinstance(value := getattr(self, name), torch.Tensor):
                setattr(self, name, fn(value))

    def save_settings(self, destination: dict[str, Any], prefix: str) -> None:
        for name in self.settings if self.save else ():
            value = getattr(self, name)
            if callable(value):
                raise ArgumentTypeError(
                    f"{type(self).__name__}: `{name}` is {describe(value)}, and save=True.",
                    why="a function cannot be put into a state_dict.",
                    fix=f"gg.{type(self).__name__}({name}, save=False)",
                )
            if value is not None:
                destination[prefix + name] = torch.as_tensor(value).detach().clone()

    def load_settings(self, state_dict: dict[str, Any], prefix: str, missing_keys: list[str]) -> None:
        for name in self.settings if self.save else ():
            saved, value = state_dict.pop(prefix + name, None), getattr(self, name)
            if saved is None:
                missing_keys += [prefix + name] if value is not None else []
            elif isinstance(value, torch.Tensor) or saved.dim():
                setattr(self, name, saved.detach().to(getattr(value, "device", None), copy=True))
            else:
                setattr(self, name, saved.item())


_CHECKS = {
    "keep": check_answer,
    "factor": check_factor,
    "strength": check_factor,
    "max_norm": check_limit,
    "max_value": check_limit,
    "per_sample": check_per_sample,
    "fill_value": check_fill_value,
}


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return describe(value).removeprefix("a ")
    return getattr(value, "__name__", None) or repr(value)


class Gate(GateModule):
    """`gate` as a module.

    Args:
        keep: Where the gradient flows; see `gate`. Set `module.keep` at any time, also to another kind.
        meter: Counts what passes and what is stopped.
        save: Put keep into the state_dict.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), gg.Gate(keep=False), torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> model[0].weight.grad is None, model[2].weight.grad is None
        (True, False)
        >>> model[1].keep = True    # from now on the first layer learns too
    """

    settings = ("keep",)
    function = staticmethod(gate)

    def __init__(self, keep: Keep = True, *, meter: GateMeter | None = None, save: bool = False) -> None:
        super().__init__(meter, save)
        self.keep = keep


class ScaleGrad(GateModule):
    """`scale_grad` as a module.

    Args:
        factor: What the gradient is multiplied by; see `scale_grad`. Set `module.factor` at any time.
        meter: Counts what passes and what is stopped.
        save: Put factor into the state_dict.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), gg.ScaleGrad(0.1), torch.nn.Linear(4, 1))
        >>> model[1]
        ScaleGrad(factor=0.1)
    """

    settings = ("factor",)
    function = staticmethod(scale_grad)

    def __init__(self, factor: float | torch.Tensor, *, meter: GateMeter | None = None, save: bool = False) -> None:
        super().__init__(meter, save)
        self.factor = factor


class ReverseGrad(GateModule):
    """`reverse_grad` as a module.

    Args:
        strength: How strongly the gradient is reversed; see `reverse_grad`. Set `module.strength` at any time.
        meter: Counts what passes and what is stopped.
        save: Put strength into the state_dict.

    Examples:
        >>> reverse = gg.ReverseGrad(strength=0.0, save=True)
        >>> for step in range(3):
        ...     reverse.strength = step / 2    # a schedule is an assignment
        >>> dict(reverse.state_dict())
        {'strength': tensor(1.)}
    """

    settings = ("strength",)
    function = staticmethod(reverse_grad)

    def __init__(
        self, strength: float | torch.Tensor = 1.0, *, meter: GateMeter | None = None, save: bool = False
    ) -> None:
        super().__init__(meter, save)
        self.strength = strength


class ClipGrad(GateModule):
    """`clip_grad` as a module.

    Args:
        max_norm: The largest norm; see `clip_grad`. Set `module.max_norm` at any time, and the others.
        max_value: The largest value.
        per_sample: Take the norm of each sample.
        meter: Counts the norm before and after.
        save: Put the settings into the state_dict.

    Examples:
        >>> gg.ClipGrad(max_norm=1.0)
        ClipGrad(max_norm=1.0, max_value=None, per_sample=False)
    """

    settings = ("max_norm", "max_value", "per_sample")
    function = staticmethod(clip_grad)

    def __init__(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        per_sample: bool = False,
        *,
        meter: GateMeter | None = None,
        save: bool = False,
    ) -> None:
        super().__init__(meter, save)
        self.max_norm = max_norm
        self.max_value = max_value
        self.per_sample = per_sample


class FiniteGrad(GateModule):
    """`finite_grad` as a module.

    Args:
        fill_value: What replaces NaN, Inf and -Inf; see `finite_grad`. Set `module.fill_value` at any time.
        meter: Counts what was replaced, as `stopped`.
        save: Put fill_value into the state_dict.

    Examples:
        >>> gg.FiniteGrad()
        FiniteGrad(fill_value=0.0)
    """

    settings = ("fill_value",)
    function = staticmethod(finite_grad)

    def __init__(self, fill_value: float = 0.0, *, meter: GateMeter | None = None, save: bool = False) -> None:
        super().__init__(meter, save)
        self.fill_value = fill_value
