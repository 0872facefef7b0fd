"""Operations with a defined value and a defined gradient at the points where the plain ones have none.

All of them are built in one way: a bad element is replaced *before* the operation, and its result is replaced after
it. Nothing non-finite then exists that a gradient of 0 could be multiplied with, in any order of differentiation.
Away from the bad points value and gradient are those of the plain operation, bit for bit. NaN is not a bad point: it
comes out as NaN, as it does from the plain operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from gradgate._checks import check_broadcast, check_order, check_tensor, wrong_type
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.masked._slices import dims_of


def safe_divide(x: Tensor | complex, y: Tensor | complex, *, fill_value: complex = 0) -> Tensor:
    """Divide, with a defined result where the divisor is 0.

    Args:
        x: The numerator, a tensor or a number.
        y: The denominator, a tensor or a number; the two broadcast, and at least one of them is a tensor.
        fill_value: The result of a division by 0, whatever the numerator is.

    Returns:
        `x / y`, and `fill_value` where y is 0.

    Raises:
        ArgumentTypeError: Neither x nor y is a tensor, one of them is neither a tensor nor a number, or `fill_value` is
            not a number.
        ArgumentValueError: Their shapes do not broadcast.

    Gradient:
        That of `x / y`; exactly 0 to both x and y where y is 0.

    Examples:
        >>> gg.masked.safe_divide(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
        tensor([0.5000, 0.0000, 0.0000])
    """
    _check_fill_value(fill_value, "masked.safe_divide")
    if not isinstance(y, Tensor):
        _check_operand(y, "y", "masked.safe_divide")
        x = check_tensor(x, name="x", function="masked.safe_divide")
        if y != 0:
            return x / y
        y = torch.zeros((), dtype=x.dtype, device=x.device)
    elif not isinstance(x, Tensor):
        _check_operand(x, "x", "masked.safe_divide")
    bad = y == 0
    try:
        return torch.where(bad, fill_value, x / torch.where(bad, 1, y))
    except RuntimeError:
        if isinstance(x, Tensor):
            check_broadcast(x, y, names=("x", "y"), function="masked.safe_divide")
        raise


def safe_log(x: Tensor, *, fill_value: complex = 0) -> Tensor:
    """Take the natural logarithm, with a defined result at 0 and beneath.

    Args:
        x: The values.
        fill_value: The result for 0 and, if x is real, for negative values.

    Returns:
        `log(x)`, and `fill_value` at the bad points.

    Raises:
        ArgumentTypeError: x is not a tensor, or `fill_value` is not a number.

    Gradient:
        That of `log(x)`; exactly 0 where `fill_value` was given.

    Examples:
        >>> gg.masked.safe_log(torch.tensor([1.0, 0.0, -2.0]), fill_value=-100)
        tensor([   0., -100., -100.])
    """
    check_tensor(x, name="x", function="masked.safe_log")
    _check_fill_value(fill_value, "masked.safe_log")
    bad = x == 0 if x.is_complex() else x <= 0
    return torch.where(bad, fill_value, torch.where(bad, 1, x).log())


def safe_sqrt(x: Tensor, *, fill_value: complex = 0) -> Tensor:
    """Take the square root, with a gradient of 0 at 0 and a defined result beneath.

    Args:
        x: The values.
        fill_value: The result for negative values, if x is real.

    Returns:
        `sqrt(x)`, and `fill_value` where x is negative.

    Raises:
        ArgumentTypeError: x is not a tensor, or `fill_value` is not a number.

    Gradient:
        That of `sqrt(x)`; exactly 0 where x is 0 (the plain one is infinite) or negative.

    Examples:
        >>> x = torch.tensor([4.0, 0.0, -1.0], requires_grad=True)
        >>> gg.masked.safe_sqrt(x).sum().backward()
        >>> x.grad
        tensor([0.2500, 0.0000, 0.0000])
    """
    check_tensor(x, name="x", function="masked.safe_sqrt")
    _check_fill_value(fill_value, "masked.safe_sqrt")
    zero = x == 0
    bad = zero if x.is_complex() else x <= 0
    return torch.where(zero, 0, torch.where(bad, fill_value, torch.where(bad, 1, x).sqrt()))


def safe_pow(x: Tensor, exponent: Tensor | float, *, fill_value: float = 0) -> Tensor:
    """Raise to a power, with a defined result where the plain one is infinite or has no real value.

    Args:
        x: The base, real.
        exponent: The exponent, a real tensor or number; the two broadcast.
        fill_value: The result for 0 to a negative power, and for a negative number to a power that is not whole.

    Returns:
        `x ** exponent`, and `fill_value` at the bad points.

    Raises:
        ArgumentTypeError: x is not a real tensor, `exponent` is not real, or `fill_value` is not a number.
        ArgumentValueError: The shapes of x and `exponent` do not broadcast.

    Gradient:
        That of `x ** exponent`. Exactly 0 to both where `fill_value` was given, and at 0 to a positive power that is
        not whole (beneath the power 1 the plain one is infinite). Where x is 0 or negative, exactly 0 to `exponent`
        (beneath 0 the plain one is NaN).

    Examples:
        >>> x = torch.tensor([4.0, 0.0, -8.0], requires_grad=True)
        >>> y = gg.masked.safe_pow(x, 0.5)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([2., 0., 0.]), tensor([0.2500, 0.0000, 0.0000]))
    """
    _check_real(x, "x", "masked.safe_pow")
    _check_fill_value(fill_value, "masked.safe_pow")
    if not isinstance(exponent, Tensor):
        if not isinstance(exponent, Real):
            why = "a power is a real number, or a tensor of them."
            raise wrong_type(exponent, "exponent", "masked.safe_pow", why, "masked.safe_pow(x, 0.5)")
        if exponent < 0 and not x.is_floating_point() and exponent == int(exponent):
            raise ArgumentTypeError(
                f"masked.safe_pow(): `x` is {describe(x)}, `exponent` is {exponent}.",
                why="a negative power of an integer is not an integer.",
                fix=f"masked.safe_pow(x.float(), {exponent})",
            )
        power = torch.as_tensor(exponent, dtype=torch.float64, device=x.device)
        bad, bad_zero = _bad_power(x, power)
        return torch.where(bad_zero, 0, torch.where(bad, fill_value, torch.where(bad, 1, x) ** exponent))
    _check_real(exponent, "exponent", "masked.safe_pow")
    try:
        bad, bad_zero = _bad_power(x, exponent)
    except RuntimeError:
        check_broadcast(x, exponent, names=("x", "exponent"), function="masked.safe_pow")
        raise
    # The gradient to the exponent needs log(x), so at x <= 0 it is not even asked for: the exponent is detached.
    # The power 0 stays out of that: 1 ** 0 has the same value and gradient, and a second gradient that is not NaN.
    low = ~bad & (x <= 0) & (exponent != 0)
    result = torch.where(x <= 0, 1, x) ** torch.where(bad, 1, exponent)
    result = torch.where(low, torch.where(low, x, 1) ** torch.where(low, exponent.detach(), 1), result)
    return torch.where(bad_zero, 0, torch.where(bad, fill_value, result))


def _bad_power(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Return where `x ** power` is bad, and where of these its value is plainly 0."""
    broken = (power != power.floor()) | torch.isinf(power)
    bad = ((x < 0) & broken & ~torch.isnan(power)) | ((x == 0) & (broken | (power < 0)) & ~torch.isnan(power))
    return bad, bad & (x == 0) & (power > 0)


