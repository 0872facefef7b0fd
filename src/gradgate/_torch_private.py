"""The private names of torch that gradgate uses; those about several processes are in `_torch_distributed`.

Each name is looked up once. Where a version of torch does not have it, a public replacement does the same more slowly
or knows less, or an error says what is lost when the name is used.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from operator import attrgetter, call
from traceback import walk_tb
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling as is_compiling

from gradgate._patches import Patches
from gradgate.errors import GradgateError, GradgateWarning

# --- Versions -------------------------------------------------------------------------------------------------------


OLDEST, NEWEST = (2, 8), (2, 15)
"""The versions of torch that the tests have run on."""

MISSING: dict[str, str] = {}
"""The private names that this torch does not have, each with what is lost."""


class _Missing:
    """A private name that this torch does not have and nothing public replaces."""

    def __init__(self, name: str, lost: str) -> None:
        self.__dict__.update(name=name, lost=lost)

    def _fail(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise GradgateError(
            f"torch {torch.__version__} has no {self.__dict__['name']}.",
            why=f"without it, {self.__dict__['lost']}.",
            fix=f"pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'",
        )

    __call__ = __getattr__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __enter__ = _fail


def _note(name: str, lost: str, instead: Any) -> Any:
    MISSING[name] = lost
    return _Missing(name, lost) if instead is _Missing else instead


def _find(name: str, lost: str, instead: Any = _Missing) -> Any:
    try:
        return pkgutil.resolve_name(f"torch.{name}")
    except (AttributeError, ImportError):
        return _note(f"torch.{name}", lost, instead)


def _find_attribute(sample: object, name: str, lost: str) -> Any:
    """Return a function that reads a private attribute of objects like the sample."""
    found = hasattr(sample, name)
    return attrgetter(name) if found else _note(f"{type(sample).__name__}.{name}", lost, _Missing)


def _check_names(thing: object, names: str, lost: str) -> None:
    """Raise if an object does not have a private name, before anything is done with it."""
    for name in names.split():
        if not hasattr(thing, name):
            _Missing(f"{type(thing).__name__}.{name}", lost)()


def _refuse(*args: Any) -> NoReturn:
    raise RuntimeError("this torch cannot do that")


_NO_DOCTOR = "the doctor cannot trace a step"
_NO_GUARD = "the guard cannot see which layer a value comes from"
_NO_MODULES = "models cannot be searched for their parts"


# --- The graph ------------------------------------------------------------------------------------------------------


def bound_apply(function: type[torch.autograd.Function]) -> Any:
    """Return `Function.apply` of an autograd Function without the signature lookup, about 20 us."""
    # Only for old-style Functions (a `forward` that takes ctx), and only outside torch.func and torch.compile.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


current_node = _find("_C._current_autograd_node", "the doctor names fewer lines of backward", lambda: None)
"""Return the node of the graph whose backward runs in this thread, or None."""


_next_number = _find("_C._autograd._get_sequence_nr", "the doctor names fewer lines of the graph", lambda: 0)


def latest_node_number() -> int:
    """Return the number of the node that autograd made last in this thread: in an operation, the operation's own."""
    return int(_next_number()) - 1


def node_number(node: Any) -> int:
    """Return what `latest_node_number` was when a node was made; -1 for leaves."""
    try:
        number = int(node._sequence_nr())
    except (AttributeError, RuntimeError):  # up to torch 2.12 nodes of a re-entrant checkpoint refuse it
        return -1
    return -1 if number >= 2**63 else number


