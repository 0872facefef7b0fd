"""The one place that knows torch's versions and private names; every other file asks here.

Each name says what it promises; where torch changes, this file changes and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "DispatchMode",
    "ModuleCall",
    "apply_function",
    "assert_later",
    "bound_apply",
    "buffers_of",
    "copy_tensors",
    "current_node",
    "enter_mode",
    "find_non_finite",
    "function_class_of",
    "has_data",
    "holds_its_values",
    "innermost_call",
    "inside_forward_mode",
    "inside_functorch",
    "is_compiled",
    "is_compiling",
    "is_traced",
    "latest_node_number",
    "node_number",
    "on_top",
    "read_grad_mode",
    "recorded_without_copy",
    "saved_tensors_of",
    "schema_of",
    "tree_flatten",
    "tree_unflatten",
    "undispatched",
    "watched_modules",
    "without_compiled_wrappers",
    "without_copy",
    "write_grad_mode",
    "write_mark",
]

read_grad_mode = torch.is_grad_enabled
"""Tell whether this thread records; the public name, kept beside its counterpart."""

# torch.set_grad_enabled is a class that does this and more; the bare switch costs a tenth of it.
write_grad_mode = torch._C._set_grad_enabled
"""Switch this thread's recording on or off, with nothing around it."""

inside_functorch = torch._C._are_functorch_transforms_active
"""Tell whether torch.func (grad, vmap, jvp, ...) is at work around this call."""


# torch.compile keeps it in the graph, FakeTensorMode knows it, a GPU runs it without waiting; vmap has no rule for it.
assert_later = torch._assert_async
"""Raise a RuntimeError with this message when the device finds the condition false; nothing waits for it."""


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd Function without the per-call signature lookup of `Function.apply`.

    `Function.apply` of a new-style Function (one with `setup_context`) looks at the signature of `forward` on
    each call, about 20 us; the C-level apply beneath it does not. Only the C-level one runs old-style Functions
    (a `forward` that takes ctx) just as `apply` does, and only outside torch.func and torch.compile.

    Args:
        function: The Function, with a forward that takes ctx.
        *args: What forward takes after ctx.

    Returns:
        What forward returns.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def bound_apply(function: type[torch.autograd.Function]) -> Any:
    """Give what `apply_function` calls for this Function, to be kept and called where every microsecond counts.

    Args:
        function: As for `apply_function`.

    Returns:
        The C-level apply.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def has_data(*tensors: torch.Tensor) -> bool:
    """Tell whether the host may look at the values of tensors, one by one.

    It may not while torch.compile or FakeTensorMode traces, on the meta device, or where vmap holds a whole batch
    of values in the place of each one. Inside torch.func.grad and jvp it may.

    Args:
        *tensors: Any tensors.

    Returns:
        Whether `.item()`, `nonzero()` and boolean indexing work on all of them.
    """
    if is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    return all(_is_concrete(tensor) for tensor in tensors)


def _is_concrete(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    # torch.autograd.grad(is_grads_batched=True) still runs backward under the older vmap, which nothing above sees.
    legacy: bool = torch._C._functorch.is_legacy_batchedtensor(tensor)
    return not (legacy or tensor.is_meta or isinstance(tensor, FakeTensor))


def inside_forward_mode() -> bool:
    """Tell whether a level of forward-mode differentiation is open in this thread (torch.func.jvp opens one too)."""
    return forward_ad._current_level >= 0


def is_traced() -> bool:
    """Tell whether torch.compile, torch.func or forward-mode differentiation looks at this call."""
    return is_compiling() or inside_functorch() or forward_ad._current_level >= 0


def recorded_without_copy(x: torch.Tensor) -> torch.Tensor | None:
    """Give a tensor of its own with the values, strides and memory of x, as a node of the graph behind x.

    The memory is shared copy-on-write: whoever is written to first gets memory of its own, so that an in-place
    operation on the result leaves x as it is (and copies nothing where x is no longer held by anyone).

    Args:
        x: A tensor.

    Returns:
        The same values under another name. None for a parameter (and a view of one): its memory must stay where it
        is. None also where torch cannot do it: memory that it does not own (numpy's, shared memory), layouts that are
        not strided, many subclasses, and complex dtypes while recording.
    """
    owner = x if x._base is None else x._base
    if owner.is_leaf and owner.requires_grad:
        return None
    try:
        return torch._lazy_clone(x)
    except RuntimeError:
        return None


def without_copy(x: torch.Tensor) -> torch.Tensor:
    """Do the same while nothing is recorded, for any tensor.

    Where copy-on-write is not to be had the result is a view. Autograd refuses to overwrite a view that an autograd
    Function has returned, so x is safe there too.

    Args:
        x: A strided tensor.

    Returns:
        The same values under another name.
    """
    shared = recorded_without_copy(x)
    return x.view_as(x) if shared is None else shared


def without_compiled_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    """Give the module that torch.compile wrapped, which has the names that the user gave; else the module itself.

    Args:
        module: Any module.

    Returns:
        The wrapped module, or the same one.
    """
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None else module


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module, as such, was compiled: wrapped by torch.compile or by its own `compile()`.

    Args:
        module: Any module.

    Returns:
        Whether it was.
    """
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors in one call; half the time of a loop.

    Args:
        destinations: Where to; written in place.
        sources: Where from, in the same order.
    """
    if destinations:
        torch._foreach_copy_(destinations, sources)


def find_non_finite(tensors: list[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> None:
    """Set `found` to 1 if any element of any tensor is NaN or infinite, without waiting for the device.

    It is what GradScaler uses: one fused pass that also multiplies by `one` in place, so the values stay as they
    are, bit for bit. No other check of many tensors comes near its speed.

    Args:
        tensors: Dense floating-point tensors on one device.
        found: A float32 tensor of one element on that device.
        one: A float32 tensor of one element on that device that holds 1.

    Raises:
        RuntimeError: A tensor is of a kind that this pass does not know (sparse, complex, overlapping memory).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Give a module's own table of buffers: writing an entry rebinds the buffer, whatever the module's setters do."""
    return module._buffers


def write_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Give a mark of a tensor's memory that changes with in-place writes that autograd sees, and with new memory."""
    return tensor.data_ptr(), tensor._version


class ModuleCall(NamedTuple):
    """A call of a module, as a traceback shows it."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def innermost_call(traceback: TracebackType | None) -> ModuleCall | None:
    """Find the innermost call of a module that an exception came through, with its arguments.

    Args:
        traceback: The exception's traceback.

    Returns:
        The call, or None if the exception came through no module.
    """
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_code is _MODULE_CALL:
            found = traceback.tb_frame
        traceback = traceback.tb_next
    if found is None:
        return None
    seen = found.f_locals
    return ModuleCall(seen["self"], seen["args"], seen["kwargs"])


_MODULE_CALL = torch.nn.Module._call_impl.__code__


@contextmanager
def watched_modules(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call functions around the forward of every module, as long as the block lasts.

    Args:
        enter: Called before, with the module and its positional arguments.
        leave: Called after, with the module, its positional and keyword arguments, and its output.
    """
    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            # Not removed by torch 2.13; what is left there makes torch.compile believe in global hooks for ever.
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)


