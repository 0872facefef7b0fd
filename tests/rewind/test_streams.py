"""Snapshots on an accelerator, which the tests do not have: fake tensors, and streams that note what they are asked."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradgate as gg
from gradgate.rewind import _snapshots
from gradgate.rewind._snapshots import Copier, StateSnapshot


@pytest.fixture
def events(monkeypatch):
    """What happens on the streams of a device, in order."""
    events, running = [], []

    class Stream:
        def __init__(self, name="side", device=None):
            self.name = name
            assert device is None or device.type == "cuda"

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            events.append(f"{self.name} records")
            return f"the copies of {self.name}"

        def wait_event(self, event):
            events.append(f"{self.name} waits for {event}")

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").copy_(torch.empty(1, device="cuda"))
        except RuntimeError:  # torch 2.8, built for CUDA
            pytest.skip(f"torch {torch.__version__} needs a GPU even to copy a fake tensor")
    copy = torch.Tensor.copy_

    def noted(self, source, non_blocking=False):
        if non_blocking:
            events.append(f"{running[-1].name} copies {tuple(source.shape)} to pinned memory")
        return copy(self, source, non_blocking)

    running.append(Stream("current"))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: running[-1])
    monkeypatch.setattr(torch.accelerator, "set_stream", running.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append("the host waits"))
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: events.append("memory is kept"))
    monkeypatch.setattr(_snapshots, "random_state", dict)
    monkeypatch.setattr(_snapshots, "set_random_state", lambda state: None)
    return events


def test_copies_run_beside_the_training_and_the_optimizer_waits_for_them(events):
    with FakeTensorMode():
        model = torch.nn.BatchNorm1d(3, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = StateSnapshot(Copier([model, optimizer]))
        snapshot.take(0, 0)
        events.append("forward")
        optimizer.step()
        optimizer.step()
        snapshot.restore()
    assert events == [
        "side waits for current",  # which has made the step
        "current copies (3,) to pinned memory",  # buffers, which the next forward pass writes
        "current copies (3,) to pinned memory",
        "current copies () to pinned memory",
        "memory is kept",
        "side copies (3,) to pinned memory",  # parameters, which only the optimizer writes
        "memory is kept",
        "side copies (3,) to pinned memory",
        "side records",
        "forward",
        "current waits for the copies of side",  # before the optimizer writes, once
        "the host waits",
        *["current copies (3,) to pinned memory"] * 4,  # that is, from it
        "current copies () to pinned memory",
    ]


def test_the_state_of_an_optimizer_is_copied_beside_and_what_nobody_owns_is_not(events):
    with FakeTensorMode():
        model, other = torch.nn.Linear(2, 3, device="cuda"), torch.nn.Linear(4, 5, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        events.clear()
        StateSnapshot(Copier([model, other, optimizer])).take(0, 0)
    beside = [event for event in events if event.startswith("side copies")]
    assert sorted(beside) == sorted(2 * [f"side copies {shape} to pinned memory" for shape in ((3, 2), (3,))])
    assert "current copies (5, 4) to pinned memory" in events


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_state_is_read_when_the_copies_are_there(events):
    with FakeTensorMode():
        model = torch.nn.Linear(2, 3, device="cuda")
        snapshot = StateSnapshot(Copier([model]))
        snapshot.take(0, 0)
        events.clear()
        snapshot.state()
    assert events[0] == "the host waits"


def test_a_training_on_the_cpu_uses_no_stream(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a stream on the CPU")

    monkeypatch.setattr(torch, "Stream", refuse)
    for name in ("current_stream", "set_stream", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, refuse)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    rewind = gg.Rewind(model, optimizer, every=3)
    for batch in rewind.batches(torch.ones(30, 2, 1).unbind()):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        rewind.observe(float("nan") if rewind._number == 20 else loss)
    assert len(rewind.rewinds) == 1
    assert not optimizer._optimizer_step_pre_hooks
