"""Cases that nobody designed for, on two ranks with replicas and with shards, against one process."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.errors import GradgateError, GradgateWarning, OtherRankError
from tests.guard.rank_nets import (
    GRADIENT,
    IN_BACKWARD,
    NAN,
    RAISES,
    check_union,
    data,
    good,
    loss_of,
    marked,
    network,
    raised_by,
    replica,
    whole,
)


def shards():
    model = network()
    fully_shard(model.front)
    return fully_shard(model)


KINDS = {"replicas": replica, "shards": shards}


def inner(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_step(rank, model, guard, batches, oracle=None, loss_fn=None):
    """Make a step, and compare it with one process on the rows without a mark."""
    model.zero_grad()
    result = guard.backward(batches[rank], loss_fn or loss_of(model))
    assert result.kept == [row for row, line in enumerate(batches[rank]) if line[0] == 0]
    check_union(inner(model), good(batches), oracle=oracle)
    return result


def first_steps_that_are_odd(rank):
    """The first step of all: a rank without samples, a rank of which all are bad, different faults on both ranks."""
    for make in KINDS.values():
        for batches in (
            data([0, 5]),
            data([5, 0]),
            marked(data([4, 3]), rank_1=dict.fromkeys(range(3), NAN)),
            marked(data([4, 3]), rank_0=dict.fromkeys(range(4), RAISES)),
            marked(data([5, 5]), rank_0={1: IN_BACKWARD}, rank_1={2: NAN}),
            marked(data([5, 5]), rank_0={0: GRADIENT}, rank_1={4: IN_BACKWARD}),
        ):
            model = make()
            guard = gg.Guard(model, max_bad=1)
            check_step(rank, model, guard, batches)
            check_step(rank, model, guard, data([3, 2], seed=1))


def a_rank_without_a_batch_beside_a_bad_one(rank):
    """None is a batch of no samples, also in the step in which the other rank searches, and in many in a row."""
    for make in KINDS.values():
        model = make()
        guard = gg.Guard(model)
        for turn in range(3):
            batches = marked(data([0, 6], seed=turn), rank_1={turn: (RAISES, GRADIENT, IN_BACKWARD)[turn]})
            model.zero_grad()
            result = guard.backward(batches[1] if rank else None, loss_of(model))
            assert len(result.dropped) == rank
            check_union(inner(model), good(batches))


def hooks_of_the_user_that_raise(rank):
    """A forward hook and a backward hook that refuse a row: they count as faults of the row."""
    for make in KINDS.values():
        for way in ("forward", "backward"):
            model = make()

            def refuse(module, args, output, way=way):
                if way == "forward" and bool((args[0].abs() > 50).any()):
                    raise LookupError("a hook does not like it")

            def refuse_gradient(module, grad_input, grad_output, way=way):
                if way == "backward" and bool((grad_output[0].abs() > 50).any()):
                    raise LookupError("a hook does not like it")

            inner(model).back.register_forward_hook(refuse)
            inner(model).back.register_full_backward_hook(refuse_gradient)
            guard = gg.Guard(model)
            batches = data([4, 4])

            def loss_fn(x, model=model, way=way):
                hidden = model(x) if way == "backward" else model(torch.where(x[:, :1] == 9, 0 * x, x))
                if way == "forward" and bool((x[:, 0] == 9).any()):
                    inner(model).back(torch.full((1, 5), 99.0, dtype=torch.float64))
                return (hidden * torch.where(x[:, :1] == 9, 1e6, 1.0)).square().mean()

            batches[1][2, 0] = 9
            for _ in range(2):
                model.zero_grad()
                result = guard.backward(batches[rank], loss_fn)
                assert [one.row for one in result.dropped] == [2] * rank
                assert all(one.exception_type == "LookupError" for one in result.dropped)
                check_union(inner(model), good(batches))


def a_guard_inside_its_own_step(rank):
    """Refused on every rank, with nothing changed; the next step works."""
    for make in KINDS.values():
        model = make()
        guard = gg.Guard(model)
        batches = data([4, 4])

        def nested(x, model=model, guard=guard):
            guard.backward(x, loss_of(model))
            return loss_of(model)(x)

        error = raised_by(lambda guard=guard, nested=nested: guard.backward(data([4, 4])[rank], nested))
        assert isinstance(error, GradgateError)
        assert "a guard was used inside one of its own steps" in str(error)
        assert all(p.grad is None for p in model.parameters())
        check_step(rank, model, guard, batches)


class Tied(nn.Module):
    """An embedding whose weight is the head's, and two layers between them."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        if bool((x == 6).any()):
            raise ValueError("no such token")
        return self.head(self.middle(self.embed(x)).tanh())


