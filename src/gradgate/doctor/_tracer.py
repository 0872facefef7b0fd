"""The tracer: records every operation, every save for backward and every switch of a mode in a `Trace`.

A dispatch mode sees what torch computes. A function mode sees the calls that leave no operation behind (`.data`,
`.item()`, `no_grad`). Hooks on modules, optimizers and saved tensors see the rest. In a backward pass each node of the
graph gets a hook, which costs less than tracing every operation of backward and says more: a node with a finite
incoming and a non-finite outgoing gradient is the cause, whatever it computed inside.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from gradgate._patches import Patches
from gradgate._source import Location, Owner, is_foreign, locate
from gradgate._text import text_of
from gradgate._torch_private import (
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    DispatchMode,
    current_node,
    function_class_of,
    inside_forward_mode,
    inside_functorch,
    latest_node_number,
    leaf_of,
    node_number,
    nodes_below,
    on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_of,
    undispatched,
    write_count,
    write_grad_mode,
)
from gradgate.doctor import _numerics as numerics
from gradgate.doctor._trace import (
    Backward,
    BadValue,
    Call,
    Escape,
    Freeze,
    Op,
    Operator,
    OptimizerStep,
    Overwrite,
    Raised,
    Switch,
    Trace,
    Values,
    Write,
    ZeroGradient,
    operator_of,
    overlaps,
    region_of,
    storage_of,
    tensors_in,
)

_Tensor = torch.Tensor

# --- running modules --------------------------------------------------------------------------------------------------


class Running:
    """The modules that have begun and not ended yet, each with its index in `Trace.calls`."""

    def __init__(self) -> None:
        self.drawn: frozenset[int] | None = None
        self.stack: list[tuple[torch.nn.Module, int]] = []

    @property
    def module(self) -> torch.nn.Module | None:
        return self.stack[-1][0] if self.stack else None

    @property
    def call(self) -> int:
        return self.stack[-1][1] if self.stack else -1

    def begin(self, module: torch.nn.Module, trace: Trace) -> None:
        number = self.call
        again = bool(trace.backwards) and trace.backwards[-1].running  # a checkpoint that computes once more
        if not again and (self.drawn is None or id(module) in self.drawn):
            location = None if self.stack else locate(sys._getframe(2), Owner.USER)
            if number >= 0:
                trace.calls[number].leaf = False
            trace.calls.append(Call(module, number, module.training, location))
            number = len(trace.calls) - 1
        self.stack.append((module, number))


# --- tensors saved for backward ---------------------------------------------------------------------------------------


class Saved(NamedTuple):
    tensor: torch.Tensor
    version: int
    clock: int
    node: int
    location: Location | None


class Saving:
    """The hooks for tensors that are saved for backward, and the log of writes that they are compared with."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._writes: defaultdict[int, list[Write]] = defaultdict(list)
        self._older: defaultdict[int, list[Write]] = defaultdict(list)
        self._clock = 0

    def begin_again(self) -> None:
        """Begin a new trace; a backward pass of the next step may still need what this one wrote to."""
        self._older, self._writes = self._writes, defaultdict(list)

    def log_write(self, tensor: torch.Tensor, name: str, location: Location | None, by_optimizer: bool) -> None:
        self._clock += 1
        region = region_of(tensor)
        self._writes[region.storage].append(Write(self._clock, region, name, location, by_optimizer))

    def pack(self, tensor: torch.Tensor) -> Saved:
        # A result that its own node holds would never be freed, so a detached tensor is kept; it shares memory and
        # version with the original.
        kept = tensor
        if not tensor.is_leaf:
            with undispatched():
                kept = tensor.detach()
        return Saved(kept, write_count(tensor), self._clock, latest_node_number(), self.tracer.here())

    def unpack(self, saved: Saved) -> torch.Tensor:
        if saved.clock != self._clock:
            write = self._first_write_since(saved)
            if write is not None:
                self._report(saved, write)
        return saved.tensor

    def _first_write_since(self, saved: Saved) -> Write | None:
        region = region_of(saved.tensor)
        moved = write_count(saved.tensor) != saved.version
        writes = [*self._older.get(region.storage, ()), *self._writes.get(region.storage, ())]
        later = (write for write in writes if write.clock > saved.clock)
        with undispatched():
            return next((write for write in later if moved or overlaps(write.region, region)), None)

    def _report(self, saved: Saved, write: Write) -> None:
        tensor, shape = saved.tensor, tuple(saved.tensor.shape)
        silent = write_count(tensor) == saved.version and not write.name.startswith(("_foreach_", "_fused_"))
        self.tracer.trace.overwrites.append(Overwrite(saved.location, saved.node, write, silent, shape))
        if not silent:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(shape)}] is at version {write_count(tensor)}; "
                f"expected version {saved.version} instead."
            )