def nodes_below(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = {None}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def leaf_of(node: Any) -> torch.Tensor | None:
    return getattr(node, "variable", None)


schema_of = _find_attribute(torch.ops.aten.add.Tensor, "_schema", _NO_DOCTOR)
"""Return the schema of an operator: its arguments and results, and which of them it writes to or views."""


def function_class_of(node: Any) -> type[torch.autograd.Function] | None:
    return getattr(type(node), "_forward_cls", None)


def saved_tensors_of(node: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a node of torch's own saved for backward and has not let go of."""
    found = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            with suppress(RuntimeError):  # it was overwritten, which is reported elsewhere, or let go
                found[name.removeprefix("_saved_")] = getattr(node, name)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


# --- Modes of a thread ----------------------------------------------------------------------------------------------


# torch.set_grad_enabled is a class that does this and more; the bare switch costs a tenth of it.
write_grad_mode = _find("_C._set_grad_enabled", "neither grad_mode nor the guard can switch recording")
"""Switch this thread's recording on or off, with nothing around it."""


class DispatchMode(_find("utils._python_dispatch.TorchDispatchMode", _NO_DOCTOR, object)):  # type: ignore[misc]
    """A mode that sees every operation, without Dynamo's wrapper: it runs while nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


undispatched = _find("_C._DisableTorchDispatch", _NO_DOCTOR)
"""A block whose operations go past every dispatch mode: the tracer's own look at a tensor is not traced."""


_top_dispatch_mode = _find("utils._python_dispatch._get_current_dispatch_mode", _NO_DOCTOR)
_top_function_mode = _find("overrides._get_current_function_mode", _NO_DOCTOR)


def on_top(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> bool:
    """Return whether a mode was entered last in this thread, so that it can be left."""
    top: object = _top_dispatch_mode() if isinstance(mode, DispatchMode) else _top_function_mode()
    return top is mode


push_saved_tensors_hooks = _find("_C._autograd._push_saved_tensors_default_hooks", _NO_DOCTOR)
"""Call `pack` with every tensor that is saved for backward in this thread, and `unpack` when it is needed."""

_top_saved_tensors_hooks = _find("_C._autograd._top_saved_tensors_default_hooks", _NO_DOCTOR)
_pop_saved_tensors_hooks = _find("_C._autograd._pop_saved_tensors_default_hooks", _NO_DOCTOR)


def pop_saved_tensors_hooks(pack: Callable[[torch.Tensor], Any]) -> None:
    """Remove these hooks, if they were pushed last."""
    top: tuple[Any, Any] | None = _top_saved_tensors_hooks(True)
    if top is not None and top[0] == pack:
        _pop_saved_tensors_hooks()


class ThreadModes:
    """Recording and autocast of this thread, to be restored where an interrupt has ended a block of torch's early."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        self.remember()

    def remember(self) -> None:
        self._recording = torch.is_grad_enabled()
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in self._kinds]
        self._caching = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()

    def restore(self) -> None:
        write_grad_mode(self._recording)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        while (nesting := _autocast_nesting()) != self._nesting:
            _DEEPER() if nesting < self._nesting else _HIGHER()
        # A cast of a weight that was cached without recording would cut the weight off in the next try.
        torch.clear_autocast_cache()


# Torch counts the blocks of autocast that are open: while one seems to be, casts of old weights are kept.
_DEEPER, _HIGHER = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def _autocast_nesting() -> int:
    """Read the count, which only writing returns; unpacking makes both calls in one bytecode: nothing comes between."""
    _, nesting = map(call, (_DEEPER, _HIGHER))
    return nesting


# --- Modules and hooks ----------------------------------------------------------------------------------------------


def without_compiled_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile wrapped, which has the names that the user gave; else the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def as_written(path: str) -> str:
    """Return the path of a module or parameter as the user wrote the model: without the wrappers of torch.compile."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module, as such, was compiled: wrapped by torch.compile or by its own `compile()`."""
    return "_orig_mod" in children_of(module) or getattr(module, "_compiled_call_impl", None) is not None


def anything_compiled() -> bool:
    """Return whether torch.compile was called in this process; its machinery is loaded by optimizers, too."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


_MODULE = torch.nn.Module()
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]
buffers_of = _find_attribute(_MODULE, "_buffers", "the buffers of a model cannot be copied and put back")
"""Return a module's own table of buffers: writing an entry rebinds the buffer, whatever the module's setters do."""

children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]
children_of = _find_attribute(_MODULE, "_modules", _NO_MODULES)

forward_pre_hooks: Callable[[torch.nn.Module], dict[int, Callable[..., Any]]]
forward_pre_hooks = _find_attribute(_MODULE, "_forward_pre_hooks", "computed weights cannot be frozen")


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own table of parameters; an empty one before its `__init__` has run."""
    return module.__dict__.get("_parameters", {})  # type: ignore[no-any-return]


def computed_name(hook: Any) -> str | None:
    """Return the name of the tensor that a hook computes before forward: those of pruning and of the older norms do."""
    return getattr(hook, "name", getattr(hook, "_tensor_name", None))


def is_power_iteration(module: torch.nn.Module, buffer: str) -> bool:
    """Return whether a buffer is a vector of torch's spectral norm: as a parametrization, or in the older form."""
    if buffer in ("_u", "_v"):
        return "_u" in buffers_of(module)
    return buffer[-2:] in ("_u", "_v") and f"{buffer[:-2]}_orig" in parameters_of(module)


class SettingsModule(torch.nn.Module):
    """A module with tensors that are neither parameters nor buffers, and that move and are saved with it."""

    move_settings: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]
    save_settings: Callable[[dict[str, Any], str], None]
    load_settings: Callable[[dict[str, Any], str, list[str]], None]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SettingsModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        self.move_settings(fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.save_settings(destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *more: list[str]
    ) -> None:
        self.load_settings(state_dict, prefix, missing)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *more)


MODULE_HOOKS: tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]] = (
    _find("nn.modules.module._global_forward_pre_hooks", _NO_GUARD),
    _find("nn.modules.module._global_forward_hooks", _NO_GUARD),
    _find("nn.modules.module._global_forward_hooks_always_called", _NO_DOCTOR),
)
"""Torch's tables of hooks before and after the forward of every module, and of those that are always called."""

