"""Interrupts at chosen lines of the library, and what they must leave alone in the whole process."""

import linecache
import random
import sys
import warnings
from pathlib import Path

import numpy
import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

import gradgate as gg
from gradgate._torch_private import ThreadModes

SOURCES = str(Path(gg.__file__).parent)
# Between the addition of gradients and the return there is no call and no jump: only a tracer can raise there.
ATOMIC = {"run": ("state.open, guard._tally, guard.global_step = False, tally, step", "return result")}


class Interrupts:
    """Raises KeyboardInterrupt at some of the lines of the library that a block runs, by their numbers.

    `spared` are lines, by function, that do not count.
    """

    def __init__(self, *lines, spared=ATOMIC):
        self.lines = set(lines)
        self.spared = spared
        self.count = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *raised):
        sys.settrace(self._before)

    def _on_call(self, frame, event, value):
        return self._on_line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _on_line(self, frame, event, value):
        if event == "line" and not self._is_spared(frame):
            self.count += 1
            if self.count in self.lines:
                sys.settrace(self._on_call)  # an exception in a trace function ends tracing
                raise KeyboardInterrupt
        return self._on_line

    def _is_spared(self, frame):
        lines = self.spared.get(frame.f_code.co_name)
        return lines is not None and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() in lines


def process_state():
    """Give what the whole process shares, by name: modes, hooks, filters, random state."""
    modes = ThreadModes()
    tables = [table for name, table in vars(module_hooks).items() if name.startswith("_global_")]
    tables += [optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks]
    return {
        "modes": (modes._recording, modes._autocast, modes._caching, modes._nesting),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saving": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "hooks": [len(table) for table in tables if isinstance(table, dict)],
        "filters": list(warnings.filters),
        "switch": torch.set_grad_enabled.__init__,
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state(legacy=False))),
    }


def differences(before, after):
    """Name what is different."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
