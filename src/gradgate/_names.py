"""How things are called in messages: nearest names, shapes and kinds of values, and what a misspelt name may mean."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import NoReturn

from gradgate.errors import ArgumentTypeError


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Find the known names that look most like a name."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def describe(value: object) -> str:
    """Describe in a few words what a value is, for a message."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {tuple(value.shape)}{device}"
    if value is None:
        return "None"
    if torch is not None and isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def listed(names: Sequence[object], limit: int = 6) -> str:
    """Write several names in one line, the rest as a count."""
    head = ", ".join(str(name) for name in names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"


# --- Misspelt names -------------------------------------------------------------------------------------------------

# What other libraries call an argument, and what it is called here.
_ALIASES = {
    "mask": ("keep", "frozen"),
    "where": ("keep",),
    "axis": ("dim",),
    "axes": ("dim",),
    "keepdims": ("keepdim",),
    "fill": ("fill_value", "empty"),
    "ignore_index": ("exclude",),
}
_MEANING = {"keep": " True takes part", "frozen": " True does not move"}


def suggest_names(module_name: str) -> None:
    """Let a public module, its functions and its classes name what is meant when a name or a keyword is misspelt."""
    module = sys.modules[module_name]
    package, names = module_name.rpartition(".")[2], module.__all__
    at_root = vars(sys.modules["gradgate"])["_PACKAGE_OF"]
    for name in names:
        value, shown = vars(module)[name], name if name in at_root else f"{package}.{name}"
        if isinstance(value, FunctionType):
            vars(module)[name] = called = _with_suggestions(value, shown)
            called.__module__ = module_name
        elif isinstance(value, type) and not getattr(value, "_is_protocol", False):
            for key, method in list(vars(value).items()):
                if isinstance(method, FunctionType) and (key == "__init__" or not key.startswith("_")):
                    setattr(value, key, _with_suggestions(method, shown if key == "__init__" else f"{shown}.{key}"))

    def missing(name: str) -> NoReturn:
        best = [] if name.startswith("_") else nearest(name, names, 1)
        raise AttributeError(
            f"module {module_name!r} has no attribute {name!r}" + (f"; did you mean {best[0]}?" if best else ""),
            name=name,
            obj=module,
        )

    vars(module).setdefault("__getattr__", missing)


def _with_suggestions(function: FunctionType, shown: str) -> FunctionType:
    """Return the same function with an error for unknown keywords that names the one that is meant."""
    # Made as source, like the methods of a dataclass: arguments handed on by name cost a third of what *args, **kwargs
    # and a `try` cost, and torch.compile sees a plain call.
    given: list[str] = []
    handed: list[str] = []
    kind = inspect.Parameter
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind is kind.VAR_KEYWORD:
            return function
        if parameter.kind is kind.KEYWORD_ONLY and "*" not in "".join(given):
            given.append("*")
        star = "*" if parameter.kind is kind.VAR_POSITIONAL else ""
        given.append(star + name + ("" if parameter.default is kind.empty else "=None"))
        handed.append(f"{name}={name}" if parameter.kind is kind.KEYWORD_ONLY else star + name)
    source = (
        f"def make(_function, _refuse):\n"
        f"    def call({', '.join([*given, '**_unknown'])}):\n"
        f"        return _function({', '.join(handed)}) if not _unknown else _refuse(_unknown)\n"
        f"    return call"
    )
    made: dict[str, Callable[..., FunctionType]] = {}
    exec(compile(source, function.__code__.co_filename, "exec"), function.__globals__, made)

    def refuse(unknown: dict[str, object]) -> NoReturn:
        name, known = next(iter(unknown)), [name for name in parameters if name != "self"]
        meant = [alias for alias in _ALIASES.get(name, ()) if alias in known] or nearest(name, known, 1)
        guess = f"; did you mean {meant[0]}=?{_MEANING.get(meant[0], '')}" if meant else ""
        why = f"its arguments are {', '.join(known)}." if known else "it takes none."
        raise ArgumentTypeError(f"{shown}() has no argument {name!r}{guess}", why=why)

    call = made["make"](function, refuse)
    functools.update_wrapper(call, function)
    call.__defaults__, call.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return call
