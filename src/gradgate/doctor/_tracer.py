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
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any

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
    INFERENCE,
    LOSS,
    OPTIMIZER_STEP,
    Backward,
    BadValue,
    Call,
    Escape,
    Freeze,
    GradientPath,
    Op,
    Operator,
    OptimizerStep,
    Overwrite,
    Raised,
    Saved,
    Stage,
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

# --- tensors saved for backward ---------------------------------------------------------------------------------------


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

    def log_write(self, tensor: torch.Tensor, name: str, location: Location | None) -> None:
        self._clock += 1
        region = region_of(tensor)
        self._writes[region.storage].append(Write(self._clock, region, name, location))

    def pack(self, tensor: torch.Tensor) -> Saved:
        # A result that its own node holds would never be freed, so a detached tensor is kept; it shares memory and
        # version with the original.
        kept = tensor
        if not tensor.is_leaf:
            with undispatched():
                kept = tensor.detach()
        return Saved(kept, write_count(tensor), self._clock, latest_node_number(), self.tracer.here())

    def unpack(self, saved: Saved) -> torch.Tensor:
        write = self._first_write_since(saved) if saved.clock != self._clock else None
        if write is None:
            return saved.tensor
        tensor, version = saved.tensor, write_count(saved.tensor)
        silent = version == saved.version and not write.name.startswith(("_foreach_", "_fused_"))
        self.tracer.trace.overwrites.append(Overwrite(saved, write, silent))
        if silent:
            return tensor
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; "
            f"expected version {saved.version} instead."
        )

    def _first_write_since(self, saved: Saved) -> Write | None:
        region = region_of(saved.tensor)
        moved = write_count(saved.tensor) != saved.version
        writes = [*self._older.get(region.storage, ()), *self._writes.get(region.storage, ())]
        later = (write for write in writes if write.clock > saved.clock)
        with undispatched():
            return next((write for write in later if moved or overlaps(write.region, region)), None)


# --- gradients that are used twice ------------------------------------------------------------------------------------

References = list[weakref.ref[torch.Tensor]]


class Reuse:
    """Remembers which gradients were used."""

    # A gradient that was zeroed is another tensor (`set_to_none=True`), or a zero was written to it.

    def __init__(self) -> None:
        self._used: dict[int, References] = {}
        self._at_start: References = []
        self._zeroed: set[int] = set()
        self.zeroed_since_backward: set[int] = set()

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        self._at_start = [weakref.ref(p.grad) for p in parameters if p.grad is not None]

    def zero(self, gradient: torch.Tensor) -> None:
        self._zeroed.add(storage_of(gradient))
        self.zeroed_since_backward.add(storage_of(gradient))

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


# --- the first non-finite result in forward ---------------------------------------------------------------------------


