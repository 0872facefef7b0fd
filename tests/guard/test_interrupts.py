"""An interrupt at any moment leaves everything as before the call: gradients, buffers, random state, modes, hooks."""

import _thread
import itertools
import os
import random
import signal
import sys
from collections import deque

import numpy
import pytest
import torch

import gradgate as gg
from gradgate._patches import Patches, to_the_end
from tests.interrupting import Interrupts, differences, process_state

NAN = float("nan")
BAD = 4
SIZE = 8


class Fussy(torch.nn.Module):
    def forward(self, x):
        if bool((x.abs().amax(1) > 50).any()):
            raise ValueError("a value is too large")
        return x


class Prompt(torch.nn.Module):
    """Returns a parameter itself, so that a hook on the output of the module is one on the parameter."""

    def __init__(self):
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.full((4,), 0.1))

    def forward(self):
        return self.prompt


class Prompted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt, self.layer = Prompt(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + self.prompt())


class World:
    """A model, a guard and a step of some kind, with gradients of an earlier step."""

    def __init__(self, kind, bad=True):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        layers = {
            "loss": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2)),
            "exception": lambda: torch.nn.Sequential(
                torch.nn.Sequential(Fussy(), torch.nn.Linear(4, 4)), torch.nn.BatchNorm1d(4)
            ),
            "gradient": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)),
            "prompt": Prompted,
            "autocast": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), Fussy(), torch.nn.BatchNorm1d(4)),
        }
        self.kind, self.model = kind, layers[kind]()
        self.good = torch.randn(SIZE, 4)
        self.batch = self.good.clone()
        if bad:
            self.batch[BAD] = {"loss": NAN, "prompt": NAN, "gradient": 0.0}.get(kind, 1e4)
        self.guard = gg.Guard(self.model, patience=1000)
        self.guard.backward(self.good, self.loss)

    def output(self, x):
        x = x * (1 + 0.01 * random.random() + 0.01 * numpy.random.rand())
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x)
        return self.model(x)

    def loss(self, x):
        y = self.output(x).float()
        if self.kind == "gradient":  # the root of 0 has an infinite slope
            scaled = x * self.model[0].weight.sum()
            return y.square().mean() + scaled.square().sum(1).sqrt().mean()
        return y.square().mean()

    def backward(self):
        return self.guard.backward(self.batch, self.loss)

    def forward(self):
        return self.guard.forward(self.batch, self.output)

    def state(self):
        """Give everything that an interrupt must leave alone, by name."""
        found = process_state()
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            found[f"gradient of {name}"] = None if gradient is None else (id(gradient), gradient.numpy().tobytes())
            found[name] = parameter.detach().numpy().tobytes(), parameter.requires_grad
            found[f"hooks of {name}"] = len(parameter._backward_hooks or ())
        for name, buffer in self.model.named_buffers():
            found[name] = id(buffer), buffer.numpy().tobytes()
        for name, module in self.model.named_modules():
            found[f"module {name}"] = module.training, "forward" in module.__dict__, len(module._forward_hooks)
        found["counts"] = self.guard.state_dict()
        return found


def _interrupted(world, call, lines):
    """Run a call with interrupts at some lines; give whether it was interrupted, and what is different after it."""
    before = world.state()
    try:
        with Interrupts(*lines):
            call()
    except KeyboardInterrupt:
        return True, differences(before, world.state())
    return False, []


