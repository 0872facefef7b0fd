"""Two ranks in DistributedDataParallel: something happens on one of them, and both do the same."""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.errors import OtherRankError
from tests.guard.rank_nets import (
    CODE,
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
)  # fmt: skip
from tests.guard.ranks import same_everywhere


def healthy_steps_are_those_of_ddp_bit_by_bit(rank):
    ours, theirs = replica(), replica()
    guard = gg.Guard(ours)
    for turn in range(3):
        batches = data([4, 4], seed=turn)
        ours.zero_grad()
        theirs.zero_grad()
        result = guard.backward(batches[rank], loss_of(ours))
        loss_of(theirs)(batches[rank]).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        assert result.kept == [0, 1, 2, 3]
        assert result.exact
        torch.testing.assert_close(result.loss, check_union(ours.module, torch.cat(batches)))


def unequal_counts_weigh_as_they_should(rank):
    for sizes in ([5, 1], [2, 7], [3, 3]):
        model = replica()
        guard = gg.Guard(model)
        for turn in range(3):
            batches = data([size + turn for size in sizes], seed=turn)
            model.zero_grad()
            result = guard.backward(batches[rank], loss_of(model))
            torch.testing.assert_close(result.loss, check_union(model.module, torch.cat(batches)))


def a_fault_on_one_rank(rank):
    for fault in (RAISES, NAN, GRADIENT, IN_BACKWARD):
        for guilty in (0, 1):
            model = replica()
            guard = gg.Guard(model)
            guard.backward(data([4, 5])[rank], loss_of(model))
            model.zero_grad()
            batches = marked(data([4, 5], seed=3), **{f"rank_{guilty}": {2: fault}})
            result = guard.backward(
                batches[rank], loss_of(model), ids=[f"{rank}-{row}" for row in range(len(batches[rank]))]
            )
            torch.testing.assert_close(result.loss, check_union(model.module, good(batches)))
            assert [(one.sample_id, one.rank, one.world_size) for one in result.dropped] == (
                [(f"{guilty}-2", guilty, 2)] if rank == guilty else []
            )
            assert len(result.kept) == len(batches[rank]) - (rank == guilty)
            summary = guard.summary()
            assert (summary.steps, summary.samples, summary.dropped, summary.bad_steps) == (2, 18, 1, 1)


def faults_on_both_ranks_at_once(rank):
    model = replica()
    guard = gg.Guard(model)
    batches = marked(data([6, 6]), rank_0={1: NAN, 5: RAISES}, rank_1={0: GRADIENT, 2: IN_BACKWARD})
    result = guard.backward(batches[rank], loss_of(model))
    assert result.kept == [[0, 2, 3, 4], [1, 3, 4, 5]][rank]
    check_union(model.module, good(batches))


def a_rank_without_a_good_sample_takes_part_with_nothing(rank):
    for fault in (RAISES, NAN, GRADIENT):
        model = replica()
        guard = gg.Guard(model)
        batches = marked(data([4, 4]), rank_1=dict.fromkeys(range(4), fault))
        result = guard.backward(batches[rank], loss_of(model))
        assert result.kept == [[0, 1, 2, 3], []][rank]
        torch.testing.assert_close(result.loss.double(), check_union(model.module, good(batches)), atol=1e-6, rtol=1e-6)
        assert guard.summary().dropped == 4


def a_fault_of_every_sample_is_the_codes(rank):
    model = replica()
    guard = gg.Guard(model)
    guard.backward(data([4, 4])[rank], loss_of(model))
    before = [p.grad.clone() for p in model.parameters()]
    batches = marked(data([4, 4]), rank_0=dict.fromkeys(range(4), RAISES), rank_1=dict.fromkeys(range(4), RAISES))
    error = raised_by(lambda: guard.backward(batches[rank], loss_of(model)))
    assert type(error) is ValueError
    assert "on every rank, every sample that was tried fails" in str(error.__cause__)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    assert guard.summary().dropped == 0
    empty = raised_by(lambda: guard.backward(batches[0] if rank == 0 else batches[1][:0], loss_of(model)))
    assert type(empty) is (ValueError if rank == 0 else OtherRankError)
    model.zero_grad()
    guard.backward(data([4, 4])[rank], loss_of(model))
    check_union(model.module, torch.cat(data([4, 4])))


