"""Which parameters are meant: by glob, compiled regex, module, parameter or predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradgate._names import describe, listed, nearest
from gradgate._torch_compat import without_compiled_wrappers
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError

__all__ = [
    "Selector",
    "bare",
    "local_part",
    "named_modules",
    "named_parameters",
    "select",
    "ties_of",
    "with_parents",
    "wording",
]

Selector = str | re.Pattern[str] | nn.Module | torch.Tensor | Callable[[str, nn.Parameter], bool]


def bare(model: nn.Module, function: str) -> nn.Module:
    """Give the model itself, without DistributedDataParallel and torch.compile around it.

    Args:
        model: What the user gave.
        function: The public function that was called.

    Returns:
        The model whose names the user knows.

    Raises:
        ArgumentTypeError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"{function}(): `model` is {describe(model)}.",
            why="names and patterns are looked up in a torch.nn.Module.",
            fix=f"{function}(model, parameter)   # the model first; a tensor of its own: gg.pin(tensor, ...)",
        )
    while True:
        inner = without_compiled_wrappers(model.module if isinstance(model, DistributedDataParallel) else model)
        if inner is model:
            return model
        model = inner


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give every parameter under every name it has, in the model's order; tied ones come several times."""
    return {
        name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Give every module under every name it has."""
    return {
        name.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip("."): module
        for name, module in model.named_modules(remove_duplicate=False)
        if without_compiled_wrappers(module) is module
    }


def select(model: nn.Module, what: Sequence[Selector], function: str) -> list[str]:
    """Give the names of all parameters that any of the selectors means; with no selector, all of them.

    A glob or a regex means a parameter if it matches the parameter's full name or that of a module around it. The
    order of the selectors does not matter, and what several of them mean is taken once.

    Args:
        model: The bare model.
        what: The selectors.
        function: The public function that was called.

    Returns:
        The names in the model's order; a parameter that is chosen under one of its names is there under all.

    Raises:
        NothingMatchedError: A selector means nothing in this model.
        ArgumentTypeError: A selector is of another kind.
    """
    known = named_parameters(model)
    chosen: set[int] = set()
    for selector in what:
        found = {id(known[name]) for name in _matched(model, known, selector, function)}
        if not found:
            raise _nothing(model, known, selector, function)
        chosen |= found
    if not known:
        raise _nothing(model, known, "*", function)
    return [name for name, parameter in known.items() if not what or id(parameter) in chosen]


def ties_of(known: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """Find the parameters that share memory: one object under several names, or several objects over one storage.

    Args:
        known: Every parameter under every name.

    Returns:
        For each name that is tied: the other names, in the model's order.
    """
    pieces: dict[object, list[tuple[int, int, str]]] = {}
    for name, parameter in known.items():
        part = local_part(parameter)
        reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        start = int(part.storage_offset()) * part.element_size()
        stop = start + (reach + 1) * part.element_size()
        storage = part.untyped_storage().data_ptr() if part.numel() else f"empty {id(parameter)}"
        pieces.setdefault(storage, []).append((start, stop, name))
    groups: list[list[str]] = []
    for storage_pieces in pieces.values():
        end = -1
        for start, stop, name in sorted(storage_pieces):
            if start >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, stop)
    together = {name: set(group) for group in groups if len(group) > 1 for name in group}
    return {
        name: tuple(other for other in known if other in together[name] - {name}) for name in known if name in together
    }


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Give the part of a sharded tensor (FSDP2) that this process has; of others, all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wording(selector: Selector) -> str:
    """Say a selector as the user wrote it, as far as that is known."""
    if isinstance(selector, re.Pattern):
        return f"re.compile({selector.pattern!r})"
    if isinstance(selector, str):
        return repr(selector)
    if isinstance(selector, nn.Module | torch.Tensor):
        return describe(selector).removeprefix("the ").removeprefix("a ")
    return f"{getattr(selector, '__name__', 'predicate')}()"


def _matched(model: nn.Module, known: dict[str, nn.Parameter], selector: Selector, function: str) -> list[str]:
    if isinstance(selector, str | re.Pattern):
        return [name for name in known if any(_matches(selector, part) for part in with_parents(name))]
    if isinstance(selector, nn.Module):
        inside = {id(module) for module in model.modules()}
        selector = without_compiled_wrappers(selector)
        if id(selector) not in inside:
            raise _foreign(model, f"the module {type(selector).__name__}", function)
        members = {id(parameter) for parameter in selector.parameters()}
        return [name for name, parameter in known.items() if id(parameter) in members]
    if isinstance(selector, torch.Tensor):
        names = [name for name, parameter in known.items() if parameter is selector]
        if not names:
            raise _foreign(model, describe(selector), function)
        return names
    if callable(selector):
        return [name for name, parameter in known.items() if selector(name, parameter)]
    raise ArgumentTypeError(
        f"{function}(): {describe(selector)} selects nothing.",
        why="a selector is a glob, a compiled regex, a module, a parameter, or a predicate(name, parameter).",
        fix=f'{function}(model, "encoder.*", re.compile(r"\\.bias$"), model.head)',
    )


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return pattern.search(name) is not None


def with_parents(name: str) -> list[str]:
    """Give a parameter's name and those of the modules around it: a.b.c, a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _foreign(model: nn.Module, thing: str, function: str) -> ArgumentValueError:
    return ArgumentValueError(
        f"{function}(): {thing} does not belong to this {type(model).__name__}.",
        why="freezing it here would not show in this model, and thawing this model would not free it.",
        fix="",
    )


def _nothing(
    model: nn.Module, known: dict[str, nn.Parameter], selector: Selector, function: str
) -> NothingMatchedError:
    names = [*known, *filter(None, named_modules(model))]
    text = selector if isinstance(selector, str) else selector.pattern if isinstance(selector, re.Pattern) else ""
    like = nearest(text.strip("*.^$\\"), names) or nearest(text, names)
    if isinstance(selector, nn.Module):
        why = "it has no parameters."
    else:
        why = f"the parameters are {listed(list(known))}." if known else "the model has no parameters."
    return NothingMatchedError(
        f"{function}(): {wording(selector)} matches no parameter of {type(model).__name__}.",
        why=why,
        fix=f"{like[0]!r}   # did you mean {listed([repr(name) for name in like])}?"
        if like
        else "print(gg.trainable(model))",
    )
