"""How values flow through a trace: what a value was made from, what was made from it, and through whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from gradgate.doctor._trace import Op, Trace


class Flow:
    """The graph of values of a trace. It follows the data, also where autograd does not."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.maker: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.connected: set[int] = set(trace.rejoined)
        for number, op in enumerate(trace.ops):
            for code in op.inputs:
                self.readers[code >> 1].append(number)
                if code & 1:
                    self.connected.add(code >> 1)
            for value in op.outputs:
                self.maker[value] = number
        for backward in trace.backwards:
            self.connected.update(code >> 1 for code in backward.values if code & 1)
        # A leaf that was made of something (`h.detach().requires_grad_()`) is a beginning: nothing flows beyond it.
        self.connected.difference_update(value for value in trace.roots if value in self.maker)

    @cached_property
    def losses(self) -> frozenset[int]:
        """Give the values that backward passes started from."""
        return frozenset(code >> 1 for backward in self.trace.backwards for code in backward.values)

    @cached_property
    def behind_losses(self) -> frozenset[int]:
        """Give every value that a loss was made from, in whatever way."""
        return self.sources(self.losses)

    def sources(self, values: Iterable[int]) -> frozenset[int]:
        """Give every value that some values were made from, and themselves."""
        seen = set(values)
        waiting = list(seen)
        while waiting:
            number = self.maker.get(waiting.pop())
            if number is None:
                continue
            for code in self.trace.ops[number].inputs:
                if code >> 1 not in seen:
                    seen.add(code >> 1)
                    waiting.append(code >> 1)
        return frozenset(seen)

    def results(self, values: Iterable[int]) -> frozenset[int]:
        """Give every value that was made from some values, and themselves."""
        seen = set(values)
        waiting = list(seen)
        while waiting:
            for number in self.readers.get(waiting.pop(), ()):
                for value in self.trace.ops[number].outputs:
                    if value not in seen:
                        seen.add(value)
                        waiting.append(value)
        return frozenset(seen)

    def is_used(self, values: Iterable[int]) -> bool:
        """Tell whether anything is computed from some values; to be filled is no use."""
        readers = {number for value in self.results(values) for number in self.readers.get(value, ())}
        ops = [self.trace.ops[number] for number in readers]
        return any(op.records or not (op.operator.written or op.operator.view) for op in ops)

    def is_inside_function(self, op: Op) -> bool:
        """Tell whether an operation ran inside the forward of an autograd Function, where nothing is recorded."""
        if op.records:
            return False
        return op.switch < 0 or "Function.forward" in self.trace.switches[op.switch].by

    def cuts(self, start: Iterable[int]) -> list[int]:
        """Find the operations that cut a value off from the losses that it reaches."""
        return sorted(self._walk(start)[1])

    def is_connected(self, start: Iterable[int]) -> bool:
        """Tell whether a gradient finds a way from a loss to any of these values."""
        return not self.losses.isdisjoint(self._walk(start)[0])

    def _walk(self, start: Iterable[int]) -> tuple[set[int], set[int]]:
        """Follow what stays connected; give the values on the way and the operations that cut."""
        behind = self.behind_losses
        found: set[int] = set()
        seen = {value for value in start if value in behind}
        waiting = list(seen)
        while waiting:
            value = waiting.pop()
            for number in self.readers.get(value, ()):
                op = self.trace.ops[number]
                if 2 * value + 1 not in op.inputs:
                    continue
                if self.is_cut(op):
                    found.add(number)
                for result in self._onward(op) - seen:
                    seen.add(result)
                    waiting.append(result)
        return seen, found

    def is_cut(self, op: Op) -> bool:
        """Tell whether an operation cuts."""
        results = [value for value in op.outputs if value in self.behind_losses]
        if not results or any(value in self.connected for value in results):
            return False
        return not (self.is_inside_function(op) and any(value in self._behind_rejoined for value in results))

    @cached_property
    def _behind_rejoined(self) -> frozenset[int]:
        """Give every value that the result of a Function was made from, where a loss was made from that."""
        return self.sources(self.behind_losses.intersection(self.trace.rejoined))

    def _onward(self, op: Op) -> set[int]:
        """Give what is connected of an operation's results; inside a Function, the Function's own results."""
        results = {value for value in op.outputs if value in self.behind_losses}
        onward = {value for value in results if value in self.connected}
        loose = results - onward
        if loose and self.is_inside_function(op):
            onward |= self.results(loose) & set(self.trace.rejoined) & self.behind_losses
        return onward

    def reaches_loss(self, start: Iterable[int]) -> bool:
        """Tell whether a loss was made from any of these values, connected or not."""
        return any(value in self.behind_losses for value in start)
