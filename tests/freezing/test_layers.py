"""freeze, train_only, thaw: what is meant, counted and tied."""

import gc
import itertools
import re

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

import gradgate as gg
from gradgate.errors import FrozenMovedError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


ENCODER = tuple(f"encoder.{number}.{kind}" for number in range(3) for kind in ("weight", "bias"))
HEAD = ("head.weight", "head.bias")


def frozen(model):
    return tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


@pytest.fixture
def net():
    return Net()


# --- what is meant -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "meant"),
    [
        (lambda net: ["encoder.*"], ENCODER),
        (lambda net: ["encoder"], ENCODER),
        (lambda net: ["*.bias"], (ENCODER[1], ENCODER[3], ENCODER[5], HEAD[1])),
        (lambda net: ["encoder.[02].weight"], (ENCODER[0], ENCODER[4])),
        (lambda net: [re.compile(r"^encoder\.[01]\.")], ENCODER[:4]),
        (lambda net: [re.compile(r"bias$")], (ENCODER[1], ENCODER[3], ENCODER[5], HEAD[1])),
        (lambda net: [net.head], HEAD),
        (lambda net: [net.head.bias], HEAD[1:]),
        (lambda net: [lambda name, parameter: parameter.dim() == 2], (ENCODER[0], ENCODER[4], HEAD[0])),
        (lambda net: ["head.*", net.head, "*.bias", net.encoder[0].weight], (ENCODER[0], *ENCODER[1::2], *HEAD)),
        (lambda net: [], (*ENCODER, *HEAD)),
    ],
)
def test_selectors(net, what, meant):
    handle = gg.freeze(net, *what(net))
    assert set(handle.names) == set(meant)
    assert set(frozen(net)) == set(meant)
    assert list(handle.names) == [name for name, _ in net.named_parameters() if name in set(meant)]
    handle.thaw()
    assert frozen(net) == ()


def test_the_order_of_selectors_does_not_matter(net):
    names = [gg.freeze(net, *order).names for order in itertools.permutations(["encoder.*", "*.bias", net.head])]
    assert len(set(names)) == 1


def test_train_only_is_the_complement(net):
    handle = gg.train_only(net, "head.*")
    assert handle.names == ENCODER
    assert frozen(net) == ENCODER


def test_freeze_looks_through_compile(net):
    compiled = torch.compile(net, backend="eager")
    assert gg.freeze(compiled, "encoder.*").names == ENCODER
    net.encoder = torch.compile(net.encoder, backend="eager")
    assert gg.freeze(net, "encoder.0.*").names == ENCODER[:2]
    assert gg.freeze(net, net.encoder).names == ENCODER


@pytest.mark.slow
def test_a_compiled_model_sees_the_freeze(net):
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x = torch.randn(4, 3)

    def step():
        optimizer.zero_grad()
        compiled(x).pow(2).sum().backward()
        optimizer.step()

    step()
    handle = gg.freeze(net, "encoder.*")
    before = net.head.weight.detach().clone()
    step()
    handle.verify()
    assert not torch.equal(before, net.head.weight)
    handle.thaw()
    step()
    assert net.encoder[0].weight.grad is not None
    torch._dynamo.reset()


# --- counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_parameter_is_free_when_the_last_handle_has_thawed(net, order):
    handles = [gg.freeze(net, "encoder.*"), gg.freeze(net, "*.bias"), gg.freeze(net)]
    for number, which in enumerate(order):
        assert "encoder.0.bias" in frozen(net)
        handles[which].thaw()
        handles[which].thaw()  # a second time does nothing
        if number < 2:
            assert "encoder.0.bias" in frozen(net)
    assert frozen(net) == ()


def test_what_was_switched_off_by_hand_stays_off(net):
    net.head.bias.requires_grad_(False)
    with gg.freeze(net, "head.*"):
        assert frozen(net) == HEAD
    assert frozen(net) == HEAD[1:]


def test_the_block_thaws_also_when_it_raises(net):
    handle = gg.freeze(net, "encoder.*")
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert frozen(net) == ()
    assert not handle.active


def test_a_handle_that_falls_does_not_thaw(net):
    gg.freeze(net, "encoder.*")
    assert frozen(net) == ENCODER
    gg.freezing.thaw(net, "encoder.0.*")
    assert frozen(net) == ENCODER[2:]
    gg.freezing.thaw(net)
    assert frozen(net) == ()


def test_a_handle_whose_parameters_were_thawed_by_force_knows_it(net):
    handle, pin = gg.freeze(net, "encoder.*"), gg.pin(net.head.weight, rows=[0])
    gg.freezing.thaw(net)
    assert not handle.active
    assert not pin.active
    handle.thaw()
    pin.release()


def test_what_was_thawed_by_force_may_move_and_the_rest_is_still_proved(net):
    handle = gg.freeze(net, "encoder.*")
    gg.freezing.thaw(net, "encoder.0.*")
    net.encoder[0].weight.data += 1
    handle.verify()
    net.encoder[2].weight.data += 1
    with pytest.raises(FrozenMovedError, match=r"encoder\.2\.weight"):
        handle.verify()