_HOOKS_WITH_KWARGS: dict[Any, Any] = _find("nn.modules.module._global_forward_hooks_with_kwargs", _NO_GUARD)

OPTIMIZER_HOOKS: tuple[dict[Any, Any], dict[Any, Any]] = (
    _find("optim.optimizer._global_optimizer_pre_hooks", "nothing can be frozen"),
    _find("optim.optimizer._global_optimizer_post_hooks", "nothing can be frozen"),
)
"""Torch's tables of hooks before and after every step of every optimizer; a key may be anything."""


def step_hooks(optimizer: torch.optim.Optimizer | None) -> dict[Any, Any]:
    """Return torch's table of hooks before the steps of an optimizer; of all without one."""
    return OPTIMIZER_HOOKS[0] if optimizer is None else optimizer._optimizer_step_pre_hooks


class ModuleCall(NamedTuple):
    """A call of a module, as a traceback shows it."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_MODULE_CALL = _find("nn.Module._call_impl", "errors do not name the layer they came from", _refuse).__code__


def innermost_call(traceback: TracebackType | None) -> ModuleCall | None:
    """Find the innermost call of a module that an exception came through, with its arguments."""
    calls = [frame.f_locals for frame, _ in walk_tb(traceback) if frame.f_code is _MODULE_CALL]
    return ModuleCall(*(calls[-1][name] for name in ("self", "args", "kwargs"))) if calls else None


def end_checkpoints(traceback: TracebackType | None) -> None:
    """Remove the hooks that `torch.utils.checkpoint` leaves after an exception, up to torch 2.12."""
    # They live as long as the traceback, and would recompute what is saved meanwhile from the inputs that failed.
    frames = [frame for frame, _ in walk_tb(traceback) if frame.f_code.co_name == "checkpoint"]
    for frame in reversed(frames):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and "gen" in frame.f_locals:
            frame.f_locals["gen"].close()


@contextmanager
def watched_modules(patches: Patches, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call functions around the forward of every module, as long as the block lasts."""
    key = object()
    with patches.block():
        patches.put(_HOOKS_WITH_KWARGS, key, True)
        patches.put(MODULE_HOOKS[1], key, leave)
        patches.put(MODULE_HOOKS[0], key, enter)
        yield


