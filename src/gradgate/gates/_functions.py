"""The gates as functions and as modules: identity forward, a rule for the gradient on its way back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from gradgate._checks import broadcasts_to, check_fits, check_keep, check_tensor, wrong_type, wrong_value
from gradgate._names import describe
from gradgate._torch_private import SettingsModule
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.gates._rules import Chosen, Clip, Finite, GateMeter, Scale, put_rule, swap

Keep = bool | torch.Tensor | Callable[[torch.Tensor], torch.Tensor | bool]
"""Where a gradient flows: yes or no, a boolean tensor, or a function of the gradient that returns either."""


def gate(x: torch.Tensor, keep: Keep, *, meter: GateMeter | None = None) -> torch.Tensor:
    """Let the gradient flow back only where keep.

    Args:
        x: Any tensor.
        keep: True where the gradient flows. A bool; a boolean tensor that broadcasts to x, which is never read on the
            host; or a function that takes the gradient in backward and returns either, and must not write into it.
        meter: Counts what passes and what is stopped.

    Returns:
        The values of x, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: x is not a tensor, keep is none of the above, or meter is not a GateMeter.
        ArgumentValueError: keep is on another device, does not broadcast to x, or a meter is used in a traced call.

    Gradient:
        The arriving one where keep, exactly +0.0 elsewhere, also where NaN or Inf arrives. `keep=False` prunes: the
        result is detached, nothing upstream is computed or held, `.grad` stays None; so does a function that answers
        False. Forward mode follows the same rule (not with a function). Second derivatives follow it too.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = gg.gate(x, torch.tensor([True, False, True]))
        >>> (y * torch.tensor([2.0, float("nan"), 3.0])).sum().backward()
        >>> x.grad
        tensor([2., 0., 3.])
    """
    _check(x, "gate", keep=keep)
    return put_rule(x, Chosen(keep) if callable(keep) else Scale(keep), meter, "gate")


def scale_grad(x: torch.Tensor, factor: float | torch.Tensor, *, meter: GateMeter | None = None) -> torch.Tensor:
    """Multiply the gradient on its way back.

    Args:
        x: Any tensor.
        factor: A finite number, or a real tensor that broadcasts to x.
        meter: Counts what passes and what is stopped (a factor of 0 stops).

    Returns:
        The values of x, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: x is not a tensor, or factor is neither a real number nor a tensor of them.
        ArgumentValueError: factor is not finite, requires grad, is on another device or does not broadcast to x.

    Gradient:
        The arriving one times factor; exactly 0 where factor is 0, also where NaN or Inf arrives. A factor of 0 does
        not prune: what is upstream gets zeros, not None (for None: `gg.gate(x, False)`). factor is a constant, no
        gradient reaches it. Forward mode multiplies the tangent; second derivatives follow the same rule.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> gg.scale_grad(x, 0.1).sum().backward()
        >>> x.grad
        tensor([0.1000, 0.1000])
    """
    _check(x, "scale_grad", factor=factor)
    return put_rule(x, Scale(_floating(factor)), meter, "scale_grad")


def reverse_grad(
    x: torch.Tensor, strength: float | torch.Tensor = 1.0, *, meter: GateMeter | None = None
) -> torch.Tensor:
    """Reverse the gradient on its way back, as domain-adversarial training does.

    Args:
        x: Any tensor.
        strength: A finite number, or a real tensor that broadcasts to x.
        meter: Counts what passes and what is stopped (a strength of 0 stops).

    Returns:
        The values of x, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: x is not a tensor, or strength is neither a real number nor a tensor of them.
        ArgumentValueError: strength is not finite, requires grad, is on another device or does not broadcast to x.

    Gradient:
        The arriving one times -strength; everything else as in `scale_grad`. Forward mode reverses the tangent too.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> gg.reverse_grad(x, 0.5).sum().backward()
        >>> x.grad
        tensor([-0.5000, -0.5000])
    """
    _check(x, "reverse_grad", strength=strength)
    return put_rule(x, Scale(-_floating(strength)), meter, "reverse_grad")


def clip_grad(
    x: torch.Tensor,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    per_sample: bool = False,
    meter: GateMeter | None = None,
) -> torch.Tensor:
    """Limit the gradient on its way back.

    Args:
        x: Any tensor.
        max_norm: The gradient's 2-norm is brought down to this.
        max_value: Each element is brought into [-max_value, max_value]. Not for complex tensors.
        per_sample: Take the norm of each sample (over all dimensions but the first), not of the whole gradient.
        meter: Counts the norm before and after.

    Returns:
        The values of x, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: x is not a tensor or a limit is not a number.
        ArgumentValueError: No limit is given, one is not positive, max_value meets a complex tensor, or per_sample
            meets a tensor without dimensions.

    Gradient:
        The arriving one within the limits. With both limits the values are clipped first, so that one outlier does
        not shrink all the rest. Infinite elements are brought to max_value; NaN stays NaN. A norm that is NaN or
        infinite cannot be brought down: that gradient (or that sample's) goes on as it came. There is no forward mode:
        the rule depends on the gradient. Second derivatives go through the rule.

    Examples:
        >>> x = torch.zeros(2, requires_grad=True)
        >>> (gg.clip_grad(x, max_norm=1.0) * torch.tensor([30.0, 40.0])).sum().backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    _check(x, "clip_grad", max_norm=max_norm, max_value=max_value, per_sample=per_sample)
    if max_norm is None and max_value is None:
        why = "there is nothing to limit."
        fix = "gg.clip_grad(x, max_norm=1.0)"
        raise ArgumentValueError("clip_grad(): neither `max_norm` nor `max_value` is given.", why=why, fix=fix)
    return put_rule(x, Clip(max_norm, max_value, per_sample), meter, "clip_grad")


def finite_grad(x: torch.Tensor, fill_value: float = 0.0, *, meter: GateMeter | None = None) -> torch.Tensor:
    """Replace what is not finite in the gradient on its way back.

    Args:
        x: Any tensor.
        fill_value: What takes the place of NaN, Inf and -Inf.
        meter: Counts what was replaced, as `stopped`.

    Returns:
        The values of x, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: x is not a tensor or fill_value is not a number.
        ArgumentValueError: fill_value is not finite in the dtype of x.

    Gradient:
        The arriving one where it is finite, `fill_value` elsewhere (a complex number is finite if both its parts are).
        There is no forward mode. Second derivatives flow where the gradient was finite.

    Examples:
        >>> meter = gg.GateMeter()
        >>> x = torch.zeros(2, requires_grad=True)
        >>> torch.sqrt(gg.finite_grad(x, meter=meter)).sum().backward()
        >>> x.grad, meter.stopped
        (tensor([0., 0.]), 2)
    """
    _check(x, "finite_grad", fill_value=fill_value)
    return put_rule(x, Finite(fill_value), meter, "finite_grad")


def straight_through(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """Return the value of one tensor with the gradient of another.

    For everything whose own derivative is 0 or unwanted: rounding, argmax, sampling, clamping.

    Args:
        hard: The values, bit for bit, also where soft is NaN or Inf.
        soft: Takes the gradient; of the same shape, dtype and device.

    Returns:
        The values of hard, in the same memory as long as neither is written to.

    Raises:
        ArgumentTypeError: One of them is not a tensor, or their dtypes differ or are not floating.
        ArgumentValueError: Their shapes or devices differ.

    Gradient:
        The arriving one, unchanged, to soft; nothing to hard, not even zeros. Forward mode takes the tangent of soft.

    Examples:
        >>> x = torch.tensor([0.2, 0.7], requires_grad=True)
        >>> y = gg.straight_through(x.round(), x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([0., 1.]), tensor([1., 1.]))
    """
    check_tensor(hard, name="hard", function="straight_through")
    check_tensor(soft, name="soft", function="straight_through")
    error: type[ArgumentTypeError | ArgumentValueError] = ArgumentValueError
    floating = soft.is_floating_point() or soft.is_complex()
    if hard.dtype != soft.dtype or not floating:
        error, fix = ArgumentTypeError, "gg.straight_through(hard.to(soft.dtype), soft)" if floating else ""
    elif hard.shape != soft.shape:
        fits = broadcasts_to(hard.shape, soft.shape)
        fix = "gg.straight_through(hard.expand_as(soft), soft)" if fits else ""
    elif hard.device != soft.device:
        fix = "gg.straight_through(hard.to(soft.device), soft)"
    else:
        return swap(hard, soft, "straight_through")
    why = "the gradient of one becomes that of the other, so both have one floating dtype, one shape and one device."
    raise error(f"straight_through(): `hard` is {describe(hard)}, `soft` is {describe(soft)}.", why=why, fix=fix)


def _floating(factor: float | torch.Tensor) -> float | torch.Tensor:
    # The negative of an unsigned integer is no integer of its kind.
    return factor.float() if isinstance(factor, torch.Tensor) and not factor.is_floating_point() else factor


# --- Checks of their arguments --------------------------------------------------------------------------------------


def _check(x: torch.Tensor, function: str, **settings: Any) -> None:
    check_tensor(x, name="x", function=function)
    for name, value in settings.items():
        _CHECKS[name](value, x, name, function)


def _check_answer(keep: Any, x: torch.Tensor, name: str, function: str) -> None:
    if not isinstance(keep, bool) and not callable(keep):
        check_keep(keep, x, name=name, function=function)


def _check_factor(factor: Any, x: torch.Tensor, name: str, function: str) -> None:
    """Check that a factor is a finite number, or a real tensor that fits x and requires no gradient."""
    why = "a gradient is multiplied by a real number or a tensor of them; yes or no is the question of gg.gate."
    if isinstance(factor, torch.Tensor):
        if factor.dtype is torch.bool or factor.is_complex():
            fix = f"gg.gate(x, {name})" if factor.dtype is torch.bool else f"{name}={name}.real"
            raise wrong_type(factor, name, function, why, fix)
        if factor.requires_grad:
            why = "the value of the result does not depend on it, so no gradient would ever reach it."
            raise ArgumentValueError(f"{function}(): `{name}` requires grad.", why=why, fix=f"{name}={name}.detach()")
        check_fits(factor, x, name=name, function=function)
    elif not _is_number(factor):
        fix = f"gg.gate(x, {factor})" if isinstance(factor, bool) else _as_number(factor, name)
        raise wrong_type(factor, name, function, why, fix)
    elif not -math.inf < factor < math.inf:  # torch.compile cannot ask math.isfinite of a number that changes
        raise wrong_value(factor, name, function, "it would make every gradient NaN or infinite.", f"{name}=1.0")


def _check_limit(limit: Any, x: torch.Tensor, name: str, function: str) -> None:
    if limit is None:
        return
    if not _is_number(limit):
        raise wrong_type(limit, name, function, "a limit is a plain number.", _as_number(limit, name))
    if not limit > 0:
        why = "a limit is positive; to let nothing through there is gg.gate."
        raise wrong_value(limit, name, function, why, "gg.gate(x, False)" if limit == 0 else f"{name}=1.0")
    if name == "max_value" and x.is_complex():
        why = "complex numbers have no order to clip them by."
        fix = f"gg.clip_grad(x, max_norm={limit})"
        raise ArgumentValueError(f"{function}(): `max_value` for {describe(x)}.", why=why, fix=fix)


def _check_per_sample(per_sample: Any, x: torch.Tensor, name: str, function: str) -> None:
    if not isinstance(per_sample, bool):
        raise wrong_type(per_sample, name, function, "it is True or False.", "per_sample=True")
    if per_sample and x.dim() == 0:
        why = "samples lie along the first dimension."
        fix = "per_sample=False"
        raise ArgumentValueError(f"{function}(): `per_sample` for a tensor without dimensions.", why=why, fix=fix)


def _check_fill_value(fill_value: Any, x: torch.Tensor, name: str, function: str) -> None:
    if not _is_number(fill_value):
        raise wrong_type(fill_value, name, function, "it is a plain number.", "fill_value=0.0")
    floating = x.is_floating_point() or x.is_complex()
    if not abs(fill_value) <= (torch.finfo(x.dtype) if floating else torch.finfo()).max:
        why = f"what replaces a non-finite gradient of {str(x.dtype).removeprefix('torch.')} has to be finite itself."
        raise wrong_value(fill_value, name, function, why, "fill_value=0.0")


def _is_number(value: Any) -> bool:
    """Whether a value is a plain real number; True and False are answers, not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_number(value: Any, name: str) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = 1.0
    return f"{name}={number if math.isfinite(number) else 1.0}"


_CHECKS = {
    "keep": _check_answer,
    "factor": _check_factor,
    "strength": _check_factor,
    "max_norm": _check_limit,
    "max_value": _check_limit,
    "per_sample": _check_per_sample,
    "fill_value": _check_fill_value,
}


# --- Modules, for nn.Sequential: settings that can be changed while training, and no parameters ----------------------


@dataclass(eq=False, repr=False)
class GateModule(SettingsModule):
    """What the modules share: their settings are plain attributes that move with the module, saved only on request."""

    # Tensors among them are no buffers: DistributedDataParallel would overwrite each rank's mask by that of rank 0.

    settings: ClassVar[tuple[str, ...]] = ()
    function: ClassVar[Callable[..., torch.Tensor]]

    meter: GateMeter | None = field(default=None, kw_only=True)
    save: bool = field(default=False, kw_only=True)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        torch.nn.Module.__init__(self)  # before a dataclass sets its fields
        return self

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
                what = f"{type(self).__name__}: `{name}` is {describe(value)}, and save=True."
                why = "a function cannot be put into a state_dict."
                raise ArgumentTypeError(what, why=why, fix=f"gg.{type(self).__name__}({name}, save=False)")
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


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return describe(value).removeprefix("a ")
    return getattr(value, "__name__", None) or repr(value)


@dataclass(eq=False, repr=False)
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

    keep: Keep = True
    settings = ("keep",)
    function = staticmethod(gate)


@dataclass(eq=False, repr=False)
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

    factor: float | torch.Tensor
    settings = ("factor",)
    function = staticmethod(scale_grad)


@dataclass(eq=False, repr=False)
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

    strength: float | torch.Tensor = 1.0
    settings = ("strength",)
    function = staticmethod(reverse_grad)


@dataclass(eq=False, repr=False)
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

    max_norm: float | None = None
    max_value: float | None = None
    per_sample: bool = False
    settings = ("max_norm", "max_value", "per_sample")
    function = staticmethod(clip_grad)


@dataclass(eq=False, repr=False)
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

    fill_value: float = 0.0
    settings = ("fill_value",)
    function = staticmethod(finite_grad)
