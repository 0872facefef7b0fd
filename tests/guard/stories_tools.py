"""`watch`, the doctor, `freeze` and `trainable` on models that ranks share: the same answer on every rank."""

import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.errors import BadStepError, BadStepWarning
from tests.guard.rank_nets import raised_by, shared_folder, whole
from tests.guard.ranks import same_everywhere


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def shard(model):
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": shard}


def every_answer(value):
    """Return what every rank has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def spoil_one_shard(model):
    """Make one element of a gradient NaN: with FSDP2 it lies on one rank only."""
    gradient = next(model.parameters()).grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if dist.get_rank() == 0 or local is gradient:
        local[0, 0] = float("nan")


def all_ranks_of_a_watch_agree(rank):
    """A NaN in the shard of one rank: all raise, or all skip, and the weights stay the same on every rank."""
    for kind, wrap in WRAPPERS.items():
        for on_bad in ("raise", "warn", "skip"):
            model = wrap(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            seen = []
            with gg.watch(model, optimizer, on_bad=on_bad) as watch, recorded_warnings() as warned:
                for turn in range(3):
                    optimizer.zero_grad()
                    model(torch.ones(3, 4) * (rank + 1)).square().mean().backward()
                    if turn == 1:
                        before = [whole(p.detach()).clone() for p in model.parameters()]
                        spoil_one_shard(model)
                    error = raised_by(optimizer.step)
                    seen.append(type(error))
                    if turn == 1 and on_bad != "warn":
                        now = [whole(p.detach()) for p in model.parameters()]
                        assert all(map(torch.equal, now, before)), (kind, on_bad)
                    if error is not None:
                        assert "the gradient of " in str(error)
                        assert "0.weight is not finite; " in str(error)
            assert watch.bad_steps >= 1
            assert len(set(every_answer(watch.bad_steps))) == 1
            assert seen[1] is (BadStepError if on_bad == "raise" else type(None)), (kind, on_bad, seen)
            count = sum(issubclass(one.category, BadStepWarning) for one in warned)
            assert (count > 0) == (on_bad != "raise" and rank == 0), (kind, on_bad, count)  # the first rank prints
            if on_bad == "skip":
                same_everywhere(*(whole(p) for p in model.parameters()))


@contextmanager
def recorded_warnings():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def a_bad_step_of_shards_is_replayed_on_all_ranks(rank):
    """`watch.step` runs the step again under the tracer, with its collectives, on every rank."""
    for wrap in WRAPPERS.values():
        model = wrap(net())
        x = torch.ones(3, 4)
        if rank == 1:
            x[1] = float("nan")

        def step(model=model, x=x):
            model(x).square().mean().backward()

        with gg.watch(model) as watch:
            error = raised_by(lambda watch=watch, step=step: watch.step(step))
        assert type(error) is BadStepError, "".join(traceback.format_exception(error))
        severities = [finding.severity for finding in error.diagnosis.findings]
        assert severities
        assert {answer[0] for answer in every_answer(severities)} == {"error"}


SCRIPT = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
model = {wrap}(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    {zero}
    model(torch.ones(3, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def the_doctor_finds_the_same_on_every_rank(rank):
    folder = Path(shared_folder(rank))
    for wrap in ("fully_shard", "DistributedDataParallel"):
        for zero, codes in (("optimizer.zero_grad()", []), ("pass", ["warning"])):
            path = folder / f"{wrap}_{len(codes)}_{rank}.py"
            path.write_text(SCRIPT.format(wrap=wrap, zero=zero))
            report = gg.doctor.examine_script(path)
            assert (report.exit_code, report.steps) == (0, 4), report
            answers = every_answer([(one.code, one.severity) for one in report.diagnosis.findings])
            assert all(answer == answers[0] for answer in answers), answers
            assert bool(answers[0]) == bool(codes), (wrap, answers)
            sys.modules.pop(path.stem, None)


def frozen_layers_stay_while_the_guard_drops_samples(rank):
    """`freeze` and `trainable` on both wrappers, with a NaN row on one rank: the rest learns as in one process."""
    for wrap in WRAPPERS.values():
        model, oracle = wrap(net()), net()
        for each in (model, oracle):
            gg.freeze(each, "0.*")
        start = whole(next(model.parameters()).detach()).clone()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05, weight_decay=0.1) for each in (model, oracle)]
        tables = [gg.trainable(each, optimizer) for each, optimizer in zip((model, oracle), optimizers, strict=True)]
        assert [(row["state"], row["learning"]) for row in tables[0].values()] == [
            (row["state"], row["learning"]) for row in tables[1].values()
        ]
        assert (tables[0].totals.learning, tables[0].totals.frozen) == (18, 40)  # of whole parameters, on every rank
        guard = gg.Guard(model)
        for turn in range(3):
            rows = torch.randn(dist.get_world_size(), 5, 4, generator=torch.Generator().manual_seed(turn))
            rows[1, turn] = float("nan")
            for optimizer in optimizers:
                optimizer.zero_grad()
            result = guard.backward(rows[rank], lambda x, model=model: model(x).square().mean())
            assert [one.row for one in result.dropped] == [turn] * (rank == 1)
            union = rows.flatten(0, 1)
            oracle(union[~union.isnan().any(1)]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.detach()), theirs.detach())
        assert torch.equal(whole(next(model.parameters()).detach()), start)


STORIES = [
    all_ranks_of_a_watch_agree,
    a_bad_step_of_shards_is_replayed_on_all_ranks,
    the_doctor_finds_the_same_on_every_rank,
    frozen_layers_stay_while_the_guard_drops_samples,
]