def weights_that_are_tied(rank):
    """One parameter in two modules of a unit, besides a unit of its own between them."""
    for kind in KINDS:
        torch.manual_seed(0)
        model = Tied().double()  # FSDP2 of torch 2.8 has the mean of gradients in double precision only
        if kind == "shards":
            fully_shard(model.middle)
            model = fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        torch.manual_seed(0)
        oracle = Tied().double()
        guard = gg.Guard(model)
        for turn in range(3):
            tokens = torch.randint(0, 6, (2, 5, 3), generator=torch.Generator().manual_seed(turn))
            if turn:
                tokens[turn - 1, 2, 1] = 6
            model.zero_grad()
            oracle.zero_grad()
            result = guard.backward(tokens[rank], lambda x, model=model: model(x).square().mean())
            assert len(result.dropped) == (turn == rank + 1)
            union = tokens.flatten(0, 1)
            oracle(union[(union != 6).all(1)]).square().mean().backward()
            for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad)


def two_guards_of_one_model(rank):
    """Two guards take turns on one model, as with two losses; each knows the order of collectives for itself."""
    for make in KINDS.values():
        model = make()
        guards = [gg.Guard(model), gg.Guard(model)]
        for turn in range(4):
            batches = marked(data([4, 4], seed=turn), **{f"rank_{turn % 2}": {turn: RAISES if turn > 1 else NAN}})
            check_step(rank, model, guards[turn % 2], batches)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def an_exception_that_cannot_be_sent(rank):
    """Its text raises and it cannot be pickled: as a sample's fault, and as one that no sample is blamed for."""
    for make in KINDS.values():
        for catch in ((Exception,), (ValueError,)):
            model = make()
            guard = gg.Guard(model, catch=catch)
            batches = data([4, 4])

            def loss_fn(x, model=model):
                if bool((x[:, 0] == 9).any()):
                    raise Unspeakable
                return loss_of(model)(x)

            check_step(rank, model, guard, batches)
            batches[1][1, 0] = 9
            if catch == (Exception,):
                check_step(rank, model, guard, batches, loss_fn=loss_fn)
            else:
                error = raised_by(lambda batch=batches[rank]: guard.backward(batch, loss_fn))  # noqa: B023
                assert type(error) is (Unspeakable if rank else OtherRankError)
                check_step(rank, model, guard, data([4, 4]))


def a_rank_whose_recording_is_off(rank):
    """no_grad around the step of one rank: its samples do not count, or the step is refused; never a wrong gradient."""
    for make in KINDS.values():
        model = make()
        guard = gg.Guard(model)
        batches = data([4, 4])
        check_step(rank, model, guard, batches)
        model.zero_grad()
        with torch.set_grad_enabled(rank == 0):
            error = raised_by(lambda batch=batches[rank]: guard.backward(batch, loss_of(model)))  # noqa: B023
        if error is None:
            check_union(inner(model), batches[0])
        answers = [None, None]
        dist.all_gather_object(answers, error is None)
        assert len(set(answers)) == 1
        check_step(rank, model, guard, batches)


def accumulation_with_a_fault_in_every_micro_batch(rank):
    """accumulate=2 without sync and with it, a fault on another rank in each."""
    for kind, make in KINDS.items():
        model, oracle = make(), network()
        guard = gg.Guard(model)
        for turn in range(2):
            batches = marked(data([4, 4], seed=turn), **{f"rank_{turn}": {turn: (GRADIENT, RAISES)[turn]}})
            if kind == "shards":
                model.set_requires_gradient_sync(turn == 1)
                guard.backward(batches[rank], loss_of(model), accumulate=2)
            else:
                model.require_backward_grad_sync = turn == 1
                guard.backward(batches[rank], loss_of(model), accumulate=2)
            (loss_of(oracle)(good(batches)) / 2).backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


def gradients_are_those_of_plain_fsdp2_on_every_torch(rank):
    """In single precision torch 2.8 adds them over Gloo and does not divide; the guard does as it does, and says so."""
    found = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 2))
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
        loss_fn = lambda x, model=model: model(x).square().mean()  # noqa: E731
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            gg.Guard(model).backward(x, loss_fn) if guarded else loss_fn(x).backward()
        texts = [str(one.message) for one in seen if issubclass(one.category, GradgateWarning)]
        assert len(texts) == (guarded and torch.__version__ < "2.9")
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    version, torch.__version__ = torch.__version__, "2.8.0"
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            gg.Guard(model)
    finally:
        torch.__version__ = version
    (text,) = [str(one.message) for one in seen]
    assert text.startswith(
        "Guard(): FSDP2 before torch 2.9 adds the gradients of ranks over Gloo and does not divide them"
    )
    assert text.endswith("Fix: pip install 'torch>=2.9'")


STORIES = [
    first_steps_that_are_odd,
    a_rank_without_a_batch_beside_a_bad_one,
    hooks_of_the_user_that_raise,
    a_guard_inside_its_own_step,
    weights_that_are_tied,
    two_guards_of_one_model,
    an_exception_that_cannot_be_sent,
    a_rank_whose_recording_is_off,
    accumulation_with_a_fault_in_every_micro_batch,
    gradients_are_those_of_plain_fsdp2_on_every_torch,
]
