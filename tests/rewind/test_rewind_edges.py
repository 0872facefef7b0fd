"""Counter-examples to the law: states, loops and loaders that are easily put back wrongly."""

import copy
import io
import itertools
import random
from collections import deque

import numpy
import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentValueError, GradgateWarning, TooManyRewinds
from gradgate.rewind import _snapshots, _spikes
from tests.rewind.test_behaviour import Stateful, feed, linear, wavy
from tests.rewind.trainings import assert_same

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:Rewind. the second loss spike")


def steps(model, optimizer, batches, *, rewind=None, spike=None, scheduler=None, before=lambda: None):
    """Train; the loss that is observed at the batch number `spike` is NaN. Batches are (number, tensor)."""
    done = []
    for number, x in batches if rewind is None else rewind.batches(batches):
        before()

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()
        if rewind is not None and (rewound := rewind.observe(NAN if number == spike else loss.detach())):
            done.append(rewound)
    return done


def numbered(count, columns=3):
    generator = torch.Generator().manual_seed(7)
    return [(number, torch.randn(4, columns, generator=generator)) for number in range(count)]


def check(build, count=16, spike=11, every=3, **options):
    """The law for a model, an optimizer and further parts that `build` makes; gives the rewinds."""
    batches = numbered(count)

    def run(stream, rewinding):
        torch.manual_seed(0)
        model, optimizer, *more = build()
        scheduler = next((part for part in more if hasattr(part, "get_last_lr")), None)
        rewind = gg.Rewind(model, optimizer, *more, every=every, **options) if rewinding else None
        done = steps(model, optimizer, stream, rewind=rewind, spike=spike, scheduler=scheduler)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        parts = [part.state_dict() for part in more]
        return done, copy.deepcopy([tensors, optimizer.state_dict(), parts, torch.get_rng_state()])

    done, found = run(batches, True)
    skipped = {number for one in done for number in one.skipped}
    _, wanted = run([batch for batch in batches if batch[0] not in skipped], False)
    assert_same(found, wanted)
    assert done
    return done


# --- modules --------------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Buffers of every bad habit: the batch itself, one that grows, one of another dtype, swapped, late, expanded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(4, 3))
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", None)
        self.register_buffer("never", None)
        self.register_buffer("one", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.register_buffer("wide", torch.arange(3.0).expand(5, 3))

    def forward(self, x):
        out = self.layer(x) + self.one * 0.01
        with torch.no_grad():
            self.last = x
            self.queue = torch.cat([self.queue, x[:1]])
            self.count = self.count.double() + 1
            self.cache = x.mean(0) if self.cache is None else self.cache * 0.5
            self.one, self.other = self.other, self.one
            self.one += 0.1
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(()))
            self.late += 1
        return out


@pytest.mark.parametrize("spike", [1, 11])
def test_buffers_that_are_rebound_grow_or_appear(spike):
    def build():
        model = Remembering()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert check(build, spike=spike)[0].exact


def test_a_batch_that_a_buffer_holds_is_not_overwritten():
    model = Remembering()
    batches = numbered(16)
    kept = copy.deepcopy(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, batches, rewind=gg.Rewind(model, optimizer, every=3), spike=11)
    assert_same(batches, kept)


def test_tied_parameters_in_two_parts():
    def build():
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        two.weight = one.weight
        return nn.Sequential(one, two), torch.optim.AdamW([*one.parameters(), two.bias]), one

    check(build)


def test_a_lazy_module_is_refused_with_a_fix():
    model = nn.LazyLinear(2)
    rewind = gg.Rewind(model)
    with pytest.raises(ArgumentValueError, match=r"weight, bias of LazyLinear have no values yet"):
        next(iter(rewind.batches([1])))


# --- optimizers and schedulers --------------------------------------------------------------------------------------


class Rotating(torch.optim.Optimizer):
    """State of every kind: two names for one tensor that part later, a bounded deque, an optimizer inside."""

    def __init__(self, params):
        super().__init__(params, {"lr": torch.tensor(0.1)})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["now"] = state["then"] = torch.zeros_like(p)
                    state["recent"] = deque(maxlen=2)
                    state["made"] = 0
                state["made"] += 1
                if state["made"] % 4 == 0:
                    state["then"] = state["now"].clone()
                elif state["made"] % 4 == 2:
                    state["then"] = state["now"]
                state["now"].add_(p.grad, alpha=0.1)
                state["recent"].append(p.grad.clone())
                p.sub_(0.01 * state["then"] + 0.01 * sum(state["recent"]))
        self.inner.step()
        return loss