class NonfiniteTracker:
    """Checks the results of operations."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.marks: dict[int, int] = {}  # by memory: the bad value that it holds

    def mark(self, storage: int, value: int, kind: numerics.Kind) -> None:
        self.marks[storage] = value
        self.tracer.trace.spoiled[value] = kind

    def check(self, op: Op, inputs: list[_Tensor], results: list[_Tensor], before: set[numerics.Kind]) -> None:
        """Check the results of the newest operation; `before` has what they held if it wrote to them in place."""
        trace, written = self.tracer.trace, bool(op.operator.written)
        for tensor, value in zip(results, op.outputs, strict=True):
            if not numerics.is_readable(tensor):
                continue
            storage = tensor.untyped_storage().data_ptr()
            kind = numerics.bad_kind(tensor) if numerics.is_suspicious(tensor) else None
            if kind is None:
                if not written:
                    self.marks.pop(storage, None)
                continue
            # The running statistics of a batch norm are among its inputs, and have been written to by now.
            read = [x for x in inputs if not written or all(x is not other for other in results)]
            if not self._is_inherited(kind, read[:3] if "batch_norm" in op.name else read, before):
                bad = _bad_value(tensor, kind, "forward", len(trace.ops) - 1, value)
                # As a mask is filled with -inf.
                bad.deliberate = kind == "inf" and not all(map(math.isfinite, op.numbers))
                bad.detail = numerics.inputs_at(tensor, inputs if not written else ()) if not bad.deliberate else ""
                trace.bad.append(bad)
            self.mark(storage, value, kind)

    def kind_of(self, tensor: torch.Tensor) -> numerics.Kind | None:
        """Return what the memory of a tensor is known to hold."""
        return self.tracer.trace.spoiled.get(self.marks.get(storage_of(tensor), -1))

    def _is_inherited(self, kind: str, inputs: list[torch.Tensor], before: set[numerics.Kind]) -> bool:
        """Return whether an input was bad in the same way already, and record what came in from outside."""
        trace = self.tracer.trace
        kinds = set(before)
        for tensor in inputs:
            found = self.kind_of(tensor)
            if found is None and numerics.is_suspicious(tensor) and (found := numerics.bad_kind(tensor)) is not None:
                value = self.tracer.values.of(tensor)
                trace.bad.append(_bad_value(tensor, found, "arrived", len(trace.ops) - 1, value))
                self.mark(storage_of(tensor), value, found)
            if found is not None:
                kinds.add(found)
        return kind in kinds or "nan" in kinds


def _bad_value(tensor: torch.Tensor, kind: numerics.Kind, stage: Stage, op: int, value: int = -1) -> BadValue:
    return BadValue(kind, stage, op, value, numerics.bad_rows(tensor), tuple(tensor.shape))


# --- the tracer -------------------------------------------------------------------------------------------------------

_MOST_OPERATIONS = 500_000
_DETACH = operator_of(torch.ops.aten.detach.default)
Listener = Callable[[torch.optim.Optimizer | None], None]
BackwardListener = Callable[[float | None, Location | None], None]


class Tracer(DispatchMode):
    """Traces what happens in this thread between `resume` and `pause`."""

    def __init__(self, before_step: Listener, after_step: Listener, on_backward: BackwardListener) -> None:
        super().__init__()
        self.before_step = before_step
        self.after_step = after_step
        self.on_backward = on_backward
        self.saves = True
        self.trace = Trace()
        self.previous = Trace()
        self.values = Values(self.trace)
        self.saving = Saving(self)
        self.nonfinite = NonfiniteTracker(self)
        self.reuse = Reuse()
        self.location: Location | None = None
        self.off_switch = -1  # the switch in the trace that turned recording off
        self.off_switches: list[int] = []
        self.call = ""  # what the user wrote, if a call leaves another operation behind
        self.cleared: Location | None = None
        self.frozen: dict[int, tuple[weakref.ref[torch.Tensor], Freeze]] = {}
        self.unfrozen: set[int] = set()
        self.active = False
        self.drawn: frozenset[int] | None = None
        self.patches = Patches()
        self.running: list[tuple[torch.nn.Module | None, int]] = [(None, -1)]  # modules, each with its call
        self._calls = _Calls(self)
        self._made_in_inference: dict[int, tuple[weakref.ref[torch.Tensor], Location | None]] = {}
        self._late_backward: Backward | None = None
        self._step_frame: FrameType | None = None
        self._dormant = self._stepping = False

    # --- start and end --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks on modules and optimizers; nothing is traced yet."""
        hooks = (self._module_begins, self._module_ends, True, self._optimizer_begins, self._optimizer_ends)
        for table, hook in zip((*MODULE_HOOKS, *OPTIMIZER_HOOKS), hooks, strict=True):
            self.patches.put(table, self, hook)

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
        del self.running[1:]
        pop_saved_tensors_hooks(self.saving.pack)

    def _enter_modes(self) -> None:
        self.__enter__()
        self._calls.__enter__()  # type: ignore[no-untyped-call]

    def _leave_modes(self) -> None:
        for mode in (self._calls, self):
            if on_top(mode):
                mode.__exit__(None, None, None)

    def can_pause(self) -> bool:
        """Return whether no mode that was entered after the tracer's is still open."""
        return on_top(self._calls) and on_top(self)

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
        modules = [module for module, _ in self.running if module is not None]
        del self.running[1:]
        for module in modules:
            self.begin_module(module)

    # --- operations -----------------------------------------------------------------------------------------------

    def here(self) -> Location | None:
        """Return the user's line that is running."""
        if self.location is None:
            self.location = locate(sys._getframe(1))
        return self.location

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if inside_forward_mode():  # tangents may have no memory at all; nothing here is for backward
            self.trace.functional = True
            return func(*args, **kwargs)
        operator = operator_of(func)
        records = torch.is_grad_enabled()
        if records:
            self.off_switch = -1
        node = current_node()
        if node is not None:
            if not self.trace.runs_backward:
                self._late_backward = start_late(self)
            # An operation inside backward stands at the line of the operation that it is the backward of.
            self.location = self.trace.op_of_node(node_number(node)).location or self.location
        elif self._late_backward is not None:
            self._late_backward.running, self._late_backward = False, None
        arguments = (*args, *kwargs.values())
        inputs = [tensor for a in arguments for tensor in tensors_in(a)] if not operator.shape_only else []
        codes = [code for tensor in inputs for code in self.values.read(tensor)]
        written = list(operator.targets(args, kwargs))
        bad_before = {kind for target in written if (kind := self.nonfinite.kind_of(target)) is not None}
        result = func(*args, **kwargs)
        location = self.location or self.here()
        if len(self.trace.ops) >= _MOST_OPERATIONS:  # so many operations without a step: there is none to explain
            self.begin_again()
        trace = self.trace
        trace.op_number_of_node.setdefault(latest_node_number(), len(trace.ops))
        if operator.written:
            results, outputs = written, self._log_writes(operator, written, location)
        else:
            connected = records and operator.name != "detach" and any(code & 1 for code in codes)
            results = list(tensors_in(result))
            outputs = self._log_results(operator, results, connected, location)
        switch = self.off_switch if not records else -1
        if switch < 0 and torch.is_inference_mode_enabled():
            switch = INFERENCE
        numbers = tuple(a for a in arguments if isinstance(a, (int, float)))
        module, call = self.running[-1]
        read, made = tuple(codes), tuple(outputs)
        op = Op(operator, location, module, call, records, switch, read, made, numbers, self.call)
        trace.ops.append(op)
        if not operator.view and not operator.silent:
            self.nonfinite.check(op, inputs, results, bad_before)
        if written and node is None and self._updates_by_hand(written):
            trace.updated_by_hand = location
            self.before_step(None)
            self.after_step(None)
        return result

    def _updates_by_hand(self, written: Iterable[torch.Tensor]) -> bool:
        """Return whether a write after backward changes a leaf that has a gradient: an update without an optimizer."""
        if self._stepping or not self.trace.backwards or self.trace.runs_backward:
            return False
        leaves = [root.tensor for root in self.trace.roots.values() if root.leaf and root.requires_grad]
        updated = {storage_of(leaf) for leaf in leaves if leaf is not None and leaf.grad is not None} - {0}
        return any(storage_of(tensor) in updated for tensor in written)

    def _log_results(
        self, operator: Operator, results: list[torch.Tensor], connected: bool, location: Location | None
    ) -> list[int]:
        values = self.values
        outputs = [values.make_view(x, connected) if operator.view else values.make(x) for x in results]
        if not connected:
            values.unconnected.update(outputs)
            if not torch.is_grad_enabled() and torch.is_inference_mode_enabled():
                self._made_in_inference.update((id(x), (weakref.ref(x), location)) for x in results)
        return outputs

    def _log_writes(self, operator: Operator, written: list[torch.Tensor], location: Location | None) -> list[int]:
        for target in written:
            self.saving.log_write(target, operator.name, location)
            if operator.name in ("zero_", "_foreach_zero_"):
                self.reuse.zero(target)
                self.cleared = location
        self.trace.scaled |= operator.name == "_amp_foreach_non_finite_check_and_unscale_"
        return [self.values.write(target) for target in written]

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
        made = [self._made_in_inference.get(id(x), (lambda: None, None)) for x in tensors]
        inference = next((where for (tensor, where), x in zip(made, tensors, strict=True) if tensor() is x), None)
        passes = len(self.trace.backwards)
        self.trace.raised.append(Raised(text_of(error), self.here(), passes - 1, values, inference))

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self.active:
            self._wake()
            return
        self._after_a_failed_step()
        trace = self.trace
        if len(self.running) == 1:
            if not any(module is other for other in trace.modules):
                trace.modules.append(module)
            if trace.batch_size is None:
                trace.batch_size = next((x.shape[0] for x in inputs if isinstance(x, _Tensor) and x.dim()), None)
        self.begin_module(module)

    def begin_module(self, module: torch.nn.Module) -> None:
        """Record that a module begins to run; a checkpoint that computes once more in backward makes no new call."""
        calls, number = self.trace.calls, self.running[-1][1]
        if not self.trace.runs_backward and (self.drawn is None or id(module) in self.drawn):
            location = locate(sys._getframe(2), Owner.USER) if len(self.running) == 1 else None
            if number >= 0:
                calls[number].leaf = False
            calls.append(Call(module, number, module.training, location))
            number = len(calls) - 1
        self.running.append((module, number))

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self.active and len(self.running) > 1:
            self.running.pop()

    def _after_a_failed_step(self) -> None:
        """Trace again if an optimizer raised in its step and the user went on."""
        step = self._step_frame
        if step is not None and all(frame is not step for frame, _ in walk_stack(sys._getframe(1))):
            self._step_frame, self._stepping = None, False
            self._enter_modes()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        self._after_a_failed_step()
        if self._step_frame is not None:  # a subclass whose step calls the step of its base
            return
        parameters, location = parameters_of(optimizer), locate(sys._getframe(1))
        closure = len(args) + len(kwargs) > 1
        zeroed = self.reuse.zeroed_since_backward
        idle = not closure and all(p.grad is None or storage_of(p.grad) in zeroed for p in parameters)
        again, old = (False, False) if closure else self.reuse.use(optimizer)
        passes = len(self.trace.backwards)
        self.trace.optimizer_steps.append(OptimizerStep(optimizer, location, passes, idle, again, old, self.cleared))
        self.before_step(optimizer)
        self._stepping = True
        # A closure runs the user's own code inside the step; without one there is nothing to see but the writes, which
        # torch does not count under a mode where they go through `_foreach_` operations.
        if closure or not self.can_pause():
            return
        self._leave_modes()
        self._step_frame = sys._getframe(1)
        for parameter in parameters:
            if parameter.grad is not None:
                self.saving.log_write(parameter, OPTIMIZER_STEP, location)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = False
        if self._step_frame is sys._getframe(1):
            self._step_frame = None
            self._enter_modes()
        if self.active and self._step_frame is None:
            self.after_step(optimizer)


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
    values = tracer.values
    code = values.read(args[0])[-1]
    result = func(*args, **kwargs)
    value = values.write(args[0])
    values.unconnected.add(value)
    op = Op(_DETACH, tracer.here(), *tracer.running[-1], True, -1, (code,), (value,), (), "detach")
    tracer.trace.ops.append(op)
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
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe(2)))
    names = [code.co_qualname for code in takewhile(lambda code: is_foreign(code.co_filename), codes)]
    return " < ".join(name for name in names if not name.startswith(("_Calls.", "Tracer.")))


