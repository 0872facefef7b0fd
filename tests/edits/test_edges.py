"""Where an edit could go wrong in silence: repeated places, NaN and Inf, shared memory, tied weights, many threads."""

import copy

import pytest
import torch

import gradgate as gg
from gradgate import _kernels

NAN, INF = float("nan"), float("inf")


def gradients(fn, *inputs, arriving=None):
    leaves = [value.clone().requires_grad_() for value in inputs]
    out = fn(*leaves)
    arriving = torch.ones_like(out) if arriving is None else arriving
    return [g.tolist() for g in torch.autograd.grad(out, leaves, arriving)]


# --- several values for one place ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_set_takes_the_last_with_any_number_of_threads():
    """torch's own assignment runs in parallel from some 30,000 entries on; then the order is anybody's."""
    count = 200_000
    index = torch.randint(0, 1000, (count,))
    value = torch.arange(float(count), requires_grad=True)
    last = torch.zeros(1000).scatter_reduce(0, index, value.detach(), "amax", include_self=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        new = gg.at(torch.zeros(1000))[index].set(value)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(new.detach(), last)
    new.sum().backward()
    assert value.grad.nonzero().flatten().tolist() == sorted(last.long().unique().tolist())


def test_set_keeps_every_bit_of_the_winner():
    value = torch.tensor([1.0, -0.0, NAN, INF, 5.0, 1e-45])
    new = gg.at(torch.full((3,), NAN))[[0, 0, 1, 2, 1, 2]].set(value)
    assert torch.equal(new.view(torch.int32), torch.tensor([-0.0, 5.0, 1e-45]).view(torch.int32))


def test_a_dropped_entry_at_the_place_of_a_good_one_does_nothing():
    """Out of range, 7 would be clamped to 2, where a value is set before it and -0.0 stands."""
    x = torch.tensor([1.0, 2.0, -0.0])
    new = gg.at(x)[[2, 7]].set(torch.tensor([5.0, NAN]), mode="drop", unique_indices=True)
    assert new.tolist() == [1.0, 2.0, 5.0]
    for name in ("set", "add", "multiply", "divide", "power", "min", "max"):
        new = getattr(gg.at(x)[[7, -9]], name)(torch.tensor([NAN, NAN]), mode="drop")
        assert torch.equal(new.view(torch.int32), x.view(torch.int32)), name
        gx, gv = gradients(
            lambda x, v, name=name: getattr(gg.at(x)[[7, -9]], name)(v, mode="drop"), x, torch.tensor([NAN, INF])
        )
        assert gx == [1.0, 1.0, 1.0]
        assert gv == [0.0, 0.0]


def test_an_int_that_is_dropped_is_no_edit():
    x = torch.rand(3, 2)
    for new in (
        gg.at(x)[5].set(1.0, mode="drop"),
        gg.at(x)[5, [0, 0]].add(1.0, mode="drop"),
        gg.at(x)[5].apply(torch.sin, mode="drop"),
    ):
        assert torch.equal(new, x)
        assert new.data_ptr() != x.data_ptr()
    assert gg.at(x)[5].get(fill_value=-1).tolist() == [-1.0, -1.0]
    assert gg.at(x)[5, [0, 1, 1]].get(fill_value=-1).tolist() == [-1.0] * 3
    assert gg.at(torch.zeros(0, 2))[5].get(fill_value=-1).tolist() == [-1.0, -1.0]
    assert torch.equal(gg.at(x)[5].set(7.0, mode="clip"), gg.at(x)[2].set(7.0))


def test_products_have_an_exact_gradient_at_zeros():
    gx, gv = gradients(lambda x, v: gg.at(x)[[0, 0, 0]].multiply(v), torch.tensor([3.0]), torch.tensor([0.0, 2.0, 5.0]))
    assert gx == [0.0]
    assert gv == [30.0, 0.0, 0.0]


def test_ties_share_the_gradient_and_losers_get_nothing_even_of_a_nan():
    x, v = torch.tensor([1.0, 9.0]), torch.tensor([1.0, 1.0, 3.0])
    gx, gv = gradients(lambda x, v: gg.at(x)[[0, 0, 1]].max(v), x, v, arriving=torch.tensor([3.0, NAN]))
    assert gx[0] == 1.0
    assert gv == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("index", [slice(None), torch.tensor([0, 1, 2]), torch.tensor([True, True, True])], ids=str)
def test_where_a_nan_wins_nobody_gets_a_gradient(index):
    x, v = torch.tensor([NAN, 2.0, INF]), torch.tensor([2.0, NAN, INF])
    gx, gv = gradients(lambda x, v: gg.at(x)[index].max(v), x, v)
    assert gx == gv == [0.0, 0.0, 0.5]


# --- NaN and Inf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set", "add", "subtract", "multiply", "divide", "power", "min", "max"])
def test_a_bad_value_under_a_mask_leaves_the_others_alone(name):
    """0 times NaN must not happen: neither the value nor the elements that are not chosen may poison a gradient."""
    x = torch.tensor([NAN, -INF, 0.0, 2.0])
    keep = torch.tensor([False, False, False, True])
    gx, (gv,) = gradients(lambda x, v: getattr(gg.at(x)[keep], name)(v), x, torch.tensor([3.0]))
    assert gx[:3] == [1.0, 1.0, 1.0]
    assert gv == gv
    gx, _ = gradients(lambda x, v: getattr(gg.at(x)[keep], name)(v), x, torch.tensor([INF]))
    assert gx[:3] == [1.0, 1.0, 1.0]


def test_what_was_replaced_gets_exactly_zero_of_a_nan_gradient():
    arriving = torch.tensor([NAN, INF, 1.0])
    for index in (slice(0, 2), torch.tensor([0, 1, 1]), torch.tensor([True, True, False])):
        (gx,) = gradients(lambda x, index=index: gg.at(x)[index].set(0.0), torch.rand(3), arriving=arriving)
        assert gx == [0.0, 0.0, 1.0]


# --- x, v and their memory -----------------------------------------------------------------------------------------


def test_apply_may_overwrite_what_it_gets():
    x = torch.tensor([-1.0, 2.0])
    for index in (slice(None), torch.tensor([0, 1]), torch.tensor([True, True])):
        assert gg.at(x)[index].apply(torch.Tensor.relu_).tolist() == [0.0, 2.0]
        assert x.tolist() == [-1.0, 2.0]


def test_get_shares_no_memory():
    x = torch.zeros(3)
    for index in (slice(None), 0, [0, 1]):
        gg.at(x)[index].get().fill_(1.0)
    assert x.tolist() == [0.0] * 3


def test_v_may_be_x_itself():
    x = torch.arange(4.0, requires_grad=True)
    assert gg.at(x)[::-1].set(x).tolist() == [3.0, 2.0, 1.0, 0.0]
    y = gg.at(x)[[0, 1]].set(x[2:])
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 2.0, 2.0]