def safe_norm(x: Tensor, dim: int | Sequence[int] | None = None, *, ord: float = 2, keepdim: bool = False) -> Tensor:
    """Return the length of vectors, with a gradient of 0 at the zero vector, in every order.

    Args:
        x: The values, floating or complex.
        dim: The dimension or dimensions to reduce; all of them if None.
        ord: Which norm, from 1 to infinity.
        keepdim: Keep the reduced dimensions with size 1.

    Returns:
        `torch.linalg.vector_norm(x, ord, dim)`; 0 for a zero vector and for a vector without elements.

    Raises:
        ArgumentTypeError: x is not a floating or complex tensor, or `ord` or `dim` is of the wrong kind.
        ArgumentValueError: `ord` is less than 1, or a dimension is named twice.
        ArgumentIndexError: x does not have that dimension.

    Gradient:
        That of the plain norm; exactly 0 at the zero vector, and so are the second gradient and all further ones.

    Examples:
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
        >>> gg.masked.safe_norm(x, dim=1).sum().backward()
        >>> x.grad
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    zero, safe = _without_zero_vectors(x, dim, ord, "masked.safe_norm")
    norm = _norm(safe, ord, dim, keepdim)
    return torch.where(zero.reshape(norm.shape), 0, norm)


def safe_normalize(x: Tensor, dim: int | Sequence[int] | None = -1, *, ord: float = 2) -> Tensor:
    """Scale vectors to length 1; a zero vector stays zero, with a gradient of 0.

    Args:
        x: The values, floating or complex.
        dim: The dimension or dimensions that make a vector; all of them if None.
        ord: Which norm, from 1 to infinity.

    Returns:
        `x / norm(x)`; a zero vector stays zero.

    Raises:
        ArgumentTypeError: x is not a floating or complex tensor, or `ord` or `dim` is of the wrong kind.
        ArgumentValueError: `ord` is less than 1, or a dimension is named twice.
        ArgumentIndexError: x does not have that dimension.

    Gradient:
        That of `x / norm(x)`; exactly 0 at the zero vector, where that of `torch.nn.functional.normalize` is 1e12.

    Examples:
        >>> gg.masked.safe_normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    zero, safe = _without_zero_vectors(x, dim, ord, "masked.safe_normalize")
    return torch.where(zero, 0, safe / _norm(safe, ord, dim, True))