def max_bad_is_of_all_ranks_together(rank):
    model = replica()
    sink = Kept()
    guard = gg.Guard(model, max_bad=0.3, sink=sink)
    batches = marked(data([4, 8]), rank_0={0: RAISES, 1: NAN, 2: NAN})
    guard.backward(batches[rank], loss_of(model))  # three of four here, but three of twelve in all
    check_union(model.module, good(batches))
    before = [p.grad.clone() for p in model.parameters()]
    batches = marked(data([4, 8]), rank_0={0: RAISES}, rank_1={1: NAN, 5: NAN, 7: GRADIENT})
    error = raised_by(lambda: guard.backward(batches[rank], loss_of(model)))
    assert type(error) is gg.TooManyBadSamples
    assert [(one.rank, one.row) for one in error.incidents] == [(0, 0), (1, 1), (1, 5), (1, 7)]
    assert str(error).startswith("Guard: 4 of 12 samples are bad:\nrank  row  sample")
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    refused = [one.details.get("refused", False) for one in sink.incidents]
    assert refused == ([False] * 3 + [True] * 4 if rank == 0 else [])


def patience_counts_bad_steps_of_any_rank(rank):
    model = replica()
    guard = gg.Guard(model, patience=3)
    for guilty in (0, 1):
        guard.backward(marked(data([4, 4]), **{f"rank_{guilty}": {0: NAN}})[rank], loss_of(model))
    error = raised_by(lambda: guard.backward(marked(data([4, 4]), rank_0={3: NAN})[rank], loss_of(model)))
    assert type(error) is gg.TooManyBadSamples
    assert "3 steps in a row had bad samples" in str(error)
    assert [(one.rank, one.row) for one in error.incidents] == [(0, 3)]


def what_one_rank_raises_reaches_the_other(rank):
    """Each time all ranks raise, nothing has changed, and the next step works."""

    def loss_fn(x):
        return "no tensor" if trouble == "loss" and rank == 1 else loss_of(model)(x)

    for trouble, kind, text in (
        ("interrupt", KeyboardInterrupt, "KeyboardInterrupt"),
        ("loss", gg.errors.ArgumentTypeError, "`loss_fn` returned"),
        ("ids", gg.errors.ArgumentValueError, "`ids` has 2 entries"),
        ("uncaught", ValueError, "a row is out of range"),
    ):
        model = replica()
        guard = gg.Guard(model, catch=(ArithmeticError,))
        guard.backward(data([4, 4])[rank], loss_of(model))
        before = [p.grad.clone() for p in model.parameters()]
        mark = {"interrupt": CODE, "uncaught": RAISES}.get(trouble, 0.0)
        batch = marked(data([4, 4]), rank_1={2: mark})[rank]
        ids = "ab" if trouble == "ids" and rank == 1 else None
        error = raised_by(lambda: guard.backward(batch, loss_fn, ids=ids))  # noqa: B023
        assert type(error) is (OtherRankError if rank == 0 else kind), error
        if rank == 0:
            assert "rank 1 of 2 raised" in str(error)
            assert text in str(error)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
        model.zero_grad()
        guard.backward(data([4, 4])[rank], loss_of(model))
        check_union(model.module, torch.cat(data([4, 4])))


def gradients_accumulate_with_and_without_no_sync(rank):
    """Under no_sync the gradient is the sum over micro-batches of each one's mean over all ranks."""
    for local in (True, False):
        model = replica()
        guard = gg.Guard(model)
        guard.backward(data([4, 4])[rank], loss_of(model))
        model.zero_grad()
        windows = [
            marked(data([4, 2], seed=5), rank_0={1: NAN}),
            marked(data([5, 4], seed=6), rank_1=dict.fromkeys(range(4), RAISES)),
            marked(data([5, 4], seed=7), rank_1={0: GRADIENT}),
        ]
        for number, batches in enumerate(windows):
            with model.no_sync() if local and number < 2 else contextlib.nullcontext():
                guard.backward(batches[rank], loss_of(model))
        oracle = network()
        for batches in windows:
            loss_of(oracle)(good(batches)).backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        same_everywhere(*(p.grad for p in model.parameters()))


