"""What LIMITATIONS.md says of freezing: each line is shown here, and fails when it is no longer true."""

import multiprocessing.reduction

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import FrozenMovedError


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_limit_optimizers_that_look_at_the_whole_parameter_see_its_shape(kind):
    """Pinned rows stay; the others take other steps than those of a smaller matrix."""
    if not hasattr(torch.optim, kind):
        pytest.skip(f"torch {torch.__version__} has no {kind}")
    gradient, start = torch.randn(6, 4), torch.randn(6, 4)
    whole, small = nn.Parameter(start.clone()), nn.Parameter(start[2:].clone())
    pin = gg.pin(whole, rows=[0, 1])
    for parameter, part in ((whole, gradient), (small, gradient[2:])):
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.1)
        (parameter * part).sum().backward()
        optimizer.step()
    pin.verify()
    assert not torch.allclose(whole[2:], small)


def test_limit_a_second_parameter_over_the_same_memory_needs_a_pin_of_its_own():
    first = nn.Parameter(torch.ones(3))
    second = nn.Parameter(first.detach())
    pin = gg.pin(first, rows=[0])
    optimizer = torch.optim.SGD([second], lr=0.1)
    second.sum().backward()
    optimizer.step()
    with pytest.raises(FrozenMovedError):
        pin.verify()


def test_limit_an_embedding_with_max_norm_writes_in_forward():
    embedding = nn.Embedding(3, 2, max_norm=0.1)
    handle = gg.freeze(embedding)
    embedding(torch.tensor([0, 1, 2]))
    with pytest.raises(FrozenMovedError, match="weight"):
        handle.verify()


def test_limit_setting_the_flag_by_hand_wakes_a_norm():
    model = nn.Sequential(nn.BatchNorm1d(2))
    handle = gg.freeze(model)
    model[0].training = True
    model(torch.randn(4, 2))
    with pytest.raises(FrozenMovedError, match="running_mean"):
        handle.verify()


def test_limit_autograd_grad_gives_the_whole_gradient_of_a_pinned_parameter():
    weight = nn.Parameter(torch.ones(3))
    gg.pin(weight, rows=[0])
    (gradient,) = torch.autograd.grad(weight.sum(), weight)
    assert gradient.tolist() == [1, 1, 1]


def test_limit_a_parameter_replaced_by_assign_is_not_held_and_this_is_found():
    model = nn.Linear(2, 2)
    handle, pin = gg.freeze(model, "bias"), gg.pin(model.weight, rows=[0])
    model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, assign=True)
    assert model.weight is not pin.parameter
    with pytest.raises(FrozenMovedError, match="bias"):
        handle.verify()


def test_limit_swapping_conversion_is_refused_by_torch():
    model = nn.Linear(2, 2)
    gg.pin(model.weight, rows=[0])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_limit_shared_memory_sends_the_values_only():
    """torch.multiprocessing sends a parameter to another process by its own route, which takes no attributes."""
    weight = nn.Parameter(torch.ones(3))
    gg.pin(weight, rows=[0])
    sent = multiprocessing.reduction.ForkingPickler.loads(multiprocessing.reduction.ForkingPickler.dumps(weight))
    assert not hasattr(sent, "_gradgate_watchers")


@pytest.mark.slow
def test_limit_the_table_of_train_rows_has_no_gradient_where_it_is_used_by_hand():
    """Only the modules that have it as their own are found; a bare use of the tensor gets the values, no gradient."""
    embedding = nn.Embedding(5, 2)
    training = gg.train_rows(embedding, rows=[1])
    out = nn.functional.linear(embedding(torch.tensor([1])), embedding.weight)
    out.sum().backward()
    (small,) = training.parameters()
    plain = nn.Embedding(5, 2)
    plain.load_state_dict(embedding.state_dict())
    nn.functional.linear(plain(torch.tensor([1])), plain.weight).sum().backward()
    assert not torch.allclose(small.grad[0], plain.weight.grad[1])


def test_limit_a_class_that_steps_several_times_inside_its_own_step_moves_what_is_pinned():
    """What it writes between two `super().step()` looks like values that were loaded on purpose; `verify` finds it."""

    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(2):
                super().step(closure)
                with torch.no_grad():
                    weight.mul_(0.5)

    weight = nn.Parameter(torch.ones(3))
    torch.optim.SGD([weight], lr=0.1)  # only now torch hooks the step of the class itself
    pin = gg.pin(weight, rows=[0])
    weight.sum().backward()
    Twice([weight], lr=0.1).step()
    with pytest.raises(FrozenMovedError):
        pin.verify()