@pytest.mark.parametrize("spike", [9, 10, 11, 12])
def test_optimizer_state_with_shared_tensors_a_deque_and_an_optimizer_inside(spike):
    def build():
        model = nn.Linear(3, 2)
        optimizer = Rotating(model.parameters())

        class Inner:
            def state_dict(self):
                return {
                    "momenta": list(optimizer.inner.state.values()),
                    "bound": [s["recent"].maxlen for s in states()],
                }

            def load_state_dict(self, state):
                """Only shown."""

        def states():
            return optimizer.state.values()

        return model, optimizer, Inner()

    check(build, spike=spike)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # torch 2.8's own float(loss)
def test_lbfgs():
    def build():
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    check(build, every=2)


SCHEDULERS = {
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 9, 9, 12], 0.5),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[10],
    ),
    "function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch 2.8's own SequentialLR
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind, lr):
    if kind == "sequence" and isinstance(lr, torch.Tensor) and torch.__version__ < "2.9":
        pytest.skip("torch 2.8: the base rates of this scheduler are the tensor that it writes to")

    def build():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=copy.deepcopy(lr))
        return model, optimizer, SCHEDULERS[kind](optimizer)

    check(build)


def test_a_schedule_keeps_its_types():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9])
    steps(model, optimizer, numbered(9), rewind=gg.Rewind(model, scheduler, every=3), spike=6, scheduler=scheduler)
    assert list(scheduler.milestones.elements()) == [4, 9]


def test_the_optimizer_of_a_scheduler_needs_not_be_given():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rewind = gg.Rewind(model, scheduler)
    assert [type(part) for part in rewind._parts] == [nn.Linear, type(scheduler), torch.optim.SGD]