# --- gradients that are used twice ------------------------------------------------------------------------------------

References = list[weakref.ref[torch.Tensor]]


class Reuse:
    """Remembers which gradients were used."""

    # A gradient that was zeroed is another tensor (`set_to_none=True`), or a zero was written to it.

    def __init__(self) -> None:
        self._used: dict[int, References] = {}
        self._zeroed: set[int] = set()
        self._zeroed_since_backward: set[int] = set()
        self._at_start: References = []

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        self._at_start = [weakref.ref(p.grad) for p in parameters if p.grad is not None]

    def zero(self, gradient: torch.Tensor) -> None:
        self._zeroed.add(storage_of(gradient))
        self._zeroed_since_backward.add(storage_of(gradient))

    def is_zeroed(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient is gone, or was zeroed since the last backward pass."""
        return gradient is None or storage_of(gradient) in self._zeroed_since_backward

    def after_backward(self) -> None:
        self._zeroed_since_backward.clear()

    def use(self, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
        """Return whether an optimizer uses gradients that it used before, and gradients from before the trace."""
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        unchanged = {id(gradient) for gradient in gradients if storage_of(gradient) not in self._zeroed}
        known = self._used.get(id(optimizer), [])
        again, old = (any(id(ref()) in unchanged for ref in refs) for refs in (known, self._at_start))
        self._used[id(optimizer)] = [weakref.ref(gradient) for gradient in gradients]
        self._at_start = []
        self._zeroed.clear()
        return again, old


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- the tracer -------------------------------------------------------------------------------------------------------

_MOST_OPERATIONS = 500_000
_DETACH = operator_of(torch.ops.aten.detach.default)
Listener = Callable[[torch.optim.Optimizer | None], None]


class Tracer:
    """Traces what happens in this thread between `resume` and `pause`."""

    def __init__(self) -> None:
        self.saves = True
        self.trace = Trace()
        self.previous = Trace()
        self.values = Values(self.trace)
        self.saving = Saving(self)
        self.nonfinite = numerics.NonfiniteTracker(self)
        self.reuse = Reuse()
        self.location: Location | None = None
        self.off_switch = -1  # the switch in the trace that turned recording off
        self.off_switches: list[int] = []
        self.call = ""  # what the user wrote, if a call leaves another operation behind
        self.cleared: Location | None = None
        self.frozen: dict[int, tuple[weakref.ref[torch.Tensor], Freeze]] = {}
        self.unfrozen: set[int] = set()
        self.active = False
        self.running = Running()
        self.before_step: list[Listener] = []
        self.after_step: list[Listener] = []
        self.operations = _Operations(self)
        self.patches = Patches()
        self._calls = _Calls(self)
        self._made_in_inference: dict[int, tuple[weakref.ref[torch.Tensor], Location | None]] = {}
        self._late_backward: Backward | None = None
        self._step_frame: FrameType | None = None
        self._dormant = self._stepping = False

    # --- start and end --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks on modules and optimizers; nothing is traced yet."""
        before, after, always = MODULE_HOOKS
        before_step, after_step = OPTIMIZER_HOOKS
        self.patches.put(before, self, self._module_begins)
        self.patches.put(always, self, True)
        self.patches.put(after, self, self._module_ends)
        self.patches.put(before_step, self, self._optimizer_begins)
        self.patches.put(after_step, self, self._optimizer_ends)

    def uninstall(self) -> None:
        self._wake()
        self.patches.undo()

    def _wake(self) -> None:
        """Leave the modes of a tracer that was paused inside an operation, as soon as that is possible."""
        if self._dormant and self.can_pause():
            self._dormant = False
            self._leave_modes()

    def resume(self) -> None:
        """Begin to trace this thread. It may be called from inside a hook, and so may `pause`."""
        if self.saves:
            push_saved_tensors_hooks(self.saving.pack, self.saving.unpack)
        self.trace.recording_at_start = torch.is_grad_enabled()
        self.active = True
        if not self._dormant:
            self._enter_modes()
        self._dormant = False

    def pause(self) -> None:
        """Stop tracing; it may be called again if an interrupt broke it off."""
        self.active = False
        self.trace.recording_at_end = torch.is_grad_enabled()
        self._dormant = self._step_frame is None and not self.can_pause()
        self._leave_modes()
        self._step_frame = None
        self.running.stack.clear()
        pop_saved_tensors_hooks(self.saving.pack)

    def _enter_modes(self) -> None:
        self.operations.__enter__()
        self._calls.__enter__()  # type: ignore[no-untyped-call]

    def _leave_modes(self) -> None:
        for mode in (self._calls, self.operations):
            if on_top(mode):
                mode.__exit__(None, None, None)

    def can_pause(self) -> bool:
        """Return whether no mode that was entered after the tracer's is still open."""
        return on_top(self._calls) and on_top(self.operations)

    def begin_again(self) -> None:
        """Start a new trace; what was saved for backward before stays readable."""
        old = self.trace
        old.recording_at_end = torch.is_grad_enabled()
        self.previous = old
        self.trace = Trace(recording_at_start=old.recording_at_end, batch_size=old.batch_size, modules=old.modules)
        self.values = Values(self.trace)
        self.saving.begin_again()
        self.nonfinite.marks.clear()
        self.off_switch = -1
        self.off_switches.clear()
        modules, self.running.stack = self.running.stack, []
        for module, _ in modules:
            self.running.begin(module, self.trace)

    # --- operations -----------------------------------------------------------------------------------------------

    def here(self) -> Location | None:
        """Return the user's line that is running."""
        if self.location is None:
            self.location = locate(sys._getframe(1))
        return self.location

    def _locate_backward(self, node: Any) -> None:
        """Let an operation inside backward stand at the line of the operation that it is the backward of."""
        if not self.trace.backwards or not self.trace.backwards[-1].running:
            self._late_backward = start_late(self)
        number = self.trace.op_number_of_node.get(node_number(node))
        if number is not None:
            self.location = self.trace.ops[number].location

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""
        if inside_forward_mode():  # tangents may have no memory at all; nothing here is for backward
            self.trace.functional = True
            return func(*args, **kwargs)
        operator = operator_of(func)
        records = torch.is_grad_enabled()
        if records:
            self.off_switch = -1
        node = current_node()
        if node is not None:
            self._locate_backward(node)
        elif self._late_backward is not None:
            self._late_backward.running, self._late_backward = False, None
        inputs: list[torch.Tensor] = []
        codes: list[int] = []
        for argument in () if operator.shape_only else (*args, *kwargs.values()):
            for tensor in tensors_in(argument):
                inputs.append(tensor)
                self.values.read(tensor, codes)
        writes = bool(operator.written_names)
        bad_before = self.nonfinite.marks_of_targets(operator, args, kwargs) if writes else None
        result = func(*args, **kwargs)
        location = self.location or self.here()
        if len(self.trace.ops) >= _MOST_OPERATIONS:  # so many operations without a step: there is none to explain
            self.begin_again()
        trace, newest = self.trace, latest_node_number()
        number = len(trace.ops)
        trace.op_number_of_node.setdefault(newest, number)
        connected = records and operator.name != "detach" and any(code & 1 for code in codes)
        if writes:
            outputs = self._log_writes(operator, args, kwargs, location)
        else:
            outputs = self._log_results(operator, result, connected, location)
        trace.ops.append(
            Op(
                operator,
                location,
                self.running.module,
                self.running.call,
                records,
                self.off_switch if not records else -1,
                tuple(codes),
                tuple(outputs),
                (self.call,) if self.call else _plain(args, kwargs) if operator.keeps_arguments else (),
            )
        )
        if not operator.view and not operator.silent:
            self.nonfinite.check(operator, number, args, kwargs, inputs, result, outputs, bad_before)
        if writes and node is None and self._updates_by_hand(operator.targets(args, kwargs)):
            trace.updated_by_hand = location
            for listener in (*self.before_step, *self.after_step):
                listener(None)
        return result

    def _updates_by_hand(self, written: Iterable[torch.Tensor]) -> bool:
        """Return whether a write after backward changes a leaf that has a gradient: an update without an optimizer."""
        if self._stepping or not self.trace.backwards or self.trace.backwards[-1].running:
            return False
        leaves = [root.tensor for root in self.trace.roots.values() if root.leaf and root.requires_grad]
        updated = {storage_of(leaf) for leaf in leaves if leaf is not None and leaf.grad is not None} - {0}
        return any(storage_of(tensor) in updated for tensor in written)

    def _log_results(self, operator: Operator, result: Any, connected: bool, location: Location | None) -> list[int]:
        values, tensors = self.values, tensors_in(result)
        outputs = [values.make_view(x, connected) if operator.view else values.make(x) for x in tensors]
        if not connected and outputs:
            values.unconnected.update(outputs)
            if not torch.is_grad_enabled() and torch.is_inference_mode_enabled():
                self.trace.inference_values.update(dict.fromkeys(outputs, location))
                if isinstance(result, _Tensor):
                    self._made_in_inference[id(result)] = (weakref.ref(result), location)
        return outputs

    def _log_writes(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], location: Location | None
    ) -> list[int]:
        outputs = []
        for target in operator.targets(args, kwargs):
            self.saving.log_write(target, operator.name, location, by_optimizer=False)
            outputs.append(self.values.write(target))
            if operator.name in ("zero_", "_foreach_zero_"):
                self.reuse.zero(target)
                self.cleared = location
        self.trace.scaled |= operator.name == "_amp_foreach_non_finite_check_and_unscale_"
        return outputs

    def note_detached(self, tensor: torch.Tensor, code: int) -> None:
        """Record that a tensor lost its history in place, which leaves no operation behind."""
        value = self.values.write(tensor)
        self.values.unconnected.add(value)
        module, call = self.running.module, self.running.call
        self.trace.ops.append(Op(_DETACH, self.here(), module, call, True, -1, (code,), (value,), ("detach",)))

    def note_escape(self, args: tuple[Any, ...]) -> None:
        """Record that a value leaves torch for Python or NumPy."""
        for tensor in tensors_in(args[0]) if args else ():
            value, where = self.values.of(tensor), self.here()
            escape = Escape(self.call, value, where, len(self.trace.ops), tensor.is_floating_point())
            self.trace.escapes.append(escape)

    def note_raised(self, args: tuple[Any, ...], error: RuntimeError) -> None:
        """Record a call that raised, whether the user catches it or not."""
        tensors = [x for x in args if isinstance(x, _Tensor)]
        values = tuple(self.values.of(x) for x in tensors)
        for tensor, value in zip(tensors, values, strict=True):
            made = self._made_in_inference.get(id(tensor))
            if made is not None and made[0]() is tensor:  # perhaps many steps ago
                self.trace.inference_values[value] = made[1]
        self.trace.raised.append(Raised(text_of(error), values, self.here(), len(self.trace.backwards) - 1))

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self.active:
            self._wake()
            return
        self._after_a_failed_step()
        if self.running.module is None:
            known = self.trace.modules
            if not any(module is other for other in known):
                known.append(module)
            if self.trace.batch_size is None:
                sizes = [x.shape[0] for x in inputs if isinstance(x, _Tensor) and x.dim()]
                self.trace.batch_size = sizes[0] if sizes else None
        self.running.begin(module, self.trace)

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self.active and self.running.stack:
            self.running.stack.pop()

    def _after_a_failed_step(self) -> None:
        """Trace again if an optimizer raised in its step and the user went on."""
        if self._step_frame is not None and not self._is_inside_step():
            self._step_frame, self._stepping = None, False
            self._enter_modes()

    def _is_inside_step(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._step_frame:
            frame = frame.f_back
        return frame is not None

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        self._after_a_failed_step()
        if self._step_frame is not None:  # a subclass whose step calls the step of its base
            return
        parameters, location = parameters_of(optimizer), locate(sys._getframe(1))
        closure = len(args) + len(kwargs) > 1
        idle = not closure and all(self.reuse.is_zeroed(parameter.grad) for parameter in parameters)
        again, old = (False, False) if closure else self.reuse.use(optimizer)
        passes = len(self.trace.backwards)
        self.trace.optimizer_steps.append(OptimizerStep(optimizer, location, passes, idle, again, old, self.cleared))
        for listener in self.before_step:
            listener(optimizer)
        self._stepping = True
        # A closure runs the user's own code inside the step; without one there is nothing to see but the writes.
        if closure or not self.can_pause():
            return
        self._leave_modes()
        self._step_frame = sys._getframe(1)
        for parameter in parameters:
            if parameter.grad is not None:
                self.saving.log_write(parameter, "optimizer.step()", location, by_optimizer=True)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = False
        if self._step_frame is sys._getframe(1):
            self._step_frame = None
            self._enter_modes()
        if self.active and self._step_frame is None:
            for listener in self.after_step:
                listener(optimizer)


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(a for a in (*args, *kwargs.values()) if not isinstance(a, (_Tensor, list, tuple)))


class _Operations(DispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.tracer.active:
            return func(*args, **(kwargs or {}))
        return self.tracer.operation(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        if not tracer.active:
            return func(*args, **kwargs)
        tracer.location = None
        tracer.trace.functional |= inside_functorch()
        handler, tracer.call = _HANDLERS.get(func), _NAMES.get(func, "")
        try:
            if tracer.call in _ESCAPES:
                tracer.note_escape(args)
            return func(*args, **kwargs) if handler is None else handler(tracer, func, args, kwargs)
        except RuntimeError as error:
            tracer.note_raised(args, error)
            raise
        finally:
            tracer.location, tracer.call = None, ""


# --- calls that leave no operation behind -----------------------------------------------------------------------------

Handler = Callable[[Tracer, Any, tuple[Any, ...], dict[str, Any]], Any]


def _set_requires_grad(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, on = args[0], bool((*args[1:], *kwargs.values(), True)[0])
    if on and tracer.frozen.pop(id(tensor), None) is not None:
        tracer.unfrozen.add(id(tensor))
    elif not on and tensor.requires_grad:
        tracer.frozen[id(tensor)] = (weakref.ref(tensor), Freeze(tracer.here(), id(tensor) in tracer.unfrozen))
    return func(*args, **kwargs)


def _set_gradient(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1] is None and args[0].grad is not None:
        tracer.cleared = tracer.here()
    return func(*args, **kwargs)


def _detach_in_place(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    codes: list[int] = []
    tracer.values.read(args[0], codes)
    result = func(*args, **kwargs)
    tracer.note_detached(args[0], codes[-1])
    return result


def _switch(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on, by = bool(args[0]), _switched_by()
    trace = tracer.trace
    if ".__exit__" in by:
        tracer.off_switch = tracer.off_switches.pop() if tracer.off_switches else -1
    else:
        tracer.off_switches.append(tracer.off_switch)
        if on or tracer.off_switch < 0:
            tracer.off_switch = -1 if on else len(trace.switches)
    trace.switches.append(Switch(on, tracer.here(), by))
    return func(*args, **kwargs)


def _switched_by() -> str:
    """Name the functions of torch between the user and the switch."""
    names = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return " < ".join(name for name in names if not name.startswith(("_Calls.", "Tracer.")))


def _backward(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_backward(tracer, [args[0]], None, lambda: func(*args, **kwargs), kwargs)


def _grad(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outputs, inputs = (*args, kwargs.get("outputs"), kwargs.get("inputs"))[:2]
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
    started = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
    result = run_backward(tracer, started, tuple(id(x) for x in wanted), lambda: func(*args, **kwargs), kwargs)
    missing = frozenset(id(x) for x, gradient in zip(wanted, result, strict=True) if gradient is None)
    tracer.trace.backwards[-1].missing = missing
    return result


_HANDLERS: dict[Any, Handler] = {
    torch.Tensor.detach_: _detach_in_place,
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: _set_gradient,  # type: ignore[union-attr]
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
    write_grad_mode: _switch,
}
_ESCAPES = {"torch.tensor", "item", "tolist", "numpy", "float", "int"}
_NAMES: dict[Any, str] = {  # what the user wrote, if the operation does not show it
    torch.Tensor.data.__get__: "data",  # type: ignore[attr-defined]
    torch.Tensor.detach: "detach",
    torch.tensor: "torch.tensor",  # of a tensor, or of a list of them
    torch.Tensor.item: "item",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__float__: "float",
    torch.Tensor.__int__: "int",
}


# --- backward passes --------------------------------------------------------------------------------------------------

# Nodes that only pass on what they are given, in another shape or place: nothing is produced in them.
_CARRIERS = (
    *("AccumulateGrad", "TBackward", "ViewBackward", "TransposeBackward", "PermuteBackward", "UnsqueezeBackward"),
    *("SqueezeBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "AliasBackward", "CloneBackward"),
    "ExpandBackward",
)
_AUTOGRAD_BACKWARD = torch.autograd.backward.__code__


def run_backward(
    tracer: Tracer,
    tensors: list[torch.Tensor],
    inputs: tuple[int, ...] | None,
    run: Callable[[], Any],
    options: dict[str, Any],
) -> Any:
    """Run a backward pass and record it."""
    backward, handles = _start(tracer, tensors, inputs)
    # The operations of backward need not be traced, unless they make a graph of their own.
    hidden = not options.get("create_graph") and on_top(tracer.operations)
    if hidden:
        tracer.operations.__exit__(None, None, None)
    try:
        result = run()
        backward.completed = True
        return result
    finally:
        backward.running = False
        tracer.reuse.after_backward()
        if hidden:
            tracer.operations.__enter__()
        if options.get("retain_graph") or options.get("create_graph"):
            for handle in handles:
                handle.remove()


def start_late(tracer: Tracer) -> Backward:
    """Record a backward pass that was started by `torch.autograd.backward`, which no mode sees."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _AUTOGRAD_BACKWARD:
        frame = frame.f_back
    given = frame.f_locals.get("tensors", ()) if frame is not None else ()
    tensors = [given] if isinstance(given, torch.Tensor) else [x for x in given if isinstance(x, torch.Tensor)]
    backward, _ = _start(tracer, tensors, None)
    backward.completed = True
    return backward


def _start(
    tracer: Tracer, tensors: list[torch.Tensor], inputs: tuple[int, ...] | None
) -> tuple[Backward, list[torch.utils.hooks.RemovableHandle]]:
    codes: list[int] = []
    for tensor in tensors:
        tracer.values.read(tensor, codes)
    trace = tracer.trace
    with undispatched():
        numbers = [numerics.total(t.detach()) for t in tensors if numerics.is_readable(t)]
    loss = float(sum(x.real for x in numbers)) if numbers else None
    backward = Backward(tuple(codes), tracer.here(), len(trace.ops), loss, inputs)
    trace.backwards.append(backward)
    nodes = list(nodes_below(tensors))
    index = {node: place for place, node in enumerate(nodes)}
    started = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    backward.starts = [index[node] for node in started]
    backward.edges = [tuple(index.get(following, -1) for following, _ in node.next_functions) for node in nodes]
    backward.leaves = {index[node]: id(leaf) for node in nodes if (leaf := leaf_of(node)) is not None}
    backward.nodes = frozenset(map(node_number, nodes))
    backward.functions = {function for node in nodes if (function := function_class_of(node)) is not None}
    paths = _find_paths(trace, nodes, started)
    handles = []
    for node in nodes:
        hook = _NodeHook(tracer, backward, index[node], node_number(node), node.name(), paths.get(node, {}))
        if _START in hook.paths:
            handles.append(node.register_prehook(hook.before))
        if hook.paths or not hook.name.startswith(_CARRIERS):
            handles.append(node.register_hook(hook.after))
    return backward, handles


@dataclass(slots=True)
class _NodeHook:
    tracer: Tracer
    backward: Backward
    index: int
    number: int
    name: str
    paths: dict[int, GradientPath]

    def before(self, incoming: tuple[Any, ...]) -> None:
        """Measure the gradient of the loss at a node inside a module that a pass starts from."""
        with undispatched():
            for tensor in incoming:
                if tensor is not None:
                    self.paths[_START].add(tensor)

    def after(self, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        carrier = self.name.startswith(_CARRIERS)
        with undispatched():
            for position, tensor in enumerate(outgoing):
                if tensor is None:
                    continue
                if position in self.paths:
                    self.paths[position].add(tensor)
                if carrier or not numerics.is_readable(tensor):
                    continue
                amount = numerics.total(tensor)
                if amount - amount != 0:
                    self._check_nonfinite(tensor, incoming)
                elif amount == 0:
                    self._check_zero(tensor, incoming, position)

    def _check_nonfinite(self, tensor: torch.Tensor, incoming: tuple[Any, ...]) -> None:
        if any(x is not None and numerics.is_suspicious(x) for x in incoming):
            return
        kind = numerics.bad_kind(tensor)
        if kind is None:
            return
        trace = self.tracer.trace
        saved = saved_tensors_of(current_node()).values()
        bad = BadValue(
            kind,
            "backward",
            op=trace.op_number_of_node.get(self.number, -1),
            value=-1,
            rows=numerics.bad_rows(tensor),
            shape=tuple(tensor.shape),
            detail=numerics.inputs_at(tensor, saved),
            node_name=self.name,
            from_value=next((value for x in saved if (value := self.tracer.nonfinite.value_in(x)) >= 0), -1),
            backward=len(trace.backwards) - 1,
        )
        trace.bad.append(bad)

    def _check_zero(self, tensor: torch.Tensor, incoming: tuple[Any, ...], position: int) -> None:
        came = [x for x in incoming if x is not None and numerics.is_readable(x)]
        if numerics.is_all_zero(tensor) and not all(map(numerics.is_all_zero, came)):
            trace = self.tracer.trace
            self.backward.zeros.add((self.index, position))
            trace.zeros.append(ZeroGradient(trace.op_number_of_node.get(self.number, -1), self.name))


# --- gradients between modules ----------------------------------------------------------------------------------------

LOSS = -2
_START = -1  # the path that enters a node, not one of those that leave it
_BETWEEN = -3


@dataclass(slots=True)
class GradientPath:
    """A tensor that a call of a module read, and the gradient that comes back to it, read by read."""

    call: int
    node: int
    leaf: int
    reads: int  # that are still expected
    _sum: torch.Tensor | None = None
    _norm: float | None = None

    @property
    def norm(self) -> float | None:
        """The norm of the gradient that came back, perhaps NaN or Inf; None where none came or it cannot be read."""
        if self._sum is not None:  # some of what was expected never came
            self._norm, self._sum = numerics.norm_of(self._sum), None
        return self._norm

    def add(self, gradient: torch.Tensor) -> None:
        self.reads -= 1
        if not numerics.is_readable(gradient):
            if not gradient.numel():
                self._norm = self._norm or 0.0
        elif self._sum is None and self.reads == 0:
            self._norm = numerics.norm_of(gradient)
        else:  # a copy: autograd goes on with the tensor itself, and may add to it in place
            self._sum = gradient.detach().clone() if self._sum is None else self._sum + gradient.detach()
            if self.reads <= 0:
                self._norm, self._sum = numerics.norm_of(self._sum), None

    @property
    def is_bad(self) -> bool:
        return self.norm is not None and not math.isfinite(self.norm)


def _find_paths(trace: Trace, nodes: list[Any], started: list[Any]) -> dict[Any, dict[int, GradientPath]]:
    """Find the paths that a backward pass takes between modules, by node and by position among its results."""
    calls = _calls_of(trace, nodes)
    reads: Counter[tuple[int, Any, int]] = Counter()
    places: list[tuple[Any, int, tuple[int, Any, int]]] = []
    for node in nodes:
        call = calls[node]
        for place, (following, output) in enumerate(node.next_functions if call != _BETWEEN else ()):
            if following is None or calls[following] == call or isinstance(leaf_of(following), torch.nn.Parameter):
                continue
            key = (call, following, output)
            reads[key] += 1
            places.append((node, place, key))
    places += [(node, _START, (LOSS, node, 0)) for node in started if calls[node] != LOSS]
    known: dict[tuple[int, Any, int], GradientPath] = {}
    found: defaultdict[Any, dict[int, GradientPath]] = defaultdict(dict)
    for node, place, key in places:
        if key not in known:
            known[key] = GradientPath(key[0], node_number(key[1]), id(leaf_of(key[1])), reads[key] or 1)
            trace.paths.append(known[key])
        found[node][place] = known[key]
    return found


def _calls_of(trace: Trace, nodes: list[Any]) -> dict[Any, int]:
    """Return for each node the call that it belongs to, or that it belongs to the loss or between modules."""
    found: dict[Any, int] = {}
    before_modules: set[Any] = set()
    # A node that uses what another one made was made after it.
    for node in sorted(nodes, key=node_number, reverse=True):
        op = trace.op_number_of_node.get(node_number(node))
        call = trace.ops[op].call if op is not None else -1
        if call < 0 or not trace.calls[call].leaf:
            call = _BETWEEN if node in before_modules else LOSS
        found[node] = call
        if call != LOSS:
            before_modules.update(following for following, _ in node.next_functions)
    return found
