"""The problems that users reported, told again with this library: each ends well."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pin", "train_rows"])
def test_14_embedding_rows_do_not_decay_under_adamw(how):
    """Only the row of the new token should learn; the others kept shrinking by lr x decay."""
    embedding = nn.Embedding(5, 3)
    plain = nn.Embedding(5, 3)
    plain.load_state_dict(embedding.state_dict())
    before = embedding.weight.detach().clone()
    guarded = gg.pin(embedding.weight, rows=range(4)) if how == "pin" else gg.train_rows(embedding, rows=[4])
    for model in (embedding, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.tensor([0, 4])).pow(2).sum().backward()
            optimizer.step()
    assert torch.equal(embedding.weight[:4], before[:4])
    torch.testing.assert_close(embedding.weight[4], plain.weight[4])
    guarded.verify()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_15_a_pruned_element_is_not_revived_by_momentum(kind):
    """Its gradient was 0 in every step, and it moved all the same."""
    weight = nn.Parameter(torch.ones(2))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
    weight.sum().backward()
    optimizer.step()
    with torch.no_grad():
        weight[0] = 0.0
    gg.pin(weight, rows=[0])
    for _ in range(5):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert weight[0] == 0.0
    assert weight[1] < 0.9
    remembered = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.shape == (2,)]
    assert remembered
    assert all(value[0] == 0 for value in remembered)


@pytest.mark.parametrize(("after_backward", "set_to_none"), list(itertools.product([False, True], repeat=2)))
def test_17_a_parameter_frozen_in_mid_training_does_not_move_in_any_order_of_calls(after_backward, set_to_none):
    """requires_grad_(False) alone: moved in three of the four."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(1)), "v": nn.Parameter(torch.ones(1))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def backward():
        (model["w"] * model["v"]).sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    if after_backward:
        backward()
    handle = gg.freeze(model, "w")
    start, other = model["w"].item(), model["v"].item()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        backward()
    assert model["w"].item() == start
    assert model["v"].item() != other
    handle.verify()


def test_18_a_frozen_batchnorm_learns_nothing_more():
    """Neither no_grad nor eval() lasted: model.train() woke it."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    gg.freeze(model)
    with torch.no_grad():
        model(torch.randn(8, 2) + 10)
    model.train()
    model(torch.randn(8, 2) + 10)
    assert model[0].running_mean.tolist() == [0, 0]
    assert model[0].num_batches_tracked == 0


def test_19_a_frozen_embedding_before_a_checkpoint_leaves_the_layers_learning():
    """With the reentrant checkpoint a frozen input cuts the graph; a pinned one does not, and the other kind works."""
    embedding, lora = nn.Embedding(4, 3), nn.Linear(3, 3)
    gg.freeze(embedding)
    checkpoint(lora, embedding(torch.tensor([1, 2])), use_reentrant=False).sum().backward()
    assert lora.weight.grad is not None
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert not checkpoint(lora, embedding(torch.tensor([1, 2])), use_reentrant=True).requires_grad
    gg.freezing.thaw(embedding)
    pin = gg.pin(embedding.weight, rows=range(4))  # all of it stays, and the graph goes through
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lora, embedding(torch.tensor([1, 2])), use_reentrant=True).sum().backward()
    assert embedding.weight.grad.count_nonzero() == 0
    pin.verify()


def test_20_a_part_of_a_parameter_can_be_frozen():
    """weight[0].requires_grad_(False) raises, and through detach it silently does nothing."""
    weight = nn.Parameter(torch.ones(3, 2))
    pin = gg.pin(weight, rows=[0])
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        assert weight.grad.tolist() == [[0, 0], [1, 1], [1, 1]]
        optimizer.step()
    assert weight[0].tolist() == [1, 1]
    pin.verify()
