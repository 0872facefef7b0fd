"""Pinned elements: exact, unseen by the rest, and robust against everything that happens to a parameter."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradgate as gg
from gradgate.errors import FrozenMovedError
from tests.freezing.optimizers import recipes, runs_here

# These look at more than one element at a time, so a smaller parameter is another problem for them (LIMITATIONS.md).
MIXING = ("Adafactor", "Muon", "LBFGS")
ELEMENTWISE = [recipe for recipe in recipes() if recipe.kind.__name__ not in (*MIXING, "SparseAdam")]


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32)


# --- the rest does not notice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("recipe", ELEMENTWISE, ids=lambda r: f"{r.name}-{r.way}")
def test_the_free_elements_are_a_smaller_parameter(recipe, warm):
    """Oracle: a parameter of the free elements only, with the frozen ones as constants, takes the same steps."""
    if runs_here(recipe) is not True:
        assert recipe.way == "capturable"
        return
    start, frozen = torch.randn(5, 4), torch.rand(5, 4) < 0.5
    pull = torch.randn(6, 5)

    def loss_of(whole):
        return (pull @ whole).tanh().pow(2).sum() + whole.sin().sum()

    whole = nn.Parameter(start.clone())
    optimizer = recipe.build([whole])

    def step():
        optimizer.zero_grad()
        loss_of(whole).backward()
        torch.nn.utils.clip_grad_norm_([whole], 1.0)
        optimizer.step()

    for _ in range(3 if warm else 0):
        step()
    constants = whole.detach().clone()
    small = nn.Parameter(constants[~frozen].clone())
    oracle = recipe.build([small])
    if warm:
        oracle.load_state_dict(sliced(optimizer.state_dict(), start.shape, ~frozen))
    pin = gg.pin(whole, frozen=frozen)
    for _ in range(5):
        step()
        oracle.zero_grad()
        loss_of(constants.index_put((~frozen).nonzero(as_tuple=True), small)).backward()
        torch.nn.utils.clip_grad_norm_([small], 1.0)
        oracle.step()
        torch.testing.assert_close(whole.detach()[~frozen], small.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(bits(whole[frozen]), bits(constants[frozen]))
    pin.verify()


def sliced(state, shape, free):
    """The state of an optimizer of the free elements only."""
    state = copy.deepcopy(state)
    for values in state["state"].values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                values[key] = value[free]
    return state


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_walks_in_the_free_space_only(line_search):
    start, frozen = torch.randn(4, 3).double(), torch.rand(4, 3) < 0.5
    goal = torch.randn(4, 3).double()

    def loss_of(whole):
        return (whole - goal).pow(4).sum() + (whole @ whole.t()).pow(2).sum() * 0.1

    whole, small = nn.Parameter(start.clone()), nn.Parameter(start[~frozen].clone())
    gg.pin(whole, frozen=frozen)
    ours = torch.optim.LBFGS([whole], lr=0.1, max_iter=5, line_search_fn=line_search)
    theirs = torch.optim.LBFGS([small], lr=0.1, max_iter=5, line_search_fn=line_search)

    def closure_of(optimizer, value):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(value())
            loss.backward()
            return loss

        return closure

    for _ in range(4):
        ours.step(closure_of(ours, lambda: whole))
        theirs.step(closure_of(theirs, lambda: start.index_put((~frozen).nonzero(as_tuple=True), small)))
    torch.testing.assert_close(whole.detach()[~frozen], small.detach())
    assert torch.equal(whole.detach()[frozen], start[frozen])


def test_a_closure_in_mid_step_sees_the_frozen_values():
    weight = nn.Parameter(torch.randn(6))
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    frozen = torch.tensor([True, False] * 3)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(weight.detach()[frozen].clone())
        loss = (weight * torch.arange(1.0, 7.0)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # warm, with a history of directions
    state = copy.deepcopy(optimizer.state_dict())
    gg.pin(weight, frozen=frozen)
    optimizer.step(closure)
    optimizer.load_state_dict(state)  # the directions of before, which lead out of the free space
    seen.clear()
    held = weight.detach()[frozen].clone()
    optimizer.step(closure)
    assert len(seen) > 2
    assert all(torch.equal(held, values) for values in seen)


def test_clipping_does_not_see_frozen_elements():
    weight = nn.Parameter(torch.ones(4))
    gg.pin(weight, frozen=torch.tensor([True, True, False, False]))
    (weight * torch.tensor([1e9, float("inf"), 3.0, 4.0])).sum().backward()
    assert weight.grad.tolist() == [0, 0, 3, 4]
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == 5.0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason=f"torch {torch.__version__} has no Muon")
def test_muon_does_not_mix_pinned_rows_in():
    """The momentum of pinned rows is forgotten, so the others are turned as a matrix without them."""
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = torch.optim.Muon([weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    gg.pin(weight, rows=[0, 1])
    weight.grad = torch.zeros(6, 4)
    (weight.sin().sum()).backward()
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"][:2], torch.zeros(2, 4))


def test_what_an_optimizer_remembers_of_pinned_elements_is_forgotten():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        if number == 1:
            gg.pin(weight, frozen=torch.tensor([True, False, False, False]))
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"][0] == 0
    assert optimizer.state[weight]["exp_avg"][1] > 0


# --- pins of one parameter -----------------------------------------------------------------------------------------


@given(st.data())
def test_pins_overlap_and_go_in_any_order(data):
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    pins = {}
    for _ in range(data.draw(st.integers(1, 8))):
        if pins and data.draw(st.booleans()):
            pin = data.draw(st.sampled_from(sorted(pins, key=id)))
            pin.verify()
            pin.release()
            del pins[pin]
        else:
            mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(4, 3)
            pins[gg.pin(weight, frozen=mask)] = mask
        together = torch.zeros(4, 3, dtype=torch.bool)
        for mask in pins.values():
            together |= mask
        before = weight.detach().clone()
        optimizer.zero_grad()
        weight.pow(2).sum().backward()
        optimizer.step()
        assert torch.equal(weight.detach() == before, together | (before == 0))
        for pin in pins:
            pin.verify()


def test_pin_and_freeze_of_one_parameter():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = gg.freeze(model)
    pin = gg.pin(model.weight, rows=[0])  # of a parameter that has no gradient now
    handle.thaw()
    before = model.weight.detach().clone()
    model(torch.randn(4, 3)).sum().backward()
    assert torch.equal(model.weight.grad[0], torch.zeros(3))
    optimizer.step()
    pin.verify()
    assert not torch.equal(model.weight[1], before[1])
    handle = gg.freeze(model)
    pin.release()
    optimizer.step()
    handle.verify()
    handle.thaw()
    assert not hasattr(model.weight, "_gradgate_watchers")


def test_the_block_releases():
    weight = nn.Parameter(torch.ones(3))
    with gg.pin(weight, rows=[0]) as pin:
        assert pin.frozen.tolist() == [True, False, False]
        assert repr(pin) == "Pin(1 of 3 elements)"
    assert repr(pin) == "Pin(1 of 3 elements; released)"
    weight.sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_a_mask_may_broadcast_along_a_dimension():
    weight = nn.Parameter(torch.ones(3, 2))
    assert gg.pin(weight, frozen=torch.tensor([[True], [False], [False]])).count == 2
    assert gg.pin(weight, frozen=torch.tensor([[True, False]])).count == 3
    assert gg.pin(weight, frozen=torch.tensor([[True, False]]), rows=[-1]).count == 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_odd_shapes(shape):
    weight = nn.Parameter(torch.ones(shape))
    pin = gg.pin(weight, frozen=torch.ones(shape, dtype=torch.bool))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    weight.sum().backward()
    optimizer.step()
    pin.verify()
    assert torch.equal(weight.detach(), torch.ones(shape))
    pin.release()


# --- what happens to a parameter -----------------------------------------------------------------------------------


def decayed(weight):
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=1.0)
    weight.pow(2).sum().backward()
    optimizer.step()


def test_values_loaded_on_purpose_are_kept_and_told():
    model = nn.Linear(2, 2)
    pin = gg.pin(model.weight, rows=[0])
    decayed(model.weight)
    model.load_state_dict({"weight": torch.full((2, 2), 5.0), "bias": torch.zeros(2)})
    decayed(model.weight)
    assert model.weight[0].tolist() == [5, 5]
    with pytest.raises(FrozenMovedError, match="or a loaded state"):
        pin.verify()
    pin.accept()
    pin.verify()


def test_what_is_written_behind_autograds_back_is_undone_by_the_next_step():
    weight = nn.Parameter(torch.ones(2))
    pin = gg.pin(weight, rows=[0])
    decayed(weight)
    weight.data[0] = 5
    with pytest.raises(FrozenMovedError):
        pin.verify()
    decayed(weight)
    pin.verify()


def test_a_step_that_breaks_off_is_put_right_by_the_next():
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if broken:
                raise RuntimeError("the power went")

    weight = nn.Parameter(torch.ones(2))
    pin, broken = gg.pin(weight, rows=[0]), True
    optimizer = Breaks([weight], lr=0.1, weight_decay=1.0)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="the power went"):
        optimizer.step()
    broken = False
    optimizer.step()
    pin.verify()
    assert weight[0] == 1


@pytest.mark.parametrize(
    "convert", [lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to(memory_format=torch.channels_last)]
)
@pytest.mark.parametrize("how", [{"rows": [0]}, {"frozen": torch.arange(72).reshape(2, 4, 3, 3) % 2 == 0}])
def test_it_survives_conversion(convert, how):
    model = nn.Conv2d(4, 2, 3)
    pin = gg.pin(model.weight, **how)
    decayed(model.weight)
    convert(model)
    model.zero_grad()
    before = model.weight.detach().clone()
    decayed(model.weight)
    pin.verify()
    assert torch.equal(model.weight.detach()[pin.frozen], before[pin.frozen])
    assert not torch.equal(model.weight.detach(), before)


def test_sparse_gradients():
    table = nn.Embedding(6, 3, sparse=True)
    pin = gg.pin(table.weight, rows=[0, 1])
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([0, 0, 3])).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense()[0].tolist() == [0, 0, 0]
        optimizer.step()
    pin.verify()


def test_a_gradient_with_a_graph_stays_differentiable():
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    gg.pin(weight, rows=[0])
    with pytest.warns(UserWarning, match="create_graph=True"):
        weight.pow(3).sum().backward(create_graph=True)
    assert weight.grad.tolist() == [0, 27]
    (second,) = torch.autograd.grad(weight.grad.sum(), weight)
    assert second.tolist() == [0, 18]


@pytest.mark.slow
def test_a_compiled_module_and_a_compiled_step():
    model = nn.Linear(3, 2)
    pin = gg.pin(model.weight, rows=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = torch.compile(optimizer.step, backend="eager")
    before = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        compiled(torch.randn(4, 3)).sum().backward()
        step()
    pin.verify()
    assert not torch.equal(model.weight[1], before[1])
    torch._dynamo.reset()


def test_nan_and_inf_and_minus_zero_stay():
    weight = nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0, 1.0]))
    pin = gg.pin(weight, frozen=torch.tensor([True, True, True, False]))
    before = bits(weight).clone()
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(bits(weight)[:3], before[:3])
    assert weight[3] < 1
    pin.verify()
