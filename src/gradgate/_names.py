"""How things are called in messages: nearest names, shapes and kinds of values, and what a misspelt name may mean."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NoReturn

from gradgate import records
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
    "valid": ("keep",),
    "axis": ("dim",),
    "axes": ("dim",),
    "keepdims": ("keepdim",),
    "fill": ("fill_value", "empty"),
    "ignore_index": ("exclude",),
    "ddof": ("correction",),
    "unbiased": ("correction",),
    "p": ("ord",),
    "input": ("x",),
}
_MEANING = {"keep": " True takes part", "frozen": " True does not move"}


def no_such_argument(function: str, name: str, known: Sequence[str]) -> ArgumentTypeError:
    """Return the error for an unknown keyword, with the one that may be meant."""
    meant = [alias for alias in _ALIASES.get(name, ()) if alias in known] or nearest(name, known, 1)
    guess = f"; did you mean {meant[0]}=?{_MEANING.get(meant[0], '')}" if meant else ""
    why = f"its arguments are {', '.join(known)}." if known else "it takes none."
    return ArgumentTypeError(f"{function}() has no argument {name!r}{guess}", why=why)


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
        elif isinstance(value, type) and not (getattr(value, "_is_protocol", False) or issubclass(value, Exception)):
            _suggest_in_class(value, shown)

    def missing(name: str) -> NoReturn:
        best = [] if name.startswith("_") else nearest(name, names, 1)
        raise AttributeError(
            f"module {module_name!r} has no attribute {name!r}" + (f"; did you mean {best[0]}?" if best else ""),
            name=name,
            obj=module,
        )

    vars(module).setdefault("__getattr__", missing)


def _suggest_in_class(cls: type, shown: str) -> None:
    """Do so for the constructor and the public methods of a class, also those that it inherits from a private one."""
    for base in cls.__mro__:
        for key, method in list(vars(base).items()) if base.__module__.startswith("gradgate.") else ():
            is_public = key == "__init__" or not key.startswith("_")
            if is_public and isinstance(method, FunctionType) and getattr(cls, key) is method:
                setattr(cls, key, _with_suggestions(method, shown if key == "__init__" else f"{shown}.{key}"))


def _with_suggestions(function: FunctionType, shown: str) -> FunctionType:
    """Return the same function with an error for unknown keywords that names the one that is meant."""
    # Made as source, like the methods of a dataclass: arguments handed on by name cost a third of what *args, **kwargs
    # and a `try` cost, and torch.compile sees a plain call.
    kind, empty = inspect.Parameter, inspect.Parameter.empty
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if kind.VAR_KEYWORD in kinds:
        return function
    given, handed, wrong = list[str](), list[str](), ["_unknown"]
    for name, parameter in parameters.items():
        given.append(name if name == "self" else f"{name}=_default[{name!r}]")
        handed.append(f"{name}={name}" if parameter.kind is kind.KEYWORD_ONLY else name)
        if parameter.kind is kind.VAR_POSITIONAL:
            given[-1] = handed[-1] = f"*{name}"
        elif parameter.default is empty and name != "self":
            wrong.append(f"{name} is _empty")
    positional = [name for name, each in zip(parameters, kinds, strict=True) if each is kind.POSITIONAL_OR_KEYWORD]
    if kind.VAR_POSITIONAL not in kinds:
        given.insert(len(positional), "*_more")
        wrong.append("_more")
    called = function.__name__
    source = "\n" * (function.__code__.co_firstlineno - 5) + (  # tracebacks show the line of the function itself
        f"def make(_function, _default, _empty, _refuse):\n"
        f"    def {called}({', '.join(given)}, **_unknown):\n"
        f"        if {' or '.join(wrong)}:\n"
        f"            _refuse(_unknown, locals())\n"
        f"        return _function({', '.join(handed)})\n"
        f"    return {called}"
    )
    made: dict[str, Callable[..., FunctionType]] = {}
    exec(compile(source, function.__code__.co_filename, "exec"), function.__globals__, made)

    def refuse(unknown: dict[str, Any], values: dict[str, Any]) -> None:
        for name in unknown:
            raise no_such_argument(shown, name, [name for name in parameters if name != "self"])
        # Python's own error. What is misspelt is missing as well: without this wrapper, Python would only say that.
        if more := values.get("_more"):
            function(*positional, *more)
        named = [name for name in parameters if parameters[name].kind is not kind.VAR_POSITIONAL]
        function(**{name: value for name in named if (value := values[name]) is not empty})

    default = {name: parameter.default for name, parameter in parameters.items()}
    call = made["make"](function, default, empty, refuse)
    functools.update_wrapper(call, function)
    return call


# These two cannot import this file.
suggest_names(ArgumentTypeError.__module__)
suggest_names(records.__name__)
