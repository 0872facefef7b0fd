"""FSDP2 and other DTensors over two and three processes: rows and elements are pinned by their global index."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, FailedCheckError, FrozenMovedError
from tests.guard.ranks import ended_well, lived, needs, same_everywhere

pytestmark = pytest.mark.distributed

ROWS = [0, 3, -1]
MASK = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "AdamW, no foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


def network():
    """Five rows in the first layer, two in the second: with three processes shards are uneven, and one is empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def sharded():
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def data(step, rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, optimizer, batch, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).pow(2).sum().backward()
        optimizer.step()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def pinned(model):
    return gg.pin(model[0].weight, rows=ROWS), gg.pin(model[2].weight, frozen=MASK)


def masks():
    rows = torch.zeros(5, 3, dtype=torch.bool)
    rows[ROWS] = True
    return rows, MASK


@needs("2.9", "FSDP2 takes the mean of gradients over Gloo")
def pins_stay_under_any_optimizer(rank):
    """Pinned elements are bit-identical, their gradient is 0, and the others learn as on one process."""
    world = dist.get_world_size()
    for make in OPTIMIZERS.values():
        model, twin = sharded(), network()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda step: data(step, rank))
        twin.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        pins, _ = pinned(model), pinned(twin)
        before = [whole(pin.parameter) for pin in pins]
        optimizer = make(model.parameters())
        train(model, optimizer, lambda step: data(step, rank))
        reference = make(twin.parameters())
        for step in range(3):
            reference.zero_grad()
            total = sum(twin(data(step, other)).pow(2).sum() for other in range(world)) / world
            total.backward()
            reference.step()
        for pin, start, mask in zip(pins, before, masks(), strict=True):
            now, gradient = whole(pin.parameter), whole(pin.parameter.grad)
            assert torch.equal(now[mask], start[mask])
            assert not (now == start)[~mask].any()
            assert (gradient[mask] == 0).all()
            pin.verify()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-4, atol=1e-5)
        same_everywhere(*map(whole, model.parameters()))


def momentum_is_cleared(rank):
    """A warm momentum does not move what is pinned in mid-run, and what the optimizer remembers of it is 0."""
    model = sharded()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, lambda step: data(step, rank))
    pins = pinned(model)
    before = [whole(pin.parameter) for pin in pins]
    train(model, optimizer, lambda step: data(step, rank))
    for pin, start, mask in zip(pins, before, masks(), strict=True):
        assert torch.equal(whole(pin.parameter)[mask], start[mask])
        assert (whole(optimizer.state[pin.parameter]["exp_avg"])[mask] == 0).all()


def pins_are_counted_and_released(rank):
    model = sharded()
    rows, mask = pinned(model)
    more = gg.pin(model[2].weight, frozen=torch.ones(1, 5, dtype=torch.bool))
    assert (repr(rows), repr(mask)) == ("Pin(9 of 15 elements)", "Pin(3 of 10 elements)")
    assert torch.equal(rows.frozen, masks()[0])
    table = gg.trainable(model)
    assert (table["0.weight"]["learning"], table["2.weight"]["learning"]) == (6, 0)
    assert table["2.weight"]["shape"] == (2, 5)
    more.release()
    assert gg.trainable(model)["2.weight"]["learning"] == 7
    rows.release()
    mask.release()
    assert gg.trainable(model).totals.frozen == 0
    before = whole(model[0].weight)
    train(model, OPTIMIZERS["SGD"](model.parameters()), lambda step: data(step, rank))
    assert not (whole(model[0].weight) == before).any()


def a_movement_is_named_by_its_global_index(rank):
    model = sharded()
    rows, mask = pinned(model)
    frozen = gg.freeze(model, "0.bias")
    with torch.no_grad():
        for tensor in (model[0].weight, model[2].weight, model[0].bias):
            tensor.to_local().add_(1)
    wanted = {"row": ("parameter", masks()[0]), "element": ("parameter", MASK), "bias": ("0.bias", None)}
    tensors = {"row": rows.parameter, "element": mask.parameter, "bias": model[0].bias}
    for (kind, (name, region)), handle in zip(wanted.items(), (rows, mask, frozen), strict=True):
        places = torch.arange(tensors[kind].numel()).view(tensors[kind].shape)
        mine = distribute_tensor(places, tensors[kind].device_mesh, [Shard(0)], src_data_rank=None).to_local()
        mine = [int(p) for p in mine.flatten() if region is None or region.flatten()[p]]
        if not mine:
            handle.verify()
            continue
        with pytest.raises(FrozenMovedError) as error:
            handle.verify()
        first = [int(i) for i in torch.unravel_index(torch.tensor(mine[0]), tensors[kind].shape)]
        assert str(error.value).startswith(f"{name}{first} "), (str(error.value), first)
        handle.accept()
        handle.verify()


