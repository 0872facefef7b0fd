"""Datasets with known faults, at the top of a module so that any worker can load them."""

import os
import signal
import threading

import torch
from torch.utils.data import Dataset, IterableDataset


class BrokenFile(Exception):
    """Needs two arguments, as in the report that torch loses them."""

    def __init__(self, reason, offset):
        super().__init__(reason, offset)
        self.reason, self.offset = reason, offset


class Unpicklable(Exception):
    """Takes one argument and gives its base none, so pickle cannot make it again."""

    def __init__(self, reason):
        super().__init__()
        self.reason = reason

    def __str__(self):
        return f"unpicklable: {self.reason}"


class Numbers(Dataset):
    """Gives the index as a tensor; some indices raise."""

    def __init__(self, size, bad=(), error=None):
        self.size, self.bad, self.error = size, frozenset(bad), error or OSError("truncated image")

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise self.error
        return torch.tensor(index)


class Batched(Numbers):
    """Loads whole batches at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Shapes(Numbers):
    """Some samples have another shape: only collation notices."""

    def __getitem__(self, index):
        return torch.zeros(3) if index in self.bad else torch.full((2,), float(index))


class Nothing(Numbers):
    """Some samples are None."""

    def __getitem__(self, index):
        return None if index in self.bad else torch.tensor(index)


class Generated(IterableDataset):
    """A stream that is a generator: it ends where it raises."""

    def __init__(self, size, bad=()):
        self.size, self.bad = size, frozenset(bad)

    def __iter__(self):
        for number in range(self.size):
            if number in self.bad:
                raise OSError("truncated record")
            yield torch.tensor(number)


class Stepped(Generated):
    """A stream whose iterator is a class: it goes on."""

    def __iter__(self):
        return _Steps(self.size, self.bad)


class _Steps:
    def __init__(self, size, bad, offset=0):
        self.size, self.bad, self.number, self.offset = size, bad, -1, offset

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number >= self.size:
            raise StopIteration
        if self.number in self.bad:
            raise OSError("truncated record")
        return torch.tensor(self.number + self.offset)


class Sharded(Stepped):
    """Each worker has its own numbers: worker 1 from 100 on."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return _Steps(self.size, self.bad, 0 if worker is None else 100 * worker.id)


class Configured(Stepped):
    """A stream that a worker_init_fn sets up through get_worker_info().dataset."""

    start = 0

    def __iter__(self):
        return _Steps(self.size, self.bad, self.start)


def set_start(worker_id):
    torch.utils.data.get_worker_info().dataset.start = 1000 * (worker_id + 1)


class Deadly(Numbers):
    """Some samples end their worker, or never come back; `fate` says how, by index."""

    def __init__(self, size, fate):
        super().__init__(size)
        self.fate = fate

    def __getitem__(self, index):
        fate = self.fate.get(index)
        if fate == "loop":
            while True:
                pass
        elif fate == "wait":
            threading.Event().wait()
        elif fate == "exit":
            os._exit(3)
        elif fate == "raise":
            raise ValueError("bad")
        elif fate is not None:
            os.kill(os.getpid(), fate)
        return torch.tensor(index)


class DeadlyOnce(Numbers):
    """A sample kills its worker the first time that it is loaded; `mark` is a file that remembers it."""

    def __init__(self, size, bad, mark):
        super().__init__(size, bad)
        self.mark = mark

    def __getitem__(self, index):
        if index in self.bad and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class DeadlyTogether(Deadly):
    """Loads whole batches at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def deadly_collate(samples):
    """End the worker where sample 4 is among others or alone."""
    if any(int(sample) == 4 for sample in samples):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(samples)


def write_start(worker_id):
    """Note each start of a worker, in a file whose name is in the environment."""
    with open(os.environ["GRADGATE_TEST_STARTS"], "a") as file:
        file.write(f"{worker_id}\n")
