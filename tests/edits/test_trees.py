"""Edits in trees and modules: a new tree, the rest of it shared; a state that is written back and undone."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError
from tests import witness


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    boxes: list


def tree():
    return {
        "a": {"b": torch.zeros(3), "c.d": torch.ones(2)},
        "pairs": (Pair(torch.zeros(2), torch.ones(2)), [torch.arange(4.0)]),
        "sample": Sample(torch.zeros(2, 2), [torch.ones(1)]),
        7: torch.zeros(1),
        "name": "x",
    }


PATHS = {
    "a.b": lambda t: t["a"]["b"],
    "a.c.d": lambda t: t["a"]["c.d"],
    "pairs.0.second": lambda t: t["pairs"][0].second,
    "pairs.1.0": lambda t: t["pairs"][1][0],
    "sample.image": lambda t: t["sample"].image,
    "sample.boxes.0": lambda t: t["sample"].boxes[0],
    "7": lambda t: t[7],
}


@pytest.mark.parametrize("path", PATHS)
def test_one_tensor_is_new_and_all_others_are_the_same(path):
    old = tree()
    before = copy.deepcopy(old)
    new = gg.at(old)[path][0].set(5.0)
    assert type(new) is dict
    for other, read in PATHS.items():
        assert torch.equal(read(old), read(before))
        if other == path:
            assert torch.equal(read(new), gg.at(read(old))[0].set(5.0))
        else:
            assert read(new) is read(old)
    assert new["name"] == "x"
    assert torch.equal(PATHS[path](gg.at(old, path)[0].set(5.0)), PATHS[path](new))


keys = st.sampled_from(["a", "b", "a.b", "0", "1"])
trees = st.recursive(
    st.builds(lambda n: torch.arange(float(n + 1)), st.integers(0, 3)),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=6,
).filter(lambda tree: not isinstance(tree, torch.Tensor))


def leaves(tree, path=()):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    else:
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(part, (*path, str(key)))


@pytest.mark.slow
@settings(max_examples=50)
@given(trees)
def test_every_path_of_any_tree_leads_to_its_tensor(drawn):
    found = list(leaves(drawn))
    joined = [".".join(path) for path, _ in found]
    for (path, tensor), name in zip(found, joined, strict=True):
        if joined.count(name) > 1:
            continue  # {"a": {"b": x}, "a.b": y} has one name for two
        new = dict(leaves(gg.at(drawn)[name][0].add(1.0)))
        assert torch.equal(new.pop(path), gg.at(tensor)[0].add(1.0))
        assert all(new[other] is old for other, old in found if other != path)


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_a_key_with_dots_comes_before_a_path_of_several_keys(names):
    parts = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    new = gg.at({name: parts[name] for name in names})["a.b"][0].add(1.0)
    assert new["a.b"].tolist() == [2]
    assert new["a"] is parts["a"]


def test_paths_in_steps():
    new = gg.at(tree())["pairs"][1]["0"][1:3].set(torch.tensor([8.0, 9.0]))
    assert new["pairs"][1][0].tolist() == [0, 8, 9, 3]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    assert gg.at(model)["1"]["bias"][...].set(3.0)["1.bias"].item() == 3
    assert gg.at([torch.zeros(2), torch.ones(2)])[1][0].set(4.0)[1].tolist() == [4, 1]
    assert repr(gg.at(model)["1"]) == "at(Sequential)['1']"


def test_a_module_in_a_tree_becomes_its_state():
    net = torch.nn.Linear(2, 1)
    new = gg.at({"net": net, "x": torch.ones(2)})["net.weight"][0, 0].set(0.0)
    assert isinstance(new["net"], gg.edits.State)
    assert torch.func.functional_call(net, new["net"], new["x"]).shape == (1,)
    assert torch.equal(new["net"]["bias"], net.bias)


@pytest.mark.slow
def test_gradients_reach_the_tree_and_the_value():
    witness.witness(
        lambda x, v: gg.at({"a": [x, x * 2]})["a.1"][0].multiply(v)["a"][1],
        lambda x, v: torch.cat([x[:1] * 2 * v, x[1:] * 2]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor(1.5),
        promises=witness.REAL - {"expanded"},
    )


# --- states ---------------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def test_write_back_and_undo_are_exact():
    net = model()
    before = copy.deepcopy(net.state_dict())
    parameter, optimizer = net[0].weight, torch.optim.Adam(net.parameters())
    state = gg.at(net)["0.weight"][0].set(7.0)
    state = gg.at(state)["1.running_mean"][...].add(1.0)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    state.write_back()
    assert net[0].weight is parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    optimizer.zero_grad()
    net(torch.ones(4, 2)).sum().backward()
    state.undo()
    for name in ("0.weight", "1.running_mean"):
        assert torch.equal(net.state_dict()[name], before[name])
    with pytest.raises(ArgumentValueError, match=r"(?s)State.undo\(\): nothing was written back.*state.write_back\(\)"):
        state.undo()
    state.write_back()
    gg.at(net)["0.weight"][0, 0].set(1.0).write_back()
    state.write_back()
    state.undo()
    assert torch.equal(net[0].weight.detach(), before["0.weight"])


def test_a_tied_weight_is_written_once():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    state = gg.at(net)["0.weight"][...].multiply(3.0)
    old = net[0].weight.detach().clone()
    state.write_back()
    assert torch.equal(net[1].weight.detach(), old * 3)
    state.undo()
    assert torch.equal(net[1].weight.detach(), old)


@pytest.mark.slow
def test_a_state_goes_through_torch_func_and_compile():
    net, x = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), torch.ones(4, 2)

    def loss(state, v):
        state = gg.at(state)["0.bias"][0].set(v)
        return torch.func.functional_call(net, state, x).sum()

    v = torch.tensor(2.0)
    state = gg.at(net)["0.weight"][0].multiply(2.0)
    gradients = torch.func.grad(loss)(state, v)
    assert isinstance(gradients, gg.edits.State)
    assert set(gradients) == set(state)
    assert gradients["0.bias"][0] == 0
    assert gradients["0.bias"][1] != 0
    several = torch.vmap(loss, in_dims=(None, 0))(state, torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(several[2], loss(state, v))
    compiled = torch.compile(
        lambda v: torch.func.functional_call(net, gg.at(net)["0.bias"][0].set(v), x).sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(v), loss(dict(net.state_dict()), v))
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused():
    net = model()
    state = gg.at(net)["0.bias"][0].set(1.0)
    state["0.bias"] = torch.zeros(5)
    with pytest.raises(
        ArgumentValueError, match=r"shape \(5,\) cannot be written into a float32 tensor of shape \(3,\)"
    ):
        state.write_back()
    with pytest.raises(NothingMatchedError, match=r"(?s)no tensor '0.wieght' in the module Sequential.*0.weight"):
        gg.at(net)["0.wieght"]
    with pytest.raises(NothingMatchedError, match=r"no tensor 'name' in this dict"):
        gg.at(tree())["name"]
    with pytest.raises(NothingMatchedError, match=r"no tensor 'a' in this dict"):
        gg.at(tree(), "a")
    with pytest.raises(ArgumentTypeError, match=r"(?s)one of its tensors must be named"):
        gg.at(net)[0:1]
    with pytest.raises(ArgumentTypeError, match=r"(?s)`x` is the int 3"):
        gg.at(3)
    assert repr(gg.at(net)["0.bias"][0].set(1.0)).startswith("State(Sequential, 0.weight, 0.bias, ")


# --- a scope for edits in place -------------------------------------------------------------------------------------


def overwriting(x):
    y = x.exp()  # saves its result
    z = y * x
    y.add_(1)
    y[0] = 0.0
    return (z * y).sum()


def apart(x):
    y = x.exp()
    z = y * x
    return (z * gg.at(y + 1)[0].set(0.0)).sum()


def test_overwrites_do_not_break_autograd_in_their_scope():
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(overwriting(x), x)
    (expected,) = torch.autograd.grad(apart(x), x)
    with gg.allow_overwrites():
        (found,) = torch.autograd.grad(overwriting(x), x)
        with gg.allow_overwrites():  # torch's own cannot be nested
            (again,) = torch.autograd.grad(overwriting(x), x)
        assert torch.autograd.gradcheck(overwriting, [x])
        for call in (
            lambda: torch.autograd.grad(overwriting(x), x, create_graph=True),
            lambda: overwriting(x).backward(None, None, True),
        ):
            with pytest.raises(ArgumentValueError, match=r"(?s)create_graph=True.*second derivatives would be wrong"):
                call()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)

    @gg.allow_overwrites()
    def step():
        return torch.autograd.grad(overwriting(x), x)[0]

    torch.testing.assert_close(step(), expected)
    torch.testing.assert_close(step(), expected)


def test_the_scope_ends_also_when_its_body_raises():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ZeroDivisionError), gg.allow_overwrites():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(overwriting(x), x)
    with gg.allow_overwrites():
        loss = overwriting(x)
    with pytest.raises((AssertionError, RuntimeError), match="outside of the 'allow_mutation_on_saved_tensors'"):
        loss.backward()
    y = x.exp()
    assert torch.autograd.grad(y.sum(), x, create_graph=True)[0].requires_grad  # as before
