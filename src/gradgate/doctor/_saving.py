"""What is saved for backward, and whether it is still what it was when backward reads it.

While hooks are set, autograd leaves out its own check of versions; so the check is made here, and the same error is
raised where torch would raise it. Where torch would not notice (a write through `.data`), it is only noted down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from gradgate._source import Location
from gradgate._torch_compat import latest_node_number, undispatched
from gradgate.doctor._memory import overlaps, region_of
from gradgate.doctor._trace import Overwrite, Trace, Write


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
        self._clock = 0

    def forget(self, trace: Trace) -> None:
        """Begin a new trace."""
        self.trace = trace
        self._writes.clear()

    def log_write(self, tensor: torch.Tensor, name: str, location: Location | None, by_optimizer: bool) -> None:
        """Write down that memory was written to."""
        self._clock += 1
        region = region_of(tensor)
        self._writes[region.storage].append((self._clock, Write(region, name, location, by_optimizer)))

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Keep a tensor for backward.

        A saved result whose own node held it would never be freed, so what is kept is detached; it shares memory and
        version with the original.
        """
        kept = tensor
        if not tensor.is_leaf:
            with undispatched():
                kept = tensor.detach()
        return Saved(kept, tensor._version, self._clock, latest_node_number(), self._spot())

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Give a tensor back to backward, if it is still what it was."""
        if saved.writes != self._clock:
            write = self._overwritten(saved)
            if write is not None:
                self._report(saved, write)
        return saved.tensor

    def _overwritten(self, saved: Saved) -> Write | None:
        region = region_of(saved.tensor)
        moved = saved.tensor._version != saved.version
        with undispatched():
            for clock, write in self._writes.get(region.storage, ()):
                if clock > saved.writes and (moved or overlaps(write.region, region)):
                    return write
        return None

    def _report(self, saved: Saved, write: Write) -> None:
        silent = saved.tensor._version == saved.version and not write.name.startswith(("_foreach_", "_fused_"))
        tensor = saved.tensor
        shape = tuple(tensor.shape)
        self.trace.overwrites.append(
            Overwrite(saved.location, saved.node, write.location, write.name, write.by_optimizer, silent, shape)
        )
        if not silent:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; "
                f"expected version {saved.version} instead."
            )