def checkpoints(rank):
    """A loaded state is kept; the keys of the state dict are the model's own, and one more if that is asked for."""
    model = sharded()
    rows, _ = pinned(model)
    assert list(model.state_dict()) == list(network().state_dict())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, lambda step: data(step, rank))
    model.load_state_dict({name: value * 0 + 2 for name, value in model.state_dict().items()})
    train(model, optimizer, lambda step: data(step, rank))
    assert (whole(model[0].weight)[masks()[0]] == 2).all()
    with pytest.raises(FrozenMovedError):
        (rows.verify() if rank == 0 else _raise())
    rows.accept()
    rows.save_in(model)
    state = model.state_dict()
    assert torch.equal(state["0.weight_frozen"], masks()[0])
    model.load_state_dict(state)
    rows.release()
    gg.pin(model[0].weight, rows=[1])
    with pytest.raises(RuntimeError, match="has 3 pinned elements here and 9 in the checkpoint"):
        model.load_state_dict(state)


def _raise():
    raise FrozenMovedError("the first process has row 0")


def a_mask_in_shards(rank):
    model = sharded()
    mask = distribute_tensor(MASK, model[2].weight.device_mesh, [Shard(0)])
    pin = gg.pin(model[2].weight, frozen=mask)
    assert torch.equal(pin.frozen, MASK)
    before = whole(model[2].weight)
    train(model, OPTIMIZERS["SGD"](model.parameters()), lambda step: data(step, rank))
    assert torch.equal(whole(model[2].weight)[MASK], before[MASK])


def whole_parameters_are_refused(rank):
    """What FSDP2 has gathered for the moment is replaced by shards again."""
    model = sharded()
    model[0].unshard()
    with pytest.raises(ArgumentValueError, match=r"pin\(\): FSDP2 has gathered `parameter`"):
        gg.pin(model[0].weight, rows=[0])
    with pytest.raises(ArgumentValueError, match=r"freeze\(\): FSDP2 has gathered 0\.weight, 0\.bias"):
        gg.freeze(model)
    model[0].reshard()
    gg.freeze(model).thaw()
    gg.pin(model[0].weight, rows=[0]).release()


def frozen_and_thawed(rank):
    model = sharded()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, lambda step: data(step, rank))
    handle = gg.train_only(model, "2.*")
    assert gg.trainable(model, optimizer)["0.weight"]["state"] == "frozen"
    before = [whole(parameter) for parameter in model.parameters()]
    train(model, optimizer, lambda step: data(step, rank))
    handle.verify()
    now = [whole(parameter) for parameter in model.parameters()]
    assert [torch.equal(a, b) for a, b in zip(before, now, strict=True)] == [True, True, False, False]
    handle.thaw()
    train(model, optimizer, lambda step: data(step, rank))
    assert not any(torch.equal(whole(p), old) for p, old in zip(model.parameters(), now, strict=True))


def frozen_for_an_optimizer_that_nobody_knows(rank):
    """One that moves parameters without a gradient: the values of each shard are written back."""

    class Drift(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1.0)

    model = sharded()
    handle, pin = gg.freeze(model, "0.weight"), gg.pin(model[2].weight, frozen=MASK)
    before = whole(model[0].weight), whole(model[2].weight)
    optimizer = Drift(model.parameters(), {})
    train(model, optimizer, lambda step: data(step, rank))
    handle.verify()
    pin.verify()
    assert torch.equal(whole(model[0].weight), before[0])
    assert torch.equal(whole(model[2].weight), torch.where(MASK, before[1], before[1] + 1 + 1 + 1))


def rows_of_a_shard_cannot_learn_alone(rank):
    model = sharded()
    with pytest.raises(ArgumentTypeError, match=r"train_rows\(\): the weight of `module` is sharded"):
        gg.train_rows(model[0], rows=[1])