def a_step_that_is_not_made_leaves_what_was_accumulated(rank):
    model = replica()
    guard = gg.Guard(model, max_bad=0.1)
    with model.no_sync():
        guard.backward(data([4, 2])[rank], loss_of(model))
    before = [p.grad.clone() for p in model.parameters()]
    batch = marked(data([4, 4]), rank_0={0: NAN})[rank]
    assert type(raised_by(lambda: guard.backward(batch, loss_of(model)))) is gg.TooManyBadSamples
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def the_same_with_plain_steps_of_ddp_around(rank):
    """A forward that nobody walks back from leaves DDP waiting; a plain step before and after works as ever."""
    model = replica()
    guard = gg.Guard(model)
    plain = DistributedDataParallel(network())
    batches = marked(data([4, 4]), rank_1={1: GRADIENT})
    for turn in range(3):
        loss_of(model)(data([4, 4], seed=turn)[rank])
        model.zero_grad()
        guard.backward(batches[rank], loss_of(model))
        check_union(model.module, good(batches))
        for one in (model, plain):
            one.zero_grad()
            loss_of(one)(data([4, 4], seed=turn)[rank]).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def gradients_that_somebody_keeps_are_not_written_again(rank):
    """They lie in the buffers that were sent, which are used again only if nobody has them."""
    ways = [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)[1:], lambda g: g.numpy()]
    model = replica()
    guard = gg.Guard(model)
    kept, copies = [], []
    for turn in range(2 * len(ways)):
        batches = marked(data([4, 4], seed=turn), rank_1={2: GRADIENT} if turn % 3 == 1 else {})
        model.zero_grad()
        guard.backward(batches[rank], loss_of(model))
        check_union(model.module, good(batches))
        parameter = list(model.parameters())[turn % 3]
        kept.append(ways[turn % len(ways)](parameter.grad))
        copies.append(torch.as_tensor(kept[-1]).clone())
    assert all(torch.equal(torch.as_tensor(one), copy) for one, copy in zip(kept, copies, strict=True))


def buffers_that_nobody_has_any_more_are_used_again(rank):
    model = replica()
    guard = gg.Guard(model)
    used = []
    for turn in range(8):
        model.zero_grad()
        guard.backward(data([4, 4], seed=turn)[rank], loss_of(model))
        used.append(guard._agreement._buckets._buckets[0].buffer)
    assert len(set(map(id, used))) < len(used) / 2  # one, unless the backend lets go of it late


def gradients_set_to_zero_in_place(rank):
    """The old way of `zero_grad` leaves the gradients where they are; so does the idiom of its time."""
    model, plain = replica(), replica()
    guard = gg.Guard(model)
    for turn in range(4):
        for parameter in (*model.parameters(), *plain.parameters()):
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        guard.backward(data([4, 4], seed=turn)[rank], loss_of(model))
        loss_of(plain)(data([4, 4], seed=turn)[rank]).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.incidents, self.payloads = [], {}

    def record_many(self, incidents, payloads=None):
        self.incidents += incidents
        self.payloads |= payloads or {}


STORIES = [
    healthy_steps_are_those_of_ddp_bit_by_bit,
    unequal_counts_weigh_as_they_should,
    a_fault_on_one_rank,
    faults_on_both_ranks_at_once,
    a_rank_without_a_good_sample_takes_part_with_nothing,
    a_fault_of_every_sample_is_the_codes,
    max_bad_is_of_all_ranks_together,
    patience_counts_bad_steps_of_any_rank,
    what_one_rank_raises_reaches_the_other,
    gradients_accumulate_with_and_without_no_sync,
    a_step_that_is_not_made_leaves_what_was_accumulated,
    the_same_with_plain_steps_of_ddp_around,
    gradients_that_somebody_keeps_are_not_written_again,
    buffers_that_nobody_has_any_more_are_used_again,
    gradients_set_to_zero_in_place,
]