def test_a_parameter_group_that_is_added_later_stays_and_is_not_exact():
    model, more = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewind = gg.Rewind(model, more, optimizer, every=50)
    calls = itertools.count()
    (done,) = steps(
        lambda x: more(model(x)),
        optimizer,
        numbered(10),
        rewind=rewind,
        spike=8,
        before=lambda: next(calls) == 4 and optimizer.add_param_group({"params": more.parameters(), "lr": 0.01}),
    )
    assert (done.exact, done.to_step) == (False, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_an_overflow_of_the_scale_is_no_spike():
    model = nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu")
    assert feed(gg.Rewind(model, scaler), wavy(10), [NAN, *[1.0] * 9])[0] == []
    assert len(feed(gg.Rewind(model, torch.amp.GradScaler("cpu", enabled=False)), wavy(10), [NAN, *[1.0] * 9])[0]) == 1


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_stay_or_are_none_as_they_were(to_none):
    """One layer has a gradient in the first steps only: zero moves it by its momentum, None does not."""

    def run(stream, rewinding):
        torch.manual_seed(0)
        model, rare = nn.Linear(3, 3), nn.Linear(3, 3)
        both = nn.ModuleList([model, rare])
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)
        rewind = gg.Rewind(both, optimizer, every=3) if rewinding else None
        for number, x in rewind.batches(stream) if rewind else stream:
            loss = (rare(model(x)) if number < 5 else model(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            if rewind:
                rewind.observe(NAN if number == 11 else loss)
        return [p.detach() for p in both.parameters()]

    batches = numbered(16)
    assert_same(run(batches, True), run([b for b in batches if b[0] not in (10, 11)], False))


# --- what a spike is ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_mostly_zero_has_no_spikes_of_ordinary_size():
    losses = [0.0 if step % 5 else 0.3 for step in range(60)]
    losses[40:44] = [0.2, 0.3, 0.1, 0.2]
    assert feed(linear()[0], losses)[0] == []
    assert feed(linear()[0], [0.0] * 40 + [1e-9] * 5)[0] == []
    losses[50:53] = [90.0] * 3
    assert len(feed(linear(every=5)[0], losses)[0]) == 1


def test_a_spike_among_the_batches_that_come_again_is_seen_with_a_small_window():
    """The level is that of the snapshot: it does not begin anew."""
    seen = []
    rewind, *_ = linear(every=50, window=20)
    for batch in rewind.batches(range(90)):
        again, high = batch in seen, batch in (80, 81, 82)
        seen.append(batch)
        rewind.observe(100.0 if high or (again and batch in (55, 56, 57)) else wavy(90)[batch])
    assert [one.skipped for one in rewind.rewinds] == [(79, 80, 81, 82), (54, 55, 56, 57)]


def test_too_many_rewinds_then_going_on():
    rewind, *_ = linear(every=3, max_rewinds=1)
    seen = []
    for batch in rewind.batches(range(24)):
        seen.append(batch)
        try:
            rewind.observe(NAN if batch in (10, 20) else 1.0)
        except TooManyRewinds:
            assert batch == 20
    assert seen == [*range(11), *range(seen[11], 9), *range(11, 21), *range(seen[-5], 19), 21, 22, 23]
    assert [one.skipped for one in rewind.rewinds] == [(9, 10), (19, 20)]


def test_a_device_that_is_read_late_loses_nothing(monkeypatch):
    """The last loss of an epoch is read at its end, and a checkpoint judges nothing."""
    late = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(_spikes.Reading, "on_host", late, raising=False)
    rewind, *_ = linear(every=4)
    seen = []
    for batch in rewind.batches(range(12)):
        seen.append(batch)
        rewind.observe(NAN if batch == 11 else 1.0)
        rewind.state_dict()
    assert seen == [*range(12), 8, 9]
    assert [one.skipped for one in rewind.rewinds] == [(10, 11)]


# --- loops ----------------------------------------------------------------------------------------------------------


def test_a_loop_left_among_the_batches_that_come_again_goes_on_with_them():
    rewind, *_ = linear(every=5)
    seen = []
    for batch in rewind.batches(range(20)):
        if len(seen) == 15:
            break  # before it trains on the batch
        seen.append(batch)
        rewind.observe(NAN if batch == 13 else 1.0)
    assert (batch, seen[-1]) == (11, 10)
    for batch in rewind.batches(range(100, 103)):
        seen.append(batch)
        rewind.observe(1.0)
    assert seen == [*range(14), 10, 11, 100, 101, 102]


def test_a_batch_that_was_given_and_not_observed_is_in_doubt():
    rewind, *_ = linear(every=50)
    for batch in rewind.batches(range(20)):
        if batch == 5:
            break
        rewind.observe(1.0)
    rewind.state_dict()  # no step has begun
    (done,) = [
        one for batch in rewind.batches(range(100, 105)) if (one := rewind.observe(NAN if batch == 103 else 1.0))
    ]
    assert (done.skipped, done.exact) == ((7, 8), False)


def test_two_loops_at_once_are_refused():
    rewind, *_ = linear()
    with pytest.raises(ArgumentValueError, match="another call has taken over"):
        list(zip(rewind.batches(range(3)), rewind.batches(range(3)), strict=True))


def test_a_loop_that_writes_into_its_batches_is_not_exact():
    rewind, *_ = linear(every=50)
    batches = [torch.ones(3) for _ in range(9)]
    done = []
    for number, batch in enumerate(rewind.batches(batches)):
        batch.mul_(2)
        done.append(rewind.observe(NAN if number == 6 else 1.0))
    assert done[6].exact is False


def test_steps_that_come_again_with_other_batches_are_said():
    """Five batches in twos, counted from the start of each epoch: the last one joins the first step of the next."""
    rewind, *_ = linear(every=50)

    def epoch(*batches):
        for number, batch in enumerate(rewind.batches(batches)):
            if number % 2:
                rewind.observe(NAN if batch == 16 else 1.0)

    epoch(0, 1, 2, 3, 4)
    rewind.state_dict()  # at the end of an epoch, with a batch left over
    with pytest.warns(GradgateWarning, match="step 2 has other batches than the first time"):
        epoch(11, 12, 13, 14, 15, 16, 17, 18)


@pytest.mark.parametrize("first", range(1, 20, 3))
def test_an_interrupt_inside_a_rewind_leaves_no_half(first, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    rewind = gg.Rewind(model, optimizer, every=50)
    start, count, written = copy.deepcopy(model.state_dict()), itertools.count(1), _snapshots._written

    def interrupted(*args):
        if next(count) == first:
            raise KeyboardInterrupt
        return written(*args)

    monkeypatch.setattr(_snapshots, "_written", interrupted)
    reached = 0
    try:
        steps(model, optimizer, numbered(9), rewind=rewind, spike=8)
    except KeyboardInterrupt:
        reached = 1
        assert_same(model.state_dict(), start)
        assert not optimizer.state
        assert (rewind._steps, len(rewind._again)) == ([], 7)
    assert reached or first > 11


def test_a_ledger_that_fails_leaves_the_training_at_the_snapshot():
    rewind, *_ = linear(every=50, ids=lambda batch: [1 / (batch - 9)])
    seen = []
    for batch in rewind.batches(range(12)):
        seen.append(batch)
        try:
            rewind.observe(NAN if batch == 9 else 1.0)
        except ZeroDivisionError:
            assert not rewind._steps
    assert seen == [*range(10), *range(8), 10, 11]


def test_ids_that_a_batch_has_not_are_said_at_the_first_batch():
    rewind, *_ = linear(ids="name")
    with pytest.raises(KeyError, match="name"):
        next(rewind.batches([{"x": 1}]))


# --- epochs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spike", [12, 13, 14])
def test_a_scheduler_that_is_stepped_between_epochs(spike):
    def run(epochs, rewinding):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rewind = gg.Rewind(model, optimizer, scheduler, every=50) if rewinding else None
        done = []
        for batches in epochs:
            done += steps(model, optimizer, batches, rewind=rewind, spike=spike)
            scheduler.step()
        return done, copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])

    batches = numbered(24)
    (done,), found = run([batches[:12], batches[12:18], batches[18:]], True)
    rest = [[b for b in part if b[0] not in done.skipped] for part in (batches[:12], batches[12:18], batches[18:])]
    assert_same(found, run(rest, False)[1])
    assert done.exact is (spike > 12)


@pytest.mark.parametrize("what", ["weights", "random"])
def test_what_happens_to_weights_and_chance_between_epochs_is_not_exact(what):
    rewind, model, _ = linear(every=50)
    for _ in rewind.batches(range(5)):
        rewind.observe(1.0)
    if what == "weights":
        with torch.no_grad():
            model.weight.add_(1)
    else:
        torch.rand(1)
    done = [one for batch in rewind.batches(range(9)) if (one := rewind.observe(NAN if batch == 7 else 1.0))]
    assert [one.exact for one in done] == [False]


def test_a_loader_that_draws_is_not_exact_but_only_beyond_its_draws():
    rewind, *_ = linear(every=2)
    drawing = (step for step in range(30) if step != 3 or torch.rand(1) is not None)
    done = [one for batch in rewind.batches(drawing) if (one := rewind.observe(NAN if batch in (4, 20) else 1.0))]
    assert [one.exact for one in done] == [False, True]


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_loader_that_draws_from_python_or_numpy_for_each_batch_is_not_exact(draw):
    rewind, *_ = linear(every=2)
    drawing = (step for step in range(9) if draw() is not None)
    done = [one for batch in rewind.batches(drawing) if (one := rewind.observe(NAN if batch == 4 else 1.0))]
    assert [one.exact for one in done] == [False]


def test_limit_a_single_draw_from_python_may_be_missed():
    rewind, *_ = linear(every=2)
    drawing = (step for step in range(9) if step != 3 or random.random() is not None)
    done = [one for batch in rewind.batches(drawing) if (one := rewind.observe(NAN if batch == 4 else 1.0))]
    assert [one.exact for one in done] == [True]


def test_limit_gradients_that_are_never_zeroed_are_not_put_back():
    rewind, model, optimizer = linear(every=2)
    gradients = []
    for number in rewind.batches(range(6)):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        rewind.observe(NAN if number == 5 else 1.0)
        gradients.append(model.weight.grad.item())
    assert gradients == [1, 2, 3, 4, 5, 6]  # the snapshot of step 4 had 4


# --- checkpoints ----------------------------------------------------------------------------------------------------


def resumed(rewind, **options):
    """A new Rewind from a checkpoint that went through a file, as torch loads it."""
    file = io.BytesIO()
    torch.save(rewind.state_dict(), file)
    file.seek(0)
    other, *_ = linear(**options)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def test_a_checkpoint_at_the_end_of_an_epoch_begins_the_next():
    for loader_of in (list, Stateful):
        loader = loader_of(range(6))
        rewind, *_ = linear(every=4)
        for _ in rewind.batches(loader):
            rewind.observe(1.0)
        other = resumed(rewind, every=4)
        fresh = loader_of(range(6))
        seen = [batch for batch in other.batches(fresh) if other.observe(1.0) is None]
        assert seen == list(range(6))


@pytest.mark.parametrize("loader_of", [list, Stateful])
def test_batches_of_an_earlier_epoch_are_not_those_of_this_one(loader_of):
    rewind, *_ = linear(every=50)
    for _ in rewind.batches(loader_of(range(6))):
        rewind.observe(1.0)
    for batch in rewind.batches(loader_of(range(100, 106))):
        rewind.observe(1.0)
        if batch == 103:
            other = resumed(rewind, every=50)
            break
    seen, done = [], []
    for batch in other.batches(loader_of(range(100, 106))):
        seen.append(batch)
        done.append(other.observe(NAN if batch == 104 else 1.0))
    assert done[0].exact is False
    assert seen in ([104, 100, 101, 102, 105], [104, 105])  # a loader with a state is not set back over an epoch


@pytest.mark.parametrize("stop", [1, 3, 40, 41, 44, 47, 50])
def test_a_checkpoint_among_batches_that_come_again_and_snapshots_among_them(stop):
    """A snapshot is taken while the loader is ahead; its state is that of a time before them all."""
    whole, other = [], None
    for interrupted in (False, True):
        rewind, *_ = linear(every=30)
        seen, made = [], 0
        loader = Stateful(range(60))
        running = rewind.batches(loader)
        while True:
            batch = next(running, None)
            if batch is None:
                break
            seen.append(batch)
            rewind.observe(NAN if batch in (2, 39) and seen.count(batch) == 1 else 1.0)
            made += 1
            if made == 41:
                rewind.every = 3
            if interrupted and made == stop:
                every = rewind.every
                rewind = resumed(rewind, every=every)
                running = rewind.batches(Stateful(range(60)))
        whole.append(seen)
        other = rewind
    assert whole[0] == whole[1]
    assert len(other.rewinds) == 2


def test_a_resume_leaves_the_random_state_alone_and_says_if_batches_are_others():
    rewind, *_ = linear(every=50)
    data = torch.utils.data.TensorDataset(torch.arange(20))

    def loader():
        return torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)

    for number, _ in enumerate(rewind.batches(loader())):
        rewind.observe(1.0)
        if number == 4:
            break
    other = resumed(rewind, every=50)
    before = torch.get_rng_state()
    with pytest.warns(GradgateWarning, match="does not give again what it gave before the resume"):
        next(other.batches(loader()))
    assert torch.equal(before, torch.get_rng_state())