# --- what the doctor's tracer asks ---------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation; it runs while nothing is compiled, and so without Dynamo's wrapper."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


undispatched = torch._C._DisableTorchDispatch
"""A block whose operations go past every dispatch mode: the tracer's own look at a tensor is not traced."""

current_node = torch._C._current_autograd_node
"""Give the node of the graph whose backward runs in this thread, or None."""


def latest_node_number() -> int:
    """Give the number of the node that autograd made last in this thread: in an operation, the operation's own."""
    return torch._C._autograd._get_sequence_nr() - 1


def node_number(node: Any) -> int:
    """Give the number of a node of the graph, which `latest_node_number` gave when it was made; -1 for leaves.

    Args:
        node: A node, as in `tensor.grad_fn`.

    Returns:
        Its number.
    """
    number = int(node._sequence_nr())
    return -1 if number >= 2**63 else number


def schema_of(operator: Any) -> Any:
    """Give the schema of an operator: its arguments and results, and which of them it writes to or views.

    Args:
        operator: What a dispatch mode is handed as `func`.

    Returns:
        The schema.
    """
    return operator._schema


def function_class_of(node: Any) -> type[torch.autograd.Function] | None:
    """Give the user's autograd Function that made a node.

    Args:
        node: A node, as in `tensor.grad_fn`.

    Returns:
        The class, or None for nodes of torch's own.
    """
    return getattr(type(node), "_forward_cls", None)


def saved_tensors_of(node: Any) -> dict[str, torch.Tensor]:
    """Give the tensors that a node of torch's own saved for backward and has not let go of.

    Args:
        node: A node whose backward runs.

    Returns:
        The tensors, each by its name in the formula, such as "self" or "result".
    """
    found = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # it was overwritten, which is told elsewhere, or let go
                continue
            if isinstance(value, torch.Tensor):
                found[name.removeprefix("_saved_")] = value
    return found


def enter_mode(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> None:
    """Put a mode in force in this thread.

    Args:
        mode: A mode.
    """
    mode.__enter__()  # type: ignore[no-untyped-call]


def leave_mode(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> None:
    """Take a mode that is on top out of force.

    Args:
        mode: A mode.
    """
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def on_top(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> bool:
    """Tell whether a mode was entered last in this thread, so that it can be left.

    Args:
        mode: A mode.

    Returns:
        Whether it lies on top of the modes of its kind.
    """
    if isinstance(mode, DispatchMode):
        return _get_current_dispatch_mode() is mode
    top: object = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return top is mode


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has its values in memory of its own, and does not wrap or only imitate others.

    Args:
        tensor: Any tensor.

    Returns:
        False for fake tensors, distributed tensors and other subclasses that dispatch by themselves.
    """
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