def rows_are_refused_by_a_later_fully_shard(rank):
    model = network()
    gg.train_rows(model[0], rows=[1])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ArgumentValueError, match=r"train_rows\(\): fully_shard was applied"):
        model(data(0, rank))


def other_placements(rank):
    """Tensor parallelism: columns, or the same tensor everywhere; and a gradient that is distributed otherwise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(20.0).reshape(4, 5)
    for placement in (Shard(0), Shard(1), Replicate()):
        for gradient_placement in (placement, Replicate()):
            weight = nn.Parameter(distribute_tensor(values.clone(), mesh, [placement]))
            pin = gg.pin(weight, rows=[1], frozen=torch.eye(4, 5, dtype=torch.bool))
            optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
            weight.grad = distribute_tensor(torch.ones(4, 5), mesh, [gradient_placement])
            optimizer.step()
            weight.pow(2).sum().backward()
            assert (whole(weight.grad)[pin.frozen] == 0).all()
            optimizer.step()
            assert torch.equal(whole(weight)[pin.frozen], values[pin.frozen])
            assert (whole(weight) != values)[~pin.frozen].all()
            pin.verify()


def replicas_with_pins(rank):
    """DistributedDataParallel: rows and elements stay, on all processes alike."""
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    pins = pinned(model)
    before = [whole(pin.parameter) for pin in pins]
    train(wrapped, OPTIMIZERS["AdamW"](wrapped.parameters()), lambda step: data(step, rank))
    for pin, start, mask in zip(pins, before, masks(), strict=True):
        assert torch.equal(whole(pin.parameter)[mask], start[mask])
        pin.verify()
    same_everywhere(*model.parameters())


def the_largest_gradient_of_all_shards_is_clipped(rank):
    """AdaptiveClip takes the norms of whole gradients, as on one process."""
    for by in ("history", "ratio"):
        model, twin = sharded(), network()
        clips = [gg.AdaptiveClip(each, by, warmup=1) for each in (model, twin)]
        for step in range(4):
            model.zero_grad()
            (model(data(step, rank)).pow(2).sum() * (1000 if step == 3 else 1)).backward()
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                theirs.grad = whole(mine.grad)
            for clip in clips:
                clip()
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(whole(mine.grad), theirs.grad)
        assert clips[0].clipped == clips[1].clipped != {}


def edits_of_shards_are_refused(rank):
    """A write into what an index of a DTensor returns would be lost."""
    model = sharded()
    with pytest.raises(ArgumentTypeError, match=r"`x` is sharded over processes, a float32 tensor of shape \(5, 3\)"):
        gg.at(model)["0.weight"][0, 0].set(7.0)
    with pytest.raises(ArgumentTypeError, match="sharded over processes"):
        gg.at(model[0].weight)[0, 0]
    assert gg.at(model[0].weight.full_tensor())[0, 0].set(7.0)[0, 0] == 7


def checks_of_shards_name_the_rows_on_every_process(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.ones(5, 3)
    gg.check(distribute_tensor(values, mesh, [Shard(0)]), "finite")
    values[4, 1] = float("nan")
    with pytest.raises(FailedCheckError, match=r"1 of 5 rows is not finite: 4\. x\[4, 1\] is nan") as error:
        gg.check(distribute_tensor(values, mesh, [Shard(0)]), "finite")
    assert list(error.value.rows) == [4]


STORIES = [
    pins_stay_under_any_optimizer,
    momentum_is_cleared,
    pins_are_counted_and_released,
    a_movement_is_named_by_its_global_index,
    checkpoints,
    a_mask_in_shards,
    whole_parameters_are_refused,
    frozen_and_thawed,
    frozen_for_an_optimizer_that_nobody_knows,
    rows_of_a_shard_cannot_learn_alone,
    rows_are_refused_by_a_later_fully_shard,
    other_placements,
    replicas_with_pins,
    the_largest_gradient_of_all_shards_is_clipped,
    edits_of_shards_are_refused,
    checks_of_shards_name_the_rows_on_every_process,
]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def ended(request, tmp_path_factory):
    return request.param, lived(STORIES, tmp_path_factory.mktemp("ranks"), world=request.param)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_pins_and_freezes_of_shards(ended, story):
    world, found = ended
    ended_well(found, story, world)
