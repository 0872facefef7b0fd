"""How things are called in messages: nearest names, shapes and kinds of values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import torch

from gradgate._torch_private import as_written


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Find the known names that look most like a name.

    Examples:
        >>> nearest("encdoer.weight", ["encoder.weight", "head.bias"])
        ['encoder.weight']
    """
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def describe(value: object) -> str:
    """Say in a few words what a value is, for a message.

    Examples:
        >>> describe(torch.zeros(2, 3)), describe("train"), describe(None)
        ('a float32 tensor of shape (2, 3)', "the str 'train'", 'None')
        >>> describe(torch.arange(2)), describe(torch.arange(2, dtype=torch.uint8))
        ('an int64 tensor of shape (2,)', 'a uint8 tensor of shape (2,)')
    """
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {tuple(value.shape)}{device}"
    if value is None:
        return "None"
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def listed(names: Sequence[object], limit: int = 6) -> str:
    """Write several names in one line, the rest as a count.

    Examples:
        >>> listed(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    head = ", ".join(str(name) for name in names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"


def module_path(sought: torch.nn.Module, roots: Sequence[torch.nn.Module]) -> str:
    """Name a module by its path below one of the roots; by its class if it is a root, or in none."""
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            if module is sought:
                path = as_written(path)
                return f"{number}.{path}" if path and len(roots) > 1 else path or type(module).__name__
    return type(sought).__name__
