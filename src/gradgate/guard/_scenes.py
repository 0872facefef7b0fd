"""Tests for the search: run some part of the user's code on some rows, and say how it fared.

Three parts are used: the whole function on rows of the batch; one module on rows of the arguments it was called
with; and the code around modules, which then answer from a tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gradgate._names import text_of
from gradgate._source import raising_spot
from gradgate._torch_compat import ModuleCall, ThreadModes, compiled_as_written, write_grad_mode, write_mark
from gradgate._trees import with_own_containers
from gradgate.errors import GradgateError
from gradgate.guard._batches import BatchReader, batch_dim_of, index_of, taking
from gradgate.guard._faults import Fault, must_pass
from gradgate.guard._finite import leaves_in, non_finite_rows, tensors_in
from gradgate.guard._observer import Enough
from gradgate.guard._search import Group, Test, Verdict
from gradgate.guard._state import TrainingState
from gradgate.guard._tape import Tape
from gradgate.guard._trial import Outcome, Trial

__all__ = ["Scenes", "has_rows", "untouched"]

Take = Callable[[torch.Tensor], Any]


class Scenes:
    """The tests of one batch.

    Args:
        trial: Runs the user's function.
        state: Is put back before each run.
        reader: Takes rows of the batch.
        batch: The batch.
        size: How many samples it holds.
        eager: Something compiled may run; see `as_written`.
    """

    def __init__(
        self, trial: Trial, state: TrainingState, reader: BatchReader, batch: Any, size: int, *, eager: bool
    ) -> None:
        self.trial = trial
        self.state = state
        self._batch = batch
        self.size = size
        self.batch_dim = reader.batch_dim
        self.recording = False
        self.messages: dict[int, str] = {}
        self._reader = reader
        self._ambient = torch.is_grad_enabled()
        self.eager = eager

    @property
    def batch(self) -> Any:
        """The batch, in containers that the user's code may do with as it likes."""
        return with_own_containers(self._batch)

    def as_written(self) -> AbstractContextManager[None]:
        """Run compiled modules as they were written, if there may be any."""
        return compiled_as_written(self.state.patches) if self.eager else nullcontext()

    @contextmanager
    def prepared(self, *, recording: bool | None = None, light: bool = False) -> Iterator[None]:
        """Put the state back (all of it, or what costs little), and set the mode in which probes run."""
        if light:
            self.state.restore_tensors()
        else:
            self.state.restore()
        wanted = self.recording if recording is None else recording
        with self.state.patches.block():
            self.state.patches.later(ThreadModes().restore)
            write_grad_mode(wanted and self._ambient)
            yield

    def whole(self, fault: Fault) -> Test:
        """Test rows of the batch with the user's whole function, and backward where the fault showed there."""
        walks_back, take = fault.stage == "backward", self._reader.taking(self._batch, self.size)

        def test(rows: Group) -> Verdict:
            batch = take(rows, index_of(rows))
            with self.prepared(recording=walks_back or None):
                outcome = self._tried(self.trial.run if walks_back else self.trial.forward, batch, len(rows))
            return self._verdict(rows, fault, outcome)

        return test

    @contextmanager
    def around(self, fault: Fault, tape: Tape) -> Iterator[Test]:
        """Test rows with the user's function while its outermost modules answer from a tape."""
        take = self._reader.taking(self._batch, self.size)

        def test(rows: Group) -> Verdict:
            index = index_of(rows)
            batch = take(rows, index)
            tape.rewind(index)
            self.state.restore_tensors()
            try:
                outcome = self._tried(self.trial.forward, batch, len(rows))
            except Enough:
                return Verdict.PASSES  # it came past the fault
            return self._verdict(rows, fault, outcome)

        with self.prepared(), tape.installed(self.state.patches, until=fault.error is not None):
            yield test

    @contextmanager
    def around_and_back(self, tape: Tape) -> Iterator[Test]:
        """The same for gradients: those that the loss sends back to what the modules answered."""
        take = self._reader.taking(self._batch, self.size)

        def test(rows: Group) -> Verdict:
            index, leaves = index_of(rows), list[torch.Tensor]()
            batch = take(rows, index)
            tape.rewind(index, leaves)
            self.state.restore_tensors()
            outcome = self.trial.forward(batch, len(rows))
            if outcome.fault is not None or not leaves:
                return Verdict.OTHER
            back = self.trial.attempt(lambda: torch.autograd.grad(outcome.value, leaves, allow_unused=True))
            if back.fault is not None:
                return Verdict.OTHER
            finite = all(bool(torch.isfinite(gradient).all()) for gradient in back.value if gradient is not None)
            return Verdict.PASSES if finite else Verdict.SAME

        with self.prepared(recording=True), tape.installed(self.state.patches):
            yield test

    @contextmanager
    def inside(self, fault: Fault, call: ModuleCall, tape: Tape, autocast: dict[str, torch.dtype]) -> Iterator[Test]:
        """Test rows of the arguments that a module was called with; its finished children answer from a tape."""
        module, (takes, named) = call.module, self._takes(call)
        until = bool(tape)  # then nothing inside runs but the body of the module itself
        careful = next(module.buffers(recurse=not until), None) is not None

        def test(rows: Group) -> Verdict:
            if careful:
                self.state.restore_tensors()
            index = index_of(rows)
            if until:
                tape.rewind(index)
            args = [take(index) for take in takes]
            kwargs = {key: take(index) for key, take in named.items()} if named else {}
            try:
                module(*args, **kwargs)
            except Enough:
                return Verdict.PASSES  # it came past the fault
            except Exception as error:  # what is not to be caught is another fault than the batch's
                if must_pass(error):
                    raise
                if type(error) is not type(fault.error) or raising_spot(error.__traceback__) != fault.spot:
                    return Verdict.OTHER
                self._note(rows, text_of(error))
                return Verdict.SAME
            return Verdict.PASSES

        with self.prepared(), tape.installed(self.state.patches, until=until, besides=module):
            for kind, dtype in autocast.items():  # put back with the other modes at the end of the block
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
            yield test

    def smears(self, call: ModuleCall, row: int, companion: int) -> bool:
        """Tell whether a module lets one row's value that is not finite into another row."""
        (takes, named), index = self._takes(call), index_of([row, companion])
        args, kwargs = [take(index) for take in takes], {key: take(index) for key, take in named.items()}
        with self.prepared(light=True):
            outcome = self.trial.attempt(lambda: call.module(*args, **kwargs))
        return outcome.fault is not None or 1 in non_finite_rows(tensors_in(outcome.value), 2, self.batch_dim)

    def _takes(self, call: ModuleCall) -> tuple[list[Take], dict[str, Take]]:
        """Make functions that take rows of each argument of a call."""
        takes = [taking(value, self.size, self.batch_dim) for value in call.args]
        return takes, {key: taking(value, self.size, self.batch_dim) for key, value in call.kwargs.items()}

    def _tried(self, run: Callable[[Any, int], Outcome], batch: Any, size: int) -> Outcome:
        """Make a try with some rows; what is not to be caught may come from their number alone."""
        try:
            return run(batch, size)
        except GradgateError:
            raise
        except Exception as error:  # the step without the bad samples still raises it, if it is real
            if must_pass(error):
                raise
            return Outcome(Fault.raised(error))

    def _verdict(self, rows: Group, fault: Fault, outcome: Outcome) -> Verdict:
        if outcome.fault is None:
            return Verdict.PASSES
        if not fault.same_as(outcome.fault):
            return Verdict.OTHER
        self._note(rows, outcome.fault.message)
        return Verdict.SAME

    def _note(self, rows: Group, message: str) -> None:
        """Keep what a suspect in company says: it is its own. The exception itself would hold on to a lot."""
        if len(rows) <= 3:
            self.messages.update(dict.fromkeys(rows, message))


def untouched(call: ModuleCall) -> bool:
    """Tell whether nobody has written into the arguments of a call, as far as autograd's counter knows."""
    return all(write_mark(tensor)[1] == 0 for tensor in [*tensors_in(call.args), *tensors_in(call.kwargs)])


def has_rows(call: ModuleCall, size: int, batch_dim: int) -> bool:
    """Tell whether the arguments of a call have rows at all."""
    leaves = [*leaves_in(call.args), *leaves_in(call.kwargs)]
    return any(isinstance(leaf, torch.Tensor) and batch_dim_of(leaf, size, batch_dim) is not None for leaf in leaves)
