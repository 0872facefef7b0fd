"""The gradient on its way from module to module: how large it was when it came out of each call.

What a call sends back for a tensor that it read is the sum of what its nodes send back for it. The nodes that stand
behind the last module count as one call more, the loss; nodes between modules (a residual sum, a concatenation) only
pass on what comes to them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from gradgate._torch_compat import leaf_of, node_number
from gradgate.doctor._looking import is_readable, norm_of

if TYPE_CHECKING:
    from gradgate.doctor._trace import Trace


LOSS = -2
_BETWEEN = -3


class Way:
    """One tensor that one call read."""

    __slots__ = ("_amount", "_sum", "_waiting", "call", "leaf", "node")

    def __init__(self, call: int, node: int, leaf: int, reads: int) -> None:
        self.call = call
        self.node = node
        self.leaf = leaf
        self._waiting = reads
        self._sum: torch.Tensor | None = None
        self._amount: float | None = None

    @property
    def norm(self) -> float | None:
        """Give the norm of the gradient that came back: it may be NaN or Inf; None where none came or can be read."""
        if self._sum is not None:  # some of what was expected never came
            self._amount, self._sum = norm_of(self._sum), None
        return self._amount

    def note(self, gradient: torch.Tensor) -> float | None:
        """Note what came back for one read."""
        self._waiting -= 1
        if not is_readable(gradient):
            if not gradient.numel():
                self._amount = self._amount or 0.0
            return None
        if self._sum is None and self._waiting == 0:
            self._amount = norm_of(gradient)
            return self._amount
        if self._sum is None:
            # A copy: autograd goes on with the tensor itself, and may add to it in place.
            self._sum = gradient.detach().clone()
        else:
            self._sum += gradient.detach()
        if self._waiting <= 0:
            self._amount, self._sum = norm_of(self._sum), None
        return None

    @property
    def is_bad(self) -> bool:
        """Tell whether what came back is not finite."""
        return self.norm is not None and not math.isfinite(self.norm)


def ways_of(trace: Trace, nodes: list[Any], started: list[Any]) -> dict[Any, dict[int, Way]]:
    """Find the ways of a backward pass."""
    calls = _calls_of(trace, nodes)
    reads: Counter[tuple[int, Any, int]] = Counter()
    places: list[tuple[Any, int, tuple[int, Any, int]]] = []
    for node in nodes:
        call = calls[node]
        if call == _BETWEEN:
            continue
        for place, (following, output) in enumerate(node.next_functions):
            if following is None or calls[following] == call or isinstance(leaf_of(following), torch.nn.Parameter):
                continue
            key = (call, following, output)
            reads[key] += 1
            places.append((node, place, key))
    places += [(node, -1, (LOSS, node, 0)) for node in started if calls[node] != LOSS]
    known: dict[tuple[int, Any, int], Way] = {}
    found: defaultdict[Any, dict[int, Way]] = defaultdict(dict)
    for node, place, key in places:
        way = known.get(key)
        if way is None:
            way = known[key] = Way(key[0], node_number(key[1]), id(leaf_of(key[1])), reads[key] or 1)
            trace.ways.append(way)
        found[node][place] = way
    return found


def _calls_of(trace: Trace, nodes: list[Any]) -> dict[Any, int]:
    """Say of each node to which call it belongs, to the loss, or between modules."""
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