def _without_zero_vectors(
    x: Tensor, dim: int | Sequence[int] | None, ord: float, function: str
) -> tuple[Tensor, Tensor]:
    """Return which vectors have the length 0, and give x with ones in their place."""
    check_tensor(x, name="x", function=function)
    if not (x.is_floating_point() or x.is_complex()):
        raise wrong_type(
            x, "x", function, "a length is not whole, and integers have no gradient.", f"{function}(x.float())"
        )
    check_order(ord, function=function)
    if not ord >= 1:
        raise ArgumentValueError(
            f"{function}(): `ord` is {ord}.",
            why="beneath 1 it is not a norm, and its gradient is infinite wherever an element is 0.",
            fix="ord=2   # or 1, or float('inf')",
        )
    try:
        zero = _norm(x.detach(), ord, dim, True) == 0
    except (TypeError, IndexError, RuntimeError):
        dims_of(x, dim, function)  # says it better, if it is about them
        raise
    return zero, torch.where(zero, 1, x)


def _norm(x: Tensor, ord: float, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    # All norms of nothing are 0, but torch refuses the infinite one.
    dims = dim if dim is None or isinstance(dim, int) else tuple(dim)
    norm: Tensor = torch.linalg.vector_norm(x, ord if x.numel() else 2, dims, keepdim)
    return norm


def safe_acos(x: Tensor) -> Tensor:
    """Return the angle of a cosine, also for a cosine of 1 and, by rounding, a little more.

    Args:
        x: Cosines, real.

    Returns:
        `acos(x)`; beyond -1 and 1 its value there.

    Raises:
        ArgumentTypeError: x is not a real tensor.

    Gradient:
        That of `acos(x)`; exactly 0 at -1 and 1 (the plain one is infinite) and beyond (the plain one is NaN).

    Examples:
        >>> gg.masked.safe_acos(torch.tensor([0.0, 1.0, 1.0000002, -1.0]))
        tensor([1.5708, 0.0000, 0.0000, 3.1416])
    """
    _check_real(x, "x", "masked.safe_acos")
    bad = x.abs() >= 1
    return torch.where(bad, x.detach().clamp(-1, 1).acos(), torch.where(bad, 0, x).acos())


def safe_asin(x: Tensor) -> Tensor:
    """Return the angle of a sine, also for a sine of 1 and, by rounding, a little more.

    Args:
        x: Sines, real.

    Returns:
        `asin(x)`; beyond -1 and 1 its value there.

    Raises:
        ArgumentTypeError: x is not a real tensor.

    Gradient:
        That of `asin(x)`; exactly 0 at -1 and 1 (the plain one is infinite) and beyond (the plain one is NaN).

    Examples:
        >>> gg.masked.safe_asin(torch.tensor([0.0, 1.0, 1.0000002, -1.0]))
        tensor([ 0.0000,  1.5708,  1.5708, -1.5708])
    """
    _check_real(x, "x", "masked.safe_asin")
    bad = x.abs() >= 1
    return torch.where(bad, x.detach().clamp(-1, 1).asin(), torch.where(bad, 0, x).asin())


def _check_fill_value(fill_value: object, function: str) -> None:
    if not isinstance(fill_value, (bool, int, float, complex)):
        raise wrong_type(
            fill_value, "fill_value", function, "one number stands at all the bad points.", "fill_value=0.0"
        )


def _check_operand(value: object, name: str, function: str) -> None:
    if not isinstance(value, (bool, int, float, complex)) and not isinstance(value, Real):
        raise wrong_type(
            value, name, function, "what is divided is a tensor or a number.", f"{name}=torch.as_tensor({name})"
        )


def _check_real(x: Tensor, name: str, function: str) -> None:
    check_tensor(x, name=name, function=function)
    if x.is_complex():
        raise ArgumentTypeError(
            f"{function}(): `{name}` is {describe(x)}.",
            why="its bad points are those of real numbers; complex numbers have others.",
            fix=f"{name}={name}.real",
        )
