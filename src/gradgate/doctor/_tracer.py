"""The tracer: sees every operation, every save for backward and every switch of a mode, and writes a `Trace`.

A dispatch mode sees what torch computes, forward and backward; a function mode sees what the user wrote (`.data`,
`.item()`, `no_grad`), which leaves no operation behind; hooks tell which module, which optimizer and what is saved.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
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
    enter_mode,
    inside_forward_mode,
    inside_functorch,
    latest_node_number,
    leave_mode,
    node_number,
    on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    undispatched,
    write_count,
    write_grad_mode,
)
from gradgate.doctor._backward_hooks import run_backward, start_late
from gradgate.doctor._numerics import NonfiniteTracker
from gradgate.doctor._trace import (
    Backward,
    Call,
    Escape,
    Freeze,
    Op,
    OptimizerStep,
    Overwrite,
    Raised,
    Switch,
    Trace,
    Values,
    Write,
    operator_of,
    overlaps,
    region_of,
)

# --- running modules --------------------------------------------------------------------------------------------------


class Running:
    """The modules that have begun and not ended yet."""

    def __init__(self) -> None:
        self.drawn: frozenset[int] | None = None
        self._modules: list[torch.nn.Module] = []
        self._calls: list[int] = []

    @property
    def module(self) -> torch.nn.Module | None:
        """Return the innermost module."""
        return self._modules[-1] if self._modules else None

    @property
    def call(self) -> int:
        """Return the place in `Trace.calls` of the innermost call; -1 outside of all."""
        return self._calls[-1] if self._calls else -1

    def begin(self, module: torch.nn.Module, trace: Trace) -> None:
        """Record that a module begins."""
        outer, location = self.call, None if self._modules else locate(sys._getframe(2), Owner.USER)
        self._modules.append(module)
        again = bool(trace.backwards) and trace.backwards[-1].running  # a checkpoint that computes once more
        if again or (self.drawn is not None and id(module) not in self.drawn):
            self._calls.append(outer)
            return
        if outer >= 0:
            trace.calls[outer].leaf = False
        self._calls.append(len(trace.calls))
        trace.calls.append(Call(module, outer, module.training, location))

    def end(self) -> None:
        """Record that the innermost module ends."""
        if self._modules:
            self._modules.pop()
            self._calls.pop()

    def go_on_in(self, trace: Trace) -> None:
        """Write the calls that are running down in a new trace."""
        modules = self._modules
        self.forget()
        for module in modules:
            self.begin(module, trace)

    def forget(self) -> None:
        """Forget all of them."""
        self._modules, self._calls = [], []


# --- tensors saved for backward ---------------------------------------------------------------------------------------


class Saved:
    """A tensor that was saved for backward."""

    __slots__ = ("location", "node", "tensor", "version", "writes")

    def __init__(self, tensor: torch.Tensor, version: int, writes: int, node: int, location: Location | None) -> None:
        self.tensor = tensor
        self.version = version
        self.writes = writes
        self.node = node
        self.location = location


class Saving:
    """The two hooks, and the log of writes that they are held against."""

    def __init__(self, trace: Trace, location: Callable[[], Location | None]) -> None:
        self.trace = trace
        self._spot = location
        self._writes: defaultdict[int, list[tuple[int, Write]]] = defaultdict(list)
        self._older: defaultdict[int, list[tuple[int, Write]]] = defaultdict(list)
        self._clock = 0

    def forget(self, trace: Trace) -> None:
        """Begin a new trace; a backward of the next step may still need what the last one wrote to."""
        self.trace = trace
        self._older, self._writes = self._writes, defaultdict(list)

    def log_write(self, tensor: torch.Tensor, name: str, location: Location | None, by_optimizer: bool) -> None:
        """Record that memory was written to."""
        self._clock += 1
        region = region_of(tensor)
        self._writes[region.storage].append((self._clock, Write(region, name, location, by_optimizer)))

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Keep a tensor for backward."""
        # A saved result whose own node held it would never be freed, so what is kept is detached; it shares memory and
        # version with the original.
        kept = tensor
        if not tensor.is_leaf:
            with undispatched():
                kept = tensor.detach()
        return Saved(kept, write_count(tensor), self._clock, latest_node_number(), self._spot())

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return a tensor back to backward, if it is still what it was."""
        if saved.writes != self._clock:
            write = self._overwritten(saved)
            if write is not None:
                self._report(saved, write)
        return saved.tensor

    def _overwritten(self, saved: Saved) -> Write | None:
        region = region_of(saved.tensor)
        moved = write_count(saved.tensor) != saved.version
        with undispatched():
            for clock, write in self._older.get(region.storage, []) + self._writes.get(region.storage, []):
                if clock > saved.writes and (moved or overlaps(write.region, region)):
                    return write
        return None

    def _report(self, saved: Saved, write: Write) -> None:
        silent = write_count(saved.tensor) == saved.version and not write.name.startswith(("_foreach_", "_fused_"))
        tensor = saved.tensor
        shape = tuple(tensor.shape)
        self.trace.overwrites.append(
            Overwrite(saved.location, saved.node, write.location, write.name, write.by_optimizer, silent, shape)
        )
        if not silent:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(shape)}] is at version {write_count(tensor)}; "
                f"expected version {saved.version} instead."
            )


# --- gradients that are used twice ------------------------------------------------------------------------------------


class Reuse:
    """Remembers which gradients were used."""

    # A gradient that was zeroed is another tensor (`set_to_none=True`), or a zero was written to it.

    def __init__(self) -> None:
        self._used: dict[int, list[tuple[int, weakref.ref[torch.Tensor]]]] = {}
        self._zeroed: set[int] = set()
        self._zeroed_since_backward: set[int] = set()
        self._at_start: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the gradients that are there when the trace begins."""
        self._at_start = [(id(p), weakref.ref(p.grad)) for p in parameters if p.grad is not None]

    def zero(self, gradient: torch.Tensor) -> None:
        """Record that a tensor was zeroed."""
        self._zeroed.add(region_of(gradient).storage)
        self._zeroed_since_backward.add(region_of(gradient).storage)

    def is_zeroed(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient is gone, or was zeroed since the last backward."""
        return gradient is None or region_of(gradient).storage in self._zeroed_since_backward

    def refill(self) -> None:
        """Record that a backward pass has run: what was zeroed before it has a gradient again."""
        self._zeroed_since_backward.clear()

    def use(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Record that an optimizer uses the gradients of its parameters."""
        held = {id(p): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        again = self._count(held, self._used.get(id(optimizer), []))
        old = self._count(held, self._at_start)
        self._used[id(optimizer)] = [(number, weakref.ref(gradient)) for number, gradient in held.items()]
        self._at_start = []
        self._zeroed.clear()
        return again, old

    def _count(self, held: dict[int, torch.Tensor], known: list[tuple[int, weakref.ref[torch.Tensor]]]) -> int:
        count = 0
        for number, reference in known:
            gradient = reference()
            if gradient is not None and held.get(number) is gradient:
                count += region_of(gradient).storage not in self._zeroed
        return count


# --- the tracer -------------------------------------------------------------------------------------------------------


_Tensor = torch.Tensor
_MOST_OPERATIONS = 500_000
_DETACH = operator_of(torch.ops.aten.detach.default)


class Tracer:
    """Traces what happens in this thread between `resume` and `pause`."""

    def __init__(self) -> None:
        self.saves = True
        self.trace = Trace()
        self.previous = Trace()
        self.values = Values(self.trace)
        self.saving = Saving(self.trace, self.here)
        self.nonfinite = NonfiniteTracker(self)
        self.reuse = Reuse()
        self.location: Location | None = None
        self.off_switch = -1
        self.off_switches: list[int] = []
        self.call = ""
        self.cleared: Location | None = None
        self.frozen: dict[int, tuple[weakref.ref[torch.Tensor], Freeze]] = {}
        self.unfrozen: set[int] = set()
        self._step_frame: FrameType | None = None
        self._made_in_inference: dict[int, tuple[weakref.ref[torch.Tensor], Location | None]] = {}
        self.late_backward: Backward | None = None
        self.active = False
        self.running = Running()
        self.before_step: list[Callable[[torch.optim.Optimizer | None], None]] = []
        self.after_step: list[Callable[[torch.optim.Optimizer | None], None]] = []
        self._dormant = self._stepping = False
        self._calls = _Calls(self)
        self._operations = _Operations(self)
        self.patches = Patches()

    # --- its life -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks that tell about modules and optimizers; nothing is traced yet."""
        before, after, always = MODULE_HOOKS
        before_step, after_step = OPTIMIZER_HOOKS
        self.patches.put(before, self, self._module_begins)
        self.patches.put(always, self, True)
        self.patches.put(after, self, self._module_ends)
        self.patches.put(before_step, self, self._optimizer_begins)
        self.patches.put(after_step, self, self._optimizer_ends)

    def uninstall(self) -> None:
        """Take the hooks away."""
        self._wake()
        self.patches.undo()

    def _wake(self) -> None:
        """Leave the modes of a tracer that was paused inside of an operation, as soon as that is possible."""
        if self._dormant and self.can_pause():
            self._dormant = False
            self.leave_modes()

    def resume(self) -> None:
        """Begin to trace this thread. It may be called from inside a hook, and so may `pause`."""
        if self.saves:
            push_saved_tensors_hooks(self.saving.pack, self.saving.unpack)
        self.trace.recording_at_start = torch.is_grad_enabled()
        self.active = True
        if not self._dormant:
            self.enter_modes()
        self._dormant = False

    def pause(self) -> None:
        """Trace no longer; may be called again where an interrupt has broken it off."""
        self.active = False
        self.trace.recording_at_end = torch.is_grad_enabled()
        self._dormant = self._step_frame is None and not self.can_pause()
        self.leave_modes()
        self._step_frame = None
        self.running.forget()
        pop_saved_tensors_hooks(self.saving.pack)

    def enter_modes(self) -> None:
        """Look at what happens from here on."""
        enter_mode(self._operations)
        enter_mode(self._calls)

    def leave_modes(self) -> None:
        """Look away, where there is nothing to see that hooks do not tell."""
        for mode in (self._calls, self._operations):
            if on_top(mode):
                leave_mode(mode)

    def can_pause(self) -> bool:
        """Return whether nothing that was entered after the tracer is still open."""
        return on_top(self._calls) and on_top(self._operations)

    def can_hide(self) -> bool:
        """Return whether operations can be let pass unseen from inside a call."""
        return on_top(self._operations)

    def hide(self) -> None:
        """Let operations pass unseen."""
        leave_mode(self._operations)

    def show(self) -> None:
        """See operations again."""
        enter_mode(self._operations)

    def begin_again(self) -> Trace:
        """Start a new trace and give the old one; what was saved for backward before stays readable."""
        old = self.trace
        old.recording_at_end = torch.is_grad_enabled()
        self.previous = old
        self.trace = Trace(recording_at_start=old.recording_at_end, batch_size=old.batch_size, modules=old.modules)
        self.values = Values(self.trace)
        self.saving.forget(self.trace)
        self.nonfinite.forget()
        self.off_switch = -1
        self.off_switches.clear()
        self.running.go_on_in(self.trace)
        return old

    # --- where ----------------------------------------------------------------------------------------------------

    def here(self) -> Location | None:
        """Return the user's place of the call that is running."""
        if self.location is None:
            self.location = locate(sys._getframe(1))
        return self.location

    def _locate_backward(self, node: Any) -> None:
        """Let an operation inside backward stand where the operation stood that it is the backward of."""
        if not self.trace.backwards or not self.trace.backwards[-1].running:
            self.late_backward = start_late(self)
        number = self.trace.op_number_of_node.get(node_number(node))
        if number is not None:
            self.location = self.trace.ops[number].location

    # --- what torch computes --------------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it down."""
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
        elif self.late_backward is not None:
            self.late_backward.running, self.late_backward = False, None
        inputs: list[torch.Tensor] = []
        codes: list[int] = []
        read = self.values.read
        for argument in () if operator.shape_only else (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, _Tensor):
                inputs.append(argument)
                read(argument, codes)
            elif type(argument) in (list, tuple):
                for item in argument:
                    if isinstance(item, _Tensor):
                        inputs.append(item)
                        read(item, codes)
        bad_before = self.nonfinite.marks(operator, args, kwargs) if operator.written_names else None
        result = func(*args, **kwargs)
        location = self.location or self.here()
        trace = self.trace
        number = len(trace.ops)
        if number >= _MOST_OPERATIONS:  # nobody has taken a step for so long: there is no step to explain
            self.begin_again()
            trace, number = self.trace, 0
        newest = latest_node_number()
        if newest not in trace.op_number_of_node:
            trace.op_number_of_node[newest] = number
        connected = records and operator.name != "detach" and any(code & 1 for code in codes)
        outputs = self._results(operator, args, kwargs, result, connected, location)
        self.trace.ops.append(
            Op(
                operator,
                location,
                self.running.module,
                self.running.call,
                newest,
                records,
                self.off_switch if not records else -1,
                tuple(codes),
                tuple(outputs),
                (self.call,) if self.call else _plain(args, kwargs) if operator.keeps_arguments else (),
            )
        )
        if not operator.view and not operator.silent:
            self.nonfinite.look(operator, number, args, kwargs, inputs, result, outputs, bad_before)
        if operator.written_names and node is None and self._updates_by_hand(operator.targets(args, kwargs)):
            self._end_step_by_hand(location)
        return result

    def _updates_by_hand(self, written: Iterable[torch.Tensor]) -> bool:
        """Return whether a write after backward changes a leaf that has a gradient: an update without an optimizer."""
        if self._stepping or not self.trace.backwards or self.trace.backwards[-1].running:
            return False
        leaves = [root.tensor for root in self.trace.roots.values() if root.leaf and root.requires_grad]
        updated = {region_of(leaf).storage for leaf in leaves if leaf is not None and leaf.grad is not None} - {0}
        return any(region_of(tensor).storage in updated for tensor in written)

    def _end_step_by_hand(self, location: Location | None) -> None:
        self.trace.updated_by_hand = location
        for listener in (*self.before_step, *self.after_step):
            listener(None)

    def _results(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        connected: bool,
        location: Location | None,
    ) -> list[int]:
        values = self.values
        if operator.written_names:
            return [values.write(tensor) for tensor in self._log_writes(operator, args, kwargs)]
        outputs = []
        for tensor in (result,) if isinstance(result, _Tensor) else result if type(result) in (list, tuple) else ():
            if isinstance(tensor, _Tensor):
                if operator.view:
                    outputs.append(values.make_view(tensor, connected))
                else:
                    outputs.append(values.make(tensor))
        if not connected and outputs:
            values.unconnected.update(outputs)
            if not torch.is_grad_enabled() and torch.is_inference_mode_enabled():
                self.trace.inference_values.update(dict.fromkeys(outputs, location))
                if isinstance(result, _Tensor):
                    self._made_in_inference[id(result)] = (weakref.ref(result), location)
        return outputs

    def _log_writes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        written = []
        location = self.here()
        for target in operator.targets(args, kwargs):
            self.saving.log_write(target, operator.name, location, by_optimizer=False)
            written.append(target)
            if operator.zeroes:
                self.reuse.zero(target)
                self.cleared = location
        self.trace.scaled |= operator.unscales
        return written

    def note_detached(self, tensor: torch.Tensor, code: int) -> None:
        """Record that a tensor lost its history in place, which leaves no operation behind."""
        value = self.values.write(tensor)
        self.values.unconnected.add(value)
        module, call, newest = self.running.module, self.running.call, latest_node_number()
        self.trace.ops.append(Op(_DETACH, self.here(), module, call, newest, True, -1, (code,), (value,), ("detach",)))

    def note_raised(self, args: tuple[Any, ...], error: RuntimeError) -> None:
        """Write down a call that raised, whether the user catches it or not."""
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
        if self.active:
            self.running.end()

    def _after_a_failed_step(self) -> None:
        """Look again if an optimizer raised in its step and the user went on."""
        if self._step_frame is not None and not self._is_inside_step():
            self._step_frame, self._stepping = None, False
            self.enter_modes()

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
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        location = locate(sys._getframe(1))
        idle = all(self.reuse.is_zeroed(parameter.grad) for parameter in held)
        closure = len(args) + len(kwargs) > 1
        again, old = (0, 0) if closure else self.reuse.use(optimizer)
        self.trace.optimizer_steps.append(
            OptimizerStep(
                optimizer, location, len(self.trace.backwards), idle and not closure, again, old, self.cleared
            )
        )
        for listener in self.before_step:
            listener(optimizer)
        self._stepping = True
        # A closure runs the user's own code inside the step; else there is nothing to see but the writing itself.
        if closure or not self.can_pause():
            return
        self.leave_modes()
        self._step_frame = sys._getframe(1)
        for parameter in held:
            if parameter.grad is not None:
                self.saving.log_write(parameter, "optimizer.step()", location, by_optimizer=True)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = False
        if self._step_frame is sys._getframe(1):
            self._step_frame = None
            self.enter_modes()
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
        tracer = self.tracer
        if not tracer.active:
            return func(*args, **kwargs) if kwargs else func(*args)
        return tracer.operation(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        if not tracer.active:
            return func(*args, **kwargs) if kwargs else func(*args)
        tracer.location = None
        if inside_functorch():
            tracer.trace.functional = True
        handler = CALLS.get(func)
        try:
            if handler is not None:
                return handler(tracer, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            tracer.note_raised(args, error)
            raise
        finally:
            tracer.location = None


# --- calls that leave no operation behind -----------------------------------------------------------------------------


Handler = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any]], Any]


def _named(name: str) -> Handler:
    """Make a handler that lets the operations of a call know what the user wrote."""

    def handler(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer.call = name
        try:
            return func(*args, **kwargs)
        finally:
            tracer.call = ""

    return handler


def _escape(kind: str) -> Handler:
    """Make a handler that notes that a value leaves torch."""

    def handler(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = tracer.trace
        for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
            if isinstance(tensor, _Tensor):
                value, where = tracer.values.of(tensor), tracer.here()
                trace.escapes.append(Escape(kind, value, where, len(trace.ops), tensor.is_floating_point()))
        return _named(kind)(tracer, func, args, kwargs)

    return handler


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


CALLS: dict[Any, Handler] = {
    torch.Tensor.data.__get__: _named("data"),  # type: ignore[attr-defined]
    torch.Tensor.detach: _named("detach"),
    torch.Tensor.detach_: _detach_in_place,
    torch.tensor: _escape("torch.tensor"),  # of a tensor, or of a list of them
    torch.Tensor.item: _escape("item"),
    torch.Tensor.tolist: _escape("tolist"),
    torch.Tensor.numpy: _escape("numpy"),
    torch.Tensor.__array__: _escape("numpy"),
    torch.Tensor.__float__: _escape("float"),
    torch.Tensor.__int__: _escape("int"),
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: _set_gradient,  # type: ignore[union-attr]
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
    write_grad_mode: _switch,
}