def test_the_layout_of_x_is_kept():
    x = torch.rand(4, 5).T
    for index in (0, torch.tensor([0, 0]), (slice(None), [1])):
        assert gg.at(x)[index].set(0.0).stride() == x.clone().stride()


def test_forward_mode_without_torch_func():
    index, x, v = torch.tensor([0, 0, 2]), torch.rand(3), torch.rand(3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.tensor([1.0, 2.0, 3.0]))
        for new, expected in (
            (gg.at(x)[index].set(dual), [2.0, 0.0, 3.0]),
            (gg.at(x)[:].set(dual), [1.0, 2.0, 3.0]),
        ):
            assert torch.autograd.forward_ad.unpack_dual(new).tangent.tolist() == expected


def test_a_subclass_and_a_parameter():
    w = torch.nn.Parameter(torch.zeros(2))
    new = gg.at(w)[0].set(1.0)
    assert type(new) is torch.Tensor
    assert new.requires_grad


# --- modules and dictionaries --------------------------------------------------------------------------------------


def test_a_module_is_untouched_and_the_state_works_in_functional_call():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).eval()
    before = copy.deepcopy(model.state_dict())
    v = torch.tensor(2.0, requires_grad=True)
    state = gg.at(model, "0.weight")[0].set(v)
    state = gg.at(state, "1.running_mean")[...].add(1.0)
    assert set(state) == set(before)
    out = torch.func.functional_call(model, state, torch.ones(4, 2))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0] = 2.0
        changed[1].running_mean += 1.0
    torch.testing.assert_close(out, changed(torch.ones(4, 2)))
    out.sum().backward()
    assert v.grad is not None
    assert model[0].weight.grad[0].tolist() == [0.0, 0.0]
    assert model[2].weight.grad is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_tied_weight_is_edited_under_all_its_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    state = gg.at(model, "1.weight")[...].set(torch.eye(2))
    assert state["0.weight"] is state["1.weight"]
    x = torch.rand(3, 2)
    assert torch.equal(torch.func.functional_call(model, state, x), x)


def test_get_of_a_module_gives_the_values_and_a_dictionary_is_not_changed():
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert gg.at(tensors, "b")[0].get().item() == 1.0
    assert gg.at(tensors, "a")[0].set(5.0)["a"].tolist() == [5.0, 0.0]
    assert tensors["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("name", ["set", "add", "multiply", "max"])
def test_another_default_device_changes_nothing(name, count):
    x, index, rows = torch.randn(70, 2), torch.randint(0, 70, (count,)), torch.rand(count, 2)
    expected = getattr(gg.at(x)[index], name)(rows)
    with torch.device("meta"):
        assert torch.equal(getattr(gg.at(x)[index], name)(rows), expected)


def test_apply_sees_the_shape_of_the_selection_without_the_kernels(monkeypatch):
    monkeypatch.setattr(_kernels, "library", None)
    shapes = []

    def add_one(values):
        shapes.append(tuple(values.shape))
        return values + 1

    new = gg.at(torch.zeros(6))[torch.tensor([[0, 1], [2, 3]])].apply(add_one)
    assert shapes == [(2, 2)]
    assert new.tolist() == [1, 1, 1, 1, 0, 0]