def test_nothing_to_freeze_is_a_handle_all_the_same(net):
    handle = gg.train_only(net, "*")
    assert handle.names == ()
    handle.verify()
    handle.thaw()


def test_thawing_leaves_nothing_behind(net):
    before = {name: sorted(parameter.__dict__) for name, parameter in net.named_parameters()}
    gg.freeze(net).thaw()
    gg.pin(net.head.weight, rows=[0]).release()
    assert {name: sorted(parameter.__dict__) for name, parameter in net.named_parameters()} == before
    assert "train" not in net.encoder[1].__dict__


def test_the_optimizer_state_of_a_frozen_parameter_rests(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {key: value.clone() for key, value in optimizer.state[net.encoder[0].weight].items()}
    with gg.freeze(net, "encoder.*"):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert all(torch.equal(state[key], value) for key, value in optimizer.state[net.encoder[0].weight].items())


# --- ties ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_frozen_together_and_said():
    model = Tied()
    handle = gg.freeze(model, "embed.*")
    assert handle.names == ("embed.weight", "out.weight")
    assert handle.tied == {"embed.weight": ("out.weight",), "out.weight": ("embed.weight",)}
    assert repr(handle) == "FreezeHandle(embed.weight, out.weight; tied: embed.weight = out.weight)"
    assert not model.out.weight.requires_grad


def test_two_parameters_over_one_storage_are_frozen_together():
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.detach().t())  # another object, the same memory
    handle = gg.freeze(model, "0.*")
    assert handle.tied == {"0.weight": ("1.weight",), "1.weight": ("0.weight",)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model[1].weight.grad = torch.ones(3, 3)
    optimizer.step()
    handle.verify()


def test_ties_reach_through_overlaps():
    """The second overlaps the first and the third; holding one means holding all."""
    flat = torch.randn(12)
    model = nn.ParameterDict({name: nn.Parameter(flat[at : at + 6]) for name, at in (("a", 0), ("b", 3), ("c", 6))})
    handle = gg.freeze(model, "c")
    assert handle.names == ("a", "b", "c")
    assert handle.tied["a"] == ("b", "c")


def test_neighbours_in_one_storage_are_not_tied():
    flat = torch.randn(18)
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[0].weight, model[1].weight = nn.Parameter(flat[:9].view(3, 3)), nn.Parameter(flat[9:].view(3, 3))
    assert gg.freeze(model, "0.*").names == ("0.weight",)


# --- optimizers of others ------------------------------------------------------------------------------------------


class MovesAll(torch.optim.Optimizer):
    """Does what some libraries do: moves every parameter, gradient or not, through .data."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5).sub_(0.0 if parameter.grad is None else parameter.grad)


def test_an_optimizer_of_another_library_cannot_move_it_either(net):
    handle, pin = gg.freeze(net, "encoder.*"), gg.pin(net.head.weight, rows=[1])
    optimizer = MovesAll(net.parameters())
    before = net.head.weight.detach().clone()
    for _ in range(3):
        optimizer.step()
    handle.verify()
    pin.verify()
    assert torch.equal(net.head.weight[0], before[0] / 8)


def test_a_home_made_update_is_found(net):
    handle = gg.freeze(net, "encoder.*")
    net.encoder[2].weight.data[1, 2] += 1.0
    with pytest.raises(FrozenMovedError, match=r"encoder\.2\.weight\[1, 2\] is frozen and moved: it was .* and is"):
        handle.verify()
    handle.accept()
    handle.verify()


def test_a_parameter_that_was_exchanged_is_found(net):
    handle = gg.freeze(net, "head.*")
    net.head.weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(FrozenMovedError, match=r"head\.weight\["):
        handle.verify()
    net.head = nn.Linear(3, 4)
    with pytest.raises(FrozenMovedError, match="has now 12 elements instead of 6"):
        handle.verify()


def test_conversion_is_no_movement(net):
    handle = gg.freeze(net, "encoder.*")
    net.double()
    handle.verify()
    net.encoder[0].weight.data[0, 0] += 1
    with pytest.raises(FrozenMovedError, match=r"encoder\.0\.weight\[0, 0\]"):
        handle.verify()


@pytest.mark.slow
def test_the_step_hooks_are_hung_once_and_no_step_takes_one_away():
    """Torch walks over the hooks of all steps during a step: a hook that removed itself there would break others."""

    def ours():
        hooks = optimizer_module._global_optimizer_pre_hooks.values()
        return sum("gradgate.freezing" in hook.__module__ for hook in hooks)

    net = Net()
    handle = gg.freeze(net)
    gg.freeze(net)
    assert ours() == 1
    gg.freezing.thaw(net)
    handle.thaw()
    del net, handle
    gc.collect()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.watch(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert ours() == 1