def _backward(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_backward(tracer, [args[0]], None, partial(func, *args, **kwargs))


def _grad(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outputs, inputs = (*args, kwargs.get("outputs"), kwargs.get("inputs"))[:2]
    wanted = list(tensors_in(inputs))
    run = partial(func, *args, **kwargs)
    result = run_backward(tracer, list(tensors_in(outputs)), tuple(id(x) for x in wanted), run)
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


def run_backward(tracer: Tracer, tensors: list[torch.Tensor], inputs: tuple[int, ...] | None, run: partial[Any]) -> Any:
    """Run a backward pass and record it."""
    backward, handles = _start(tracer, tensors, inputs)
    # The operations of backward need not be traced, unless they make a graph of their own.
    hidden = not run.keywords.get("create_graph") and on_top(tracer)
    if hidden:
        tracer.__exit__(None, None, None)
    try:
        result = run()
        backward.completed = True
        return result
    finally:
        backward.running = False
        tracer.reuse.zeroed_since_backward.clear()
        if hidden:
            tracer.__enter__()
        if run.keywords.get("retain_graph") or run.keywords.get("create_graph"):
            for handle in handles:
                handle.remove()


def start_late(tracer: Tracer) -> Backward:
    """Record a backward pass that was started by `torch.autograd.backward`, which no mode sees."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code is _AUTOGRAD_BACKWARD)
    given = next((frame.f_locals.get("tensors") for frame in frames), None)
    backward, _ = _start(tracer, list(tensors_in(given)), None)
    backward.completed = True
    return backward


def _start(
    tracer: Tracer, tensors: list[torch.Tensor], inputs: tuple[int, ...] | None
) -> tuple[Backward, list[torch.utils.hooks.RemovableHandle]]:
    trace = tracer.trace
    codes = [code for tensor in tensors for code in tracer.values.read(tensor)]
    with undispatched():
        numbers = [numerics.total(t.detach()) for t in tensors if numerics.is_readable(t)]
    loss = float(sum(x.real for x in numbers)) if numbers else None
    backward = Backward(tuple(codes), tracer.here(), len(trace.ops), loss, inputs)
    trace.backwards.append(backward)
    tracer.on_backward(loss, backward.location)
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
        carrier, came = self.name.startswith(_CARRIERS), [x for x in incoming if x is not None]
        with undispatched():
            for position, tensor in enumerate(outgoing):
                if tensor is not None and position in self.paths:
                    self.paths[position].add(tensor)
                if tensor is not None and not carrier and numerics.is_readable(tensor):
                    self._check(position, tensor, came)

    def _check(self, position: int, tensor: torch.Tensor, came: list[torch.Tensor]) -> None:
        """Record a gradient that is zero or not finite, if what came in was neither."""
        trace, amount = self.tracer.trace, numerics.total(tensor)
        op = trace.op_number_of_node.get(self.number, -1)
        if amount == 0 and numerics.is_all_zero(tensor):
            if not all(numerics.is_all_zero(x) for x in came if numerics.is_readable(x)):
                self.backward.zeros.add((self.index, position))
                trace.zeros.append(ZeroGradient(op, self.name))
        elif amount - amount != 0 and not any(map(numerics.is_suspicious, came)):
            kind = numerics.bad_kind(tensor)
            if kind is None:
                return
            saved = saved_tensors_of(current_node()).values()
            marks = [self.tracer.nonfinite.marks.get(storage_of(x), -1) for x in saved]
            bad = _bad_value(tensor, kind, "backward", op)
            bad.detail, bad.node_name = numerics.inputs_at(tensor, saved), self.name
            bad.from_value = next((value for value in marks if value >= 0), -1)
            bad.backward = len(trace.backwards) - 1
            trace.bad.append(bad)


# --- gradients between modules ----------------------------------------------------------------------------------------

_START = -1  # the path that enters a node, not one of those that leave it
_BETWEEN = -3


def _find_paths(trace: Trace, nodes: list[Any], started: list[Any]) -> dict[Any, dict[int, GradientPath]]:
    """Find the paths that a backward pass takes between modules, by node and by position among its results."""
    calls = _calls_of(trace, nodes)
    known: dict[tuple[int, Any, int], GradientPath] = {}
    found: defaultdict[Any, dict[int, GradientPath]] = defaultdict(dict)

    def path(call: int, node: Any, output: int) -> GradientPath:
        new = GradientPath(call, node_number(node), id(leaf_of(node)), 0)
        return known.setdefault((call, node, output), new)

    for node in nodes:
        call = calls[node]
        for place, (following, output) in enumerate(node.next_functions if call != _BETWEEN else ()):
            if following is None or calls[following] == call or isinstance(leaf_of(following), torch.nn.Parameter):
                continue
            found[node][place] = path(call, following, output)
            found[node][place].reads += 1
    for node in started:
        if calls[node] != LOSS:
            found[node][_START] = path(LOSS, node, 0)
            found[node][_START].reads = found[node][_START].reads or 1
    trace.paths += known.values()
    return found


def _calls_of(trace: Trace, nodes: list[Any]) -> dict[Any, int]:
    """Return for each node the call that it belongs to, or that it belongs to the loss or between modules."""
    found: dict[Any, int] = {}
    before_modules: set[Any] = set()
    # A node that uses what another one made was made after it.
    for node in sorted(nodes, key=node_number, reverse=True):
        call = trace.op_of_node(node_number(node)).call
        if call < 0 or not trace.calls[call].leaf:
            call = _BETWEEN if node in before_modules else LOSS
        found[node] = call
        if call != LOSS:
            before_modules.update(following for following, _ in node.next_functions)
    return found