def test_a_deep_copy_trains_on_by_itself():
    rewind, model, _ = linear(every=30)
    for _ in rewind.batches(range(2)):
        rewind.observe(1.0)
    other_model, other = copy.deepcopy((model, rewind))
    with torch.no_grad():
        other_model.weight.add_(1)
    for batch in other.batches([2, NAN]):
        other.observe(batch)
    assert torch.equal(other_model.weight, model.weight)
    assert (len(other.rewinds), len(rewind.rewinds)) == (1, 0)


# --- the rest of gradgate -------------------------------------------------------------------------------------------


def test_frozen_and_pinned_stay_and_a_guard_counts_each_step_once(tmp_path):
    def run(stream, rewinding):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        gg.freeze(model, "1.*")
        gg.pin(model[0].weight, rows=[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        guard = gg.Guard(model, ledger=tmp_path / f"{rewinding}.ledger")
        rewind = gg.Rewind(model, optimizer, guard, every=4, ledger=tmp_path / "rewind.ledger") if rewinding else None
        for number, x in rewind.batches(stream) if rewind else stream:
            optimizer.zero_grad()
            loss = guard.backward(x, lambda x: model(x).square().mean(1)).loss
            optimizer.step()
            if rewind:
                rewind.observe(NAN if number == 11 else loss)
        return copy.deepcopy([model.state_dict(), optimizer.state_dict(), guard.state_dict()])

    batches = numbered(16)
    batches[9][1][2] = NAN
    found, wanted = run(batches, True), run([b for b in batches if b[0] not in (10, 11)], False)
    assert_same(found[:2], wanted[:2])
    assert_same(found[2], wanted[2])