KINDS = ["loss", "exception", "gradient", "prompt", "autocast"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["backward", "forward"])
@pytest.mark.parametrize("bad", [True, False])
def test_an_interrupt_at_a_line_of_the_library_leaves_everything_as_before(kind, call, bad):
    world = World(kind, bad)
    with Interrupts() as counted:
        getattr(World(kind, bad), call)()
    drawn = random.Random(f"{kind} {call} {bad}")
    for line in sorted(drawn.sample(range(1, counted.count + 1), 12)):
        # One interrupt; and a second one in the clean-up after it.
        for lines in ([line], [line, line + drawn.randint(1, 60)]):
            interrupted, different = _interrupted(world, getattr(world, call), lines)
            assert not different, (line, lines)
            if not interrupted:  # the step took fewer lines this time, and was made
                world = World(kind, bad)
    result = world.backward()
    assert result.kept == [row for row in range(SIZE) if not bad or row != BAD]
    assert all(bool(parameter.grad.isfinite().all()) for parameter in world.model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers of this kind here")
def test_timers_interrupt_at_any_moment(monkeypatch):
    """Real signals come also inside of torch and of the standard library; every second one comes twice."""

    def interrupt(number, frame):
        if allowed:
            allowed.pop()
            raise KeyboardInterrupt

    # Python drops an interrupt that comes in the callback of a weak reference; a hook in C is not interrupted itself.
    monkeypatch.setattr(sys, "unraisablehook", deque(maxlen=0).append)
    allowed, drawn = [], random.Random(7)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for kind, bad in itertools.product(KINDS, (True, False)):
            world = World(kind, bad)
            for number in range(12):
                state, step = world.state(), world.guard.global_step
                allowed[:] = [None] * (1 + number % 2)
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-5, 8e-3), drawn.uniform(5e-5, 5e-4))
                        world.backward()
                    finally:
                        allowed.clear()
                except KeyboardInterrupt:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                if world.guard.global_step > step:  # it came after the step was complete
                    world = World(kind, bad)
                else:
                    assert not differences(state, world.state()), (kind, bad, number)
            assert world.backward().kept == [row for row in range(SIZE) if not bad or row != BAD]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_exit_by_a_signal_handler_leaves_everything_as_before():
    def leave(number, frame):
        raise SystemExit(3)

    world = World("loss")
    calls = []

    def loss(x):
        calls.append(None)
        value = world.loss(x)
        if len(calls) == 3:  # in the middle of the search
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    before, state = signal.signal(signal.SIGTERM, leave), world.state()
    try:
        with pytest.raises(SystemExit):
            world.guard.backward(world.batch, loss)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not differences(state, world.state())


def test_an_interrupt_from_another_thread_in_a_search():
    world, calls = World("gradient"), []

    def loss(x):
        calls.append(None)
        if len(calls) == 2:
            _thread.interrupt_main()
        return world.loss(x)

    state = world.state()
    with pytest.raises(KeyboardInterrupt):
        world.guard.backward(world.batch, loss)
    assert not differences(state, world.state())
    with torch.no_grad():
        assert bool(world.output(world.batch).isnan().any()) is False


def test_a_step_that_could_not_be_cleaned_up_is_cleaned_up_by_the_next_one(monkeypatch):
    world = World("loss")
    state = world.state()
    with monkeypatch.context() as patch:
        patch.setattr(type(world.guard._state), "give_back", lambda self, **_: None)
        with pytest.raises(KeyboardInterrupt):
            world.guard.backward(world.good, lambda x: (world.loss(x), _thread.interrupt_main(), torch.zeros(()))[2])
    assert differences(state, world.state())
    result = world.backward()  # not "a guard was used inside one of its own steps"
    fresh = World("loss")
    assert result.kept == fresh.backward().kept
    for one, other in zip(world.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_earlier_gradients_are_added_completely_or_not_at_all():
    """The last thing in a step is one call of torch: before it nothing is added, after it everything."""
    world = World("loss", bad=False)
    with Interrupts() as counted:
        world.backward()
    interrupts = 0
    for line in range(counted.count - 50, counted.count + 1):
        interrupted, different = _interrupted(world, world.backward, [line])
        assert not different, line
        interrupts += interrupted
    assert interrupts > 30


def test_a_guard_inside_its_own_step_is_refused_also_after_an_interrupt():
    world = World("loss", bad=False)
    assert _interrupted(world, world.backward, [60])[0]
    with pytest.raises(gg.GradgateError, match="inside one of its own steps"):
        world.guard.backward(world.batch, lambda x: world.guard.backward(x, world.loss).loss)
    world.backward()


def test_limit_what_the_loss_function_was_about_to_put_back_is_not_put_back():
    world = World("loss", bad=False)

    def loss(x):
        world.model.eval()
        world.loss(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.guard.backward(world.batch, loss)
    assert not world.model.training


def test_patches_are_taken_back_in_order_and_by_nobody_else():
    table, patches = {"a": 1}, Patches()
    block = patches.block()
    block.__enter__()
    patches.put(table, "a", 2)
    patches.put(table, "a", 3)
    patches.put(table, "b", 4)
    patches.undo()
    assert table == {"a": 1}
    patches.put(table, "a", 5)
    block.__exit__(None, None, None)  # one that an interrupt left open, closed by the garbage collector
    assert table == {"a": 5}
    patches.undo()
    assert table == {"a": 1}


def test_a_clean_up_is_repeated_until_it_has_run_through():
    attempts = []

    def clean_up():
        attempts.append(None)
        if len(attempts) < 4:
            raise KeyboardInterrupt(len(attempts))

    with pytest.raises(KeyboardInterrupt, match="3"):
        to_the_end(clean_up)
    assert len(attempts) == 4


def test_a_clean_up_that_cannot_succeed_ends():
    def clean_up():
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        to_the_end(clean_up)