def call_with_gradient(patches: Patches, leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a function with the gradient that reaches a leaf, until the patches are undone; it outlives its graph."""
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    patches.put(leaf._backward_hooks, object(), hook)


@contextmanager
def compiled_as_written(patches: Patches) -> Iterator[None]:
    """Run compiled functions and modules as they were written, so that hooks see inside and no size is compiled for."""
    with patches.block():
        patches.put(vars(warnings), "filters", warnings.filters[:])
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        run_as_written(patches)
        yield


def run_as_written(patches: Patches) -> None:
    """Run compiled functions and modules as they were written, until the patches are undone."""
    stance = _find("_dynamo.eval_frame.DynamoStance", "compiled models cannot be run as they were written")
    patches.put(vars(sys.modules["torch._dynamo.eval_frame"]), "_stance", stance("force_eager"))


# --- Workers of a DataLoader ----------------------------------------------------------------------------------------


_LOADER = "_workers _worker_pids_set _shutdown_workers"


def own_workers(batches: Any) -> list[Any]:
    """Return the processes behind an iterator over a DataLoader; from now on the caller handles their deaths."""
    _check_names(batches, _LOADER, "a worker of a DataLoader cannot be replaced")
    if batches._worker_pids_set:
        # Else a handler of SIGCHLD raises in the middle of whatever the program is doing when a worker dies.
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return list(batches._workers)


def stop_workers(batches: Any) -> None:
    batches._shutdown_workers()


def is_waiting(error: Exception) -> bool:
    """Return whether a DataLoader raised because of its `timeout`; then it may be asked again."""
    return str(error).startswith("DataLoader timed out after ")


def is_worker_death(error: Exception) -> bool:
    return str(error).startswith("DataLoader worker (pid")


def is_broken_message(error: Exception) -> bool:
    """Return whether a DataLoader could not read what a worker sent; what a worker itself raised says so."""
    return isinstance(error, OSError | EOFError) and not str(error).startswith("Caught ")


# --- Shared memory, and many tensors at once ------------------------------------------------------------------------


_TENSOR = torch.empty(0, device="cpu")
base_of = _find_attribute(_TENSOR, "_base", "gates cannot tell views from other tensors")
"""Return the tensor that a tensor is a view of, or None."""

version_of = _find_attribute(_TENSOR, "_version", "in-place writes are not seen")
"""Count the in-place writes that autograd has seen; a RuntimeError for a tensor of inference mode."""


is_view: Callable[[torch.Tensor], bool] = _find("Tensor._is_view", _NO_DOCTOR)
"""Return whether autograd takes a tensor for a view of another."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing torch.distributed.tensor, which takes long."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process: of a DTensor its shard, of others all."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor on every process: of a DTensor its shards together."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


copy_on_write: Callable[[torch.Tensor], torch.Tensor] = _find("_lazy_clone", "a gate costs more", _refuse)
"""Share memory until one of the two is written to; `recorded_without_copy` says where that may and can be done."""


def recorded_without_copy(x: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the values and strides of x, as a node of the graph; None where it cannot be."""
    # The memory is shared copy-on-write: an in-place operation on the result leaves x as it is.
    base = base_of(x)
    owner = x if base is None else base
    if owner.is_leaf and owner.requires_grad:
        return None
    try:
        return copy_on_write(x)
    except RuntimeError:
        return None


def without_copy(x: torch.Tensor) -> torch.Tensor:
    """Do the same while nothing is recorded, for any tensor."""
    # Without copy-on-write the result is a view; autograd refuses to overwrite one that an autograd Function returned.
    shared = recorded_without_copy(x)
    return x.view_as(x) if shared is None else shared


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors in one call; half the time of a loop."""
    try:
        if destinations:
            _copy_all(destinations, sources)
    except (RuntimeError, AssertionError):  # conjugate views, and shards, of which the parts in this process are copied
        _one_by_one("copy_")(map(local_part, destinations), map(local_part, sources))


def _one_by_one(method: str) -> Callable[..., None]:
    def loop(destinations: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            getattr(destination, method)(source)

    return loop


_copy_all = _find("_foreach_copy_", "copies of buffers take longer", _one_by_one("copy_"))
add_tensors = _find("_foreach_add_", "an interrupt can leave half of the gradients added", _one_by_one("add_"))
"""Add many tensors to as many others in place, in one call that no interrupt can split."""


find_non_finite = _find("_amp_foreach_non_finite_check_and_unscale_", "the check for NaN takes longer", _refuse)
"""Set `found` to 1 if any element of any tensor is NaN or infinite: `find_non_finite(tensors, found, one)`.

One fused pass that does not wait for the device. It multiplies by `one` in place, which changes no bit; both are
float32 tensors of one element. A RuntimeError for sparse, complex or overlapping tensors, and for several devices.
"""


_use_count = _find("_C._storage_Use_Count", "the guard cannot work with DistributedDataParallel")


def memory_holders(tensor: torch.Tensor) -> int:
    """Count the references to the memory of a tensor: the tensors that share it, and one of this call."""
    return int(_use_count(tensor.untyped_storage()._cdata))


def write_count(tensor: torch.Tensor) -> int:
    """Count the in-place writes into a tensor that autograd has seen; those of an inference tensor are not counted."""
    try:
        return int(version_of(tensor))
    except RuntimeError:  # asking `is_inference` first would cost more than the answer
        return 0


def write_counts(tensors: Iterable[torch.Tensor]) -> int:
    return sum(map(write_count, tensors))


def write_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a mark of a tensor's memory that changes with in-place writes that autograd sees, and with new memory."""
    return tensor.data_ptr(), write_count(tensor)


# --- Tracing --------------------------------------------------------------------------------------------------------


# Bound once: these are asked in every call of a small function, and each dot takes its time.
_NO_FAKES, _NO_VMAP = "FakeTensorMode is not noticed", "vmap is not noticed"
_dispatch_mode = _find("_C._get_dispatch_mode", _NO_FAKES, lambda key: None)
_FAKE = _find("_C._TorchDispatchModeKey.FAKE", _NO_FAKES, None)
_FAKE_TENSOR = _find("_subclasses.fake_tensor.FakeTensor", _NO_FAKES, ())
_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", _NO_VMAP, lambda tensor: False)
_is_batched = _find("_C._functorch.is_batchedtensor", _NO_VMAP, lambda tensor: True)
_is_batched_in_the_old_way = _find("_C._functorch.is_legacy_batchedtensor", _NO_VMAP, lambda tensor: False)
_unwrapped = _find("_C._functorch.get_unwrapped", _NO_VMAP)
_batch_dimension = _find("_C._functorch.maybe_get_bdim", _NO_VMAP)  # -1 where torch.func.grad or jvp wraps it

outside_functorch = _find("_C._DisableFuncTorch", "failed checks name no rows under torch.func", nullcontext)
"""A block whose operations torch.func does not see."""

inside_functorch = _find("_C._are_functorch_transforms_active", "torch.func is not noticed", lambda: False)
"""Return whether torch.func (grad, vmap, jvp, ...) is active around this call."""


# torch.compile keeps it in the graph, FakeTensorMode knows it, a GPU runs it without waiting; vmap has no rule for it.
assert_later = _find("_assert_async", "an empty slice is not noticed in compiled code", lambda *args: None)
"""Raise a RuntimeError with this message when the device finds the condition false; nothing waits for it."""


_find("autograd.forward_ad._current_level", "forward-mode differentiation is not noticed", None)


def inside_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active in this thread (torch.func.jvp uses it too)."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_traced() -> bool:
    """Return whether torch.compile, torch.func or forward-mode differentiation is active around this call."""
    return is_compiling() or inside_functorch() or inside_forward_mode()


def has_data(*tensors: torch.Tensor) -> bool:
    """Return whether the host can read the values of tensors."""
    # Not while torch.compile or FakeTensorMode traces, on the meta device, or under vmap; it can in torch.func.grad.
    if is_compiling() or _dispatch_mode(_FAKE) is not None:
        return False
    return all(map(_is_concrete, tensors))


def _is_concrete(tensor: torch.Tensor) -> bool:
    while _is_wrapped(tensor):
        if _is_batched(tensor):
            return False
        tensor = _unwrapped(tensor)
    # torch.autograd.grad(is_grads_batched=True) still runs backward under the older vmap, which nothing above sees.
    return not (_is_batched_in_the_old_way(tensor) or tensor.is_meta or isinstance(tensor, _FAKE_TENSOR))


def without_batching(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of all samples that vmap batches in a tensor, its dimensions in front, the outermost first."""
    while _is_wrapped(tensor):
        place = _batch_dimension(tensor)
        tensor = _unwrapped(tensor)
        tensor = tensor if place < 0 else tensor.movedim(place, 0)
    return tensor


_NO_KERNELS = "the native kernels are not used"
_open_modes = _find("_C._len_torch_dispatch_stack", _NO_KERNELS, lambda: 1)
_keys_of = _find("_C._dispatch_keys", _NO_KERNELS, lambda tensor: SimpleNamespace(raw_repr=object))
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_PLAIN_KEYS = {_keys_of(_TENSOR).raw_repr()}
with torch.inference_mode():
    _PLAIN_KEYS.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors are nothing but values in the memory of the CPU, and no dispatch mode sees operations."""
    # False for subclasses, other devices and layouts, what vmap batches, conjugate views, and autograd's zeros.
    if _open_modes():
        return False
    for x in tensors:  # noqa: SIM110 - `all` and a generator take longer than the answer
        if type(x) not in _PLAIN_TYPES or _keys_of(x).raw_repr() not in _PLAIN_KEYS:
            return False
    return True


storage_address: Callable[[torch.Tensor], int]
storage_address = _find("_C._data_address", "the native kernels copy more", torch.Tensor.data_ptr)
"""Return the address of a tensor's storage; unlike `data_ptr()`, it leaves memory shared copy-on-write shared."""


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values in memory of its own, and does not wrap or imitate another."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


_NO_TREES, _NO_NODES = "nested batches cannot be read", "torch.func takes the state of a module for one value"
tree_flatten: Callable[..., tuple[list[Any], Any]] = _find("utils._pytree.tree_flatten", _NO_TREES)
tree_unflatten = _find("utils._pytree.tree_unflatten", _NO_TREES)
register_pytree_node = _find("utils._pytree.register_pytree_node", _NO_NODES, lambda *args: None)


def _warn_of_version(version: str) -> None:
    """Warn that this version of torch is not tested, and of what is lost."""
    number = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= number <= NEWEST:
        losses = [f"\n- {name} is missing: {lost}" for name, lost in MISSING.items()]
        warnings.warn(
            f"gradgate is tested on torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is {version}. "
            f"{'All that gradgate needs of torch is there.' if not losses else 'Not all that it needs is there:'}"
            + "".join(losses),
            GradgateWarning,
            stacklevel=2,
        )


_warn_of_version(torch.__version__)
