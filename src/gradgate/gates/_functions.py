"""The gates as functions: identity forward, a rule for the gradient on its way back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gradgate._checks import broadcasts_to, check_fits, check_keep, check_tensor, wrong_type, wrong_value
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.gates._gate_nodes import put_rule, swap
from gradgate.gates._rules import Chosen, Clip, Finite, GateMeter, Scale

Keep = bool | torch.Tensor | Callable[[torch.Tensor], torch.Tensor | bool]
"""Where a gradient flows: yes or no, a boolean tensor, or a function of the gradient that returns either."""


def gate(x: torch.Tensor, keep: Keep, *, meter: GateMeter | None = None) -> torch.Tensor:
    """Let the gradient flow back only where keep.

    Args:
        x: Any tensor.
        keep: True where the gradient flows. A bool for all of x; a boolean tensor that broadcasts to x (0-dim, one
            answer for each element, `(n, 1)` for each row); or a function that takes the gradient in backward and
            returns such a tensor or a bool. A tensor is never read on the host; the function must not write into the
            gradient.
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
    check_tensor(x, name="x", function="gate")
    check_answer(keep, x, "keep", "gate")
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
    return _scale(x, factor, 1, meter, "factor", "scale_grad")


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
        The arriving one times -strength; everything else as in `scale_grad`. Forward mode reverses the tangent too, so
        that jvp and vjp agree with each other (and not with the forward values, on purpose).

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> gg.reverse_grad(x, 0.5).sum().backward()
        >>> x.grad
        tensor([-0.5000, -0.5000])
    """
    return _scale(x, strength, -1, meter, "strength", "reverse_grad")


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
        not shrink all the rest, and both limits hold in the end. Infinite elements are brought to max_value; NaN
        stays NaN. A norm that is NaN or infinite cannot be brought down: that gradient (or that sample's) goes on as
        it came, for `finite_grad` or the guard to see; finite gradients are clipped however large they are. There is
        no forward mode: the rule depends on the gradient. Second derivatives go through the rule.

    Examples:
        >>> x = torch.zeros(2, requires_grad=True)
        >>> (gg.clip_grad(x, max_norm=1.0) * torch.tensor([30.0, 40.0])).sum().backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    check_tensor(x, name="x", function="clip_grad")
    check_limit(max_norm, x, "max_norm", "clip_grad")
    check_limit(max_value, x, "max_value", "clip_grad")
    check_per_sample(per_sample, x, "per_sample", "clip_grad")
    if max_norm is None and max_value is None:
        raise ArgumentValueError(
            "clip_grad(): neither `max_norm` nor `max_value` is given.",
            why="there is nothing to limit.",
            fix="gg.clip_grad(x, max_norm=1.0)",
        )
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
        There is no forward mode: the rule depends on the gradient. Second derivatives flow where the gradient was
        finite.

    Examples:
        >>> meter = gg.GateMeter()
        >>> x = torch.zeros(2, requires_grad=True)
        >>> torch.sqrt(gg.finite_grad(x, meter=meter)).sum().backward()
        >>> x.grad, meter.stopped
        (tensor([0., 0.]), 2)
    """
    check_tensor(x, name="x", function="finite_grad")
    check_fill_value(fill_value, x, "fill_value", "finite_grad")
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
    raise error(
        f"straight_through(): `hard` is {describe(hard)}, `soft` is {describe(soft)}.",
        why="the gradient of one becomes that of the other, so both have one floating dtype, one shape and one device.",
        fix=fix,
    )


def _scale(
    x: torch.Tensor, factor: float | torch.Tensor, sign: int, meter: GateMeter | None, name: str, function: str
) -> torch.Tensor:
    check_tensor(x, name="x", function=function)
    check_factor(factor, x, name, function)
    if isinstance(factor, torch.Tensor) and not factor.is_floating_point():
        factor = factor.float()  # the negative of an unsigned integer is no integer of its kind
    return put_rule(x, Scale(factor if sign == 1 else -factor), meter, function)


# --- Checks of their arguments: each takes the value, x, and the names of the argument and of the function ----------


def check_answer(keep: Any, x: torch.Tensor, name: str, function: str) -> None:
    if not isinstance(keep, bool) and not callable(keep):
        check_keep(keep, x, name=name, function=function)


def check_factor(factor: Any, x: torch.Tensor, name: str, function: str) -> None:
    """Check that a factor is a finite number, or a real tensor that fits x and requires no gradient."""
    why = "a gradient is multiplied by a real number or a tensor of them; yes or no is the question of gg.gate."
    if isinstance(factor, torch.Tensor):
        if factor.dtype is torch.bool or factor.is_complex():
            fix = f"gg.gate(x, {name})" if factor.dtype is torch.bool else f"{name}={name}.real"
            raise wrong_type(factor, name, function, why, fix)
        if factor.requires_grad:
            raise ArgumentValueError(
                f"{function}(): `{name}` requires grad.",
                why="the value of the result does not depend on it, so no gradient would ever reach it.",
                fix=f"{name}={name}.detach()",
            )
        check_fits(factor, x, name=name, function=function)
    elif not _is_number(factor):
        fix = f"gg.gate(x, {factor})" if isinstance(factor, bool) else _as_number(factor, name)
        raise wrong_type(factor, name, function, why, fix)
    elif not -math.inf < factor < math.inf:  # torch.compile cannot ask math.isfinite of a number that changes
        raise wrong_value(factor, name, function, "it would make every gradient NaN or infinite.", f"{name}=1.0")


def check_limit(limit: Any, x: torch.Tensor, name: str, function: str) -> None:
    if limit is None:
        return
    if not _is_number(limit):
        raise wrong_type(limit, name, function, "a limit is a plain number.", _as_number(limit, name))
    if not limit > 0:
        why = "a limit is positive; to let nothing through there is gg.gate."
        raise wrong_value(limit, name, function, why, "gg.gate(x, False)" if limit == 0 else f"{name}=1.0")
    if name == "max_value" and x.is_complex():
        raise ArgumentValueError(
            f"{function}(): `max_value` for {describe(x)}.",
            why="complex numbers have no order to clip them by.",
            fix=f"gg.clip_grad(x, max_norm={limit})",
        )


def check_per_sample(per_sample: Any, x: torch.Tensor, name: str, function: str) -> None:
    if not isinstance(per_sample, bool):
        raise wrong_type(per_sample, name, function, "it is True or False.", "per_sample=True")
    if per_sample and x.dim() == 0:
        raise ArgumentValueError(
            f"{function}(): `per_sample` for a tensor without dimensions.",
            why="samples lie along the first dimension.",
            fix="per_sample=False",
        )


def check_fill_value(fill_value: Any, x: torch.Tensor, name: str, function: str) -> None:
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
