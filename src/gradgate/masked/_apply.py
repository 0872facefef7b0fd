"""Compute only where it counts: a function on the kept elements or rows alone, and its results back in their places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradgate._checks import agreed, check_keep, check_tensor, wrong_type
from gradgate._names import describe
from gradgate._torch_private import has_data, inside_functorch, is_compiling, tree_flatten, tree_unflatten
from gradgate.errors import ArgumentTypeError, ArgumentValueError

Elementwise = Callable[..., Tensor]


def apply_where(
    keep: Tensor | tuple[Any, ...] | Callable[..., Tensor],
    args: Tensor | Sequence[Tensor],
    fn: Elementwise,
    otherwise: Elementwise | None = None,
    *,
    fill_value: complex = 0,
) -> Tensor:
    """Compute `fn` only where `keep`, and `otherwise` only elsewhere: the `torch.where` that poisons no gradient.

    Each function is called once, with its own elements of each argument as 1-D tensors, and returns one value for each
    of them. So it may divide, take logarithms, look up tables or raise for what is not its own, and costs what its
    own elements cost. A function without any element is called with 0 elements; the dtype of the result therefore
    never depends on the data.

    Asks the host how many elements are kept; torch.compile traces that without a break. Inside vmap (if it batches
    `keep`) and FakeTensorMode there is not one number of them. There each function is called with as many elements
    as there are in all, and a copy of its first own element stands in for those that are not its own; it has to
    work element by element.

    Args:
        keep: The boolean mask; True for `fn`. Or a function of the arguments, or several: see `masked.valid`.
        args: A tensor or several; they broadcast with each other and with `keep`.
        fn: Called as `fn(*args)` with the kept elements.
        otherwise: Called in the same way with the others. Without it they give `fill_value`.
        fill_value: What the others give if there is no `otherwise`.

    Returns:
        A tensor of the broadcast shape. Its dtype is the one that both results promote to; a fill value that the
        dtype of fn's result cannot hold promotes it (NaN makes integers floating).

    Raises:
        ArgumentTypeError: `keep` is not a boolean tensor, an argument or a result is not a tensor, `fn` cannot be
            called, or `fill_value` is not a number.
        ArgumentValueError: The shapes do not broadcast, a device differs, a function did not give one value for
            each of its elements, or the result cannot hold `fill_value`.

    Gradient:
        To every argument, and to every tensor that the functions use besides, from each function's own elements
        only. What is not kept gets exactly 0 from `fn`, whatever it is and whatever gradient arrives there.

    Examples:
        >>> x = torch.tensor([16.0, 0.0, -4.0], requires_grad=True)
        >>> gg.apply_where(x > 0, x, torch.sqrt, otherwise=lambda rest: rest).sum().backward()
        >>> x.grad
        tensor([0.1250, 1.0000, 1.0000])
    """
    _check_fill_value(fill_value, "apply_where")
    if not callable(fn):
        why = "the tensors come first, then the function that is called with their elements."
        raise wrong_type(fn, "fn", "apply_where", why, "gg.apply_where(keep, x, fn)")
    if otherwise is not None and not callable(otherwise):
        why = "it is called with the elements that are not kept; a number for them is `fill_value`."
        fix = f"gg.apply_where(keep, x, fn, fill_value={otherwise if isinstance(otherwise, (int, float)) else 0.0})"
        raise wrong_type(otherwise, "otherwise", "apply_where", why, fix)
    given: Any = args
    tensors = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else (given,)
    mask: Any = agreed(keep, tensors, function="apply_where") if isinstance(keep, tuple) or callable(keep) else keep
    mask, flat, shape = _flattened(mask, tensors)
    countable = has_data(mask) or (is_compiling() and not inside_functorch())
    evaluate = _evaluate_own if countable else _evaluate_all
    return evaluate(mask, flat, fn, otherwise, fill_value).reshape(shape)


def _flattened(keep: Tensor, args: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], torch.Size]:
    """Check the arguments, and give mask and arguments broadcast to one shape and flattened, with that shape."""
    if not args:
        raise ArgumentValueError(
            "apply_where(): `args` is empty.",
            why="without an argument there is nothing to call a function with.",
            fix="gg.apply_where(keep, x, fn)   # or (x, y) for a function of two",
        )
    for number, value in enumerate(args):
        check_tensor(value, name=f"args[{number}]", function="apply_where")
    if isinstance(keep, Tensor):
        try:
            shape = torch.broadcast_shapes(keep.shape, *(v.shape for v in args))  # type: ignore[no-untyped-call]
        except RuntimeError:
            shapes = ", ".join(str(tuple(value.shape)) for value in args)
            raise ArgumentValueError(
                f"apply_where(): `keep` has shape {tuple(keep.shape)}, the arguments have {shapes}.",
                why="they have to broadcast to one shape.",
                fix="keep=keep.unsqueeze(-1)   # or whatever makes them fit",
            ) from None
        args = [value.expand(shape) for value in args]
    for value in args:
        check_keep(keep, value, function="apply_where")
    return keep.expand(shape).reshape(-1), [value.reshape(-1) for value in args], shape


def _evaluate_own(
    keep: Tensor, flat: list[Tensor], fn: Elementwise, otherwise: Elementwise | None, fill_value: complex
) -> Tensor:
    """Call each function with its own elements, and put the results into their places."""
    index = keep.nonzero().squeeze(1)
    values = _one_each(fn, [value.index_select(0, index) for value in flat], "fn")
    if otherwise is None:
        return _placed(values, index, len(keep), fill_value, "apply_where")
    rest = (~keep).nonzero().squeeze(1)
    others = _one_each(otherwise, [value.index_select(0, rest) for value in flat], "otherwise")
    dtype = torch.promote_types(values.dtype, others.dtype)
    result = _placed(values.to(dtype), index, len(keep), 0, "apply_where")
    return result.index_copy(0, rest, others.to(dtype))


def _evaluate_all(
    keep: Tensor, flat: list[Tensor], fn: Elementwise, otherwise: Elementwise | None, fill_value: complex
) -> Tensor:
    """Call each function with all elements, those that are not its own replaced by one that is."""
    values = _one_each(fn, _with_stand_in(keep, flat), "fn")
    if otherwise is None:
        dtype = dtype_holding(values, fill_value, "fill_value", "apply_where")
        return torch.where(keep, values.to(dtype), torch.full((), fill_value, dtype=dtype, device=values.device))
    return torch.where(keep, values, _one_each(otherwise, _with_stand_in(~keep, flat), "otherwise"))


def _with_stand_in(own: Tensor, flat: list[Tensor]) -> list[Tensor]:
    if not len(own):
        return flat
    first = own.to(torch.uint8).argmax().reshape(1)
    return [
        torch.where(own, value, torch.where(own.any(), value.detach().gather(0, first), _neutral(value)))
        for value in flat
    ]


def _neutral(value: Tensor) -> float:
    # Where a function has no element of its own: inside the domain of most functions, and of every table.
    return 0.5 if value.is_floating_point() or value.is_complex() else 0


def _one_each(fn: Elementwise, own: list[Tensor], name: str) -> Tensor:
    values = fn(*own)
    if not isinstance(values, Tensor):
        raise ArgumentTypeError(
            f"apply_where(): `{name}` gave {describe(values)}.",
            why="it is called with 1-D tensors and returns one value for each element, as a tensor.",
            fix="lambda x: torch.full_like(x, 1.0)   # for a constant",
        )
    if values.shape != own[0].shape:
        raise ArgumentValueError(
            f"apply_where(): `{name}` was called with {len(own[0])} elements and gave {describe(values)}.",
            why="it has to give one value for each element, so that each can go back to its place.",
            fix="gg.apply_rows(keep, x, fn)   # if it works on whole rows",
        )
    return values


def apply_rows(
    keep: Tensor | tuple[Any, ...] | Callable[..., Tensor],
    args: Any,
    fn: Callable[..., Any],
    *,
    fill_value: complex = 0,
) -> Any:
    """Compute `fn` for the kept rows (samples) only, and give its results for all rows.

    Equal, bit for bit, to fn on the batch without the other rows. With everything kept it is `fn(*args)` itself; with
    nothing kept fn sees a batch of 0 rows, so that the shape and dtype of the result do not depend on the data and
    parameters get a gradient of 0 instead of none.

    Asks the host how many rows are kept; torch.compile traces that without a break. A `keep` that vmap batches is
    refused.

    Args:
        keep: A boolean tensor with one answer for each row. Or a function that is called with the arguments, or
            several: see `masked.valid`.
        args: One argument, or a plain tuple or list of several. Each is a tensor with as many rows, or a dict,
            namedtuple or other pytree of them; None stays None.
        fn: Called as `fn(*rows)`. Returns a tensor with one row for each of its rows, or a tuple, list, dict or any
            pytree of such tensors; None in it stays None.
        fill_value: What the rows that are not kept give.

    Returns:
        What fn gave, with all rows. A fill value that a dtype cannot hold promotes it (NaN makes integers floating).

    Raises:
        ArgumentTypeError: `keep` is not a boolean tensor, something in args or in fn's result is not a tensor, or
            `fill_value` is not a number.
        ArgumentValueError: The number of rows differs, there is no tensor in args, `keep` is batched by vmap, or the
            result cannot hold `fill_value`.

    Gradient:
        To the kept rows of every argument, and to every tensor that fn uses besides, as from fn on the batch without
        the other rows. The other rows get exactly 0, whatever they are and whatever gradient arrives there.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> layer = torch.nn.Linear(2, 3)
        >>> out = gg.apply_rows(x.isfinite().all(1), x, layer)
        >>> out.shape, out[1].tolist()
        (torch.Size([2, 3]), [0.0, 0.0, 0.0])
    """
    if type(fill_value) is not int:
        _check_fill_value(fill_value, "apply_rows")
    if not callable(fn):
        why = "the tensors come first, then the function that is called with their rows."
        raise wrong_type(fn, "fn", "apply_rows", why, "gg.apply_rows(keep, x, fn)")
    rows: Sequence[Any] = (args,)
    structure: Any = None
    single = isinstance(args, Tensor)  # as most are, and flattening a tree takes time
    if not single:
        rows, structure = tree_flatten(tuple(args) if type(args) in (tuple, list) else (args,))
    mask: Any = keep
    if isinstance(keep, tuple) or callable(keep):
        mask = agreed(keep, tuple(args) if type(args) in (tuple, list) else (args,), function="apply_rows")
    if not _fit(mask, rows):
        _check_rows(mask, rows)
    try:
        index = mask.nonzero().view(-1)
        some = is_compiling() or bool(index.shape[0] < mask.shape[0])  # a compiled graph is for every number of rows
    except Exception:
        # To ask beforehand would take as long as all other checks together.
        if not has_data(mask):
            raise ArgumentValueError(
                "apply_rows(): the values of `keep` cannot be read here (vmap, FakeTensorMode or the meta device).",
                why="how many rows fn sees depends on them, and here there is not one number of rows.",
                fix="gg.apply_rows(keep, x, torch.vmap(fn))   # apply_rows around vmap instead of inside it",
            ) from None
        raise
    if some:
        rows = [None if row is None else row.index_select(0, index) for row in rows]
    result = fn(*(rows if single else tree_unflatten(rows, structure)))
    if isinstance(result, Tensor):
        return _in_all_rows(result, mask, index, some, fill_value)
    leaves, structure = tree_flatten(result)
    placed = [None if leaf is None else _in_all_rows(leaf, mask, index, some, fill_value) for leaf in leaves]
    return tree_unflatten(placed, structure)


def _in_all_rows(result: Any, keep: Tensor, index: Tensor, some: bool, fill_value: complex) -> Tensor:
    kept = index.shape[0]
    if not isinstance(result, Tensor) or result.dim() == 0 or result.shape[0] != kept:
        raise _wrong_result(result, kept)
    if some:
        return _placed(result, index, keep.shape[0], fill_value, "apply_rows")
    return result.to(dtype_holding(result, fill_value, "fill_value", "apply_rows"))


def _fit(keep: Any, rows: Sequence[Any]) -> bool:
    """Return whether all is well for certain: what `_check_rows` asks one by one, in a tenth of the time."""
    if type(keep) is not Tensor or keep.dtype is not torch.bool or keep.dim() != 1:
        return False
    count, device = keep.shape[0], keep.device
    for row in rows:
        if not isinstance(row, Tensor) or row.dim() == 0 or row.shape[0] != count or row.device != device:
            return False
    return len(rows) > 0


def _check_rows(keep: Any, rows: Sequence[Any]) -> None:
    tensors = [row for row in rows if row is not None]
    if not tensors:
        raise ArgumentValueError(
            "apply_rows(): there is no tensor in `args`.",
            why="without one there are no rows to choose from.",
            fix="gg.apply_rows(keep, x, fn)",
        )
    for row in tensors:
        check_tensor(row, name="args", function="apply_rows")
    check_keep(keep, keep if isinstance(keep, Tensor) else tensors[0], function="apply_rows")
    if keep.dim() != 1 or any(row.dim() == 0 or len(row) != len(keep) for row in tensors):
        raise ArgumentValueError(
            f"apply_rows(): `keep` has shape {tuple(keep.shape)}, the arguments have "
            f"{', '.join(str(tuple(row.shape)) for row in tensors)}.",
            why="keep has one answer for each row, and a row is an entry of the first dimension of every argument.",
            fix="gg.apply_rows(keep.all(dim=1), x, fn)   # if keep has one answer for each element",
        )
    for row in tensors:
        if row.device != keep.device:
            check_keep(keep.reshape(-1, *[1] * (row.dim() - 1)), row, function="apply_rows")


def _wrong_result(result: Any, kept: int) -> ArgumentTypeError | ArgumentValueError:
    if not isinstance(result, Tensor):
        return ArgumentTypeError(
            f"apply_rows(): `fn` gave {describe(result)}.",
            why="only tensors have rows that can go back to their places.",
            fix="fn=lambda x: torch.full((len(x),), 1.0)   # or a tuple, list or dict of tensors",
        )
    return ArgumentValueError(
        f"apply_rows(): `fn` was called with {kept} rows and gave {describe(result)}.",
        why="it has to give one row for each row, so that each can go back to its place.",
        fix="fn=lambda x: loss(x, reduction='none')   # results for each row, not for the batch",
    )


# --- results back in their places -----------------------------------------------------------------------------------


def _placed(values: Tensor, index: Tensor, count: int, fill_value: complex, function: str) -> Tensor:
    shape = (count, *values.shape[1:])
    if type(fill_value) is int and fill_value == 0:  # which every dtype holds; -0.0 is another number
        whole = values.new_zeros(shape)
    else:
        values = values.to(dtype_holding(values, fill_value, "fill_value", function))
        whole = values.new_full(shape, fill_value)
    # In place it saves a copy; torch.func cannot write a batch into what is none.
    return (whole.index_copy if inside_functorch() else whole.index_copy_)(0, index, values)


def dtype_holding(values: Tensor, number: complex, name: str, function: str) -> torch.dtype:
    """Return the dtype of values and a number in one tensor: that of the values if it holds the number, else wider."""
    dtype = values.dtype
    if dtype.is_floating_point and not isinstance(number, complex):
        if number and math.inf > abs(number) > torch.finfo(dtype).max:
            raise _does_not_hold(dtype, torch.finfo(dtype), number, name, function, "float32")
        return dtype
    if dtype is torch.bool and number in (0, 1):
        return dtype
    promoted = (torch.empty(0, dtype=dtype) * number).dtype  # torch.result_type cannot be traced
    if promoted.is_floating_point or promoted.is_complex or isinstance(number, bool):
        return promoted
    # Integers: torch would wrap -1 to 255 silently.
    info = torch.iinfo(promoted)
    if not info.min <= number.real <= info.max:
        raise _does_not_hold(promoted, info, number, name, function, "int64")
    return promoted


def _does_not_hold(
    dtype: torch.dtype, info: torch.finfo | torch.iinfo, number: complex, name: str, function: str, wider: str
) -> ArgumentValueError:
    return ArgumentValueError(
        f"{function}(): `{name}` is {number}, the result is {str(dtype).removeprefix('torch.')}.",
        why=f"that dtype holds {info.min} to {info.max}.",
        fix=f"{name}=0   # or values in torch.{wider}",
    )


def _check_fill_value(fill_value: object, function: str) -> None:
    if not isinstance(fill_value, (bool, int, float, complex)):
        why = "one number stands for everything that is not kept."
        raise wrong_type(fill_value, "fill_value", function, why, "fill_value=float('nan')")
