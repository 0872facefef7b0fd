"""Running statistics of frozen parts stand still, whatever mode the model is put into."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import gradgate as gg
from gradgate.errors import FrozenMovedError


def state(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


NORMS = [
    (nn.BatchNorm1d(3), (8, 3)),
    (nn.BatchNorm1d(3, momentum=None), (8, 3)),
    (nn.BatchNorm1d(3, affine=False), (8, 3)),
    (nn.BatchNorm2d(3), (2, 3, 4, 4)),
    (nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    (nn.InstanceNorm1d(3, track_running_stats=True, affine=True), (2, 3, 4)),
    (nn.SyncBatchNorm(3), (8, 3)),
]


@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=[str(norm) for norm, _ in NORMS])
def test_statistics_stop_and_train_does_not_wake_them(norm, shape):
    model = nn.Sequential(copy.deepcopy(norm), nn.Conv1d(3, 3, 1) if len(shape) == 3 else nn.Identity())
    model.add_module("linear", nn.Linear(shape[-1], 3))
    keys = list(model.state_dict())
    handle = gg.freeze(model)
    assert handle.statistics == ("0",)
    before = state(model)
    x = torch.randn(shape) * 3 + 5
    for wake in (lambda: None, model.train, model[0].train, lambda: model.apply(lambda m: m.train())):
        wake()
        out = model[0](x)
        assert same(state(model), before)
    torch.testing.assert_close(out, copy.deepcopy(norm).eval()(x))
    assert list(model.state_dict()) == keys
    assert type(model[0]) is type(norm)
    handle.verify()
    handle.thaw()
    assert model[0].training
    if not isinstance(norm, nn.SyncBatchNorm):
        model[0](x)
        assert not same(state(model), before)


def test_the_mode_asked_for_meanwhile_holds_afterwards():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    handle = gg.freeze(model)
    model.eval()
    handle.thaw()
    assert not model[0].training
    model.train()
    assert model[0].training


def test_statistics_false_lets_them_run():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    before = state(model)
    handle = gg.freeze(model, statistics=False)
    model(torch.randn(8, 2) + 3)
    assert handle.statistics == ()
    assert not same(state(model), before)


def test_only_what_lies_in_the_frozen_part_stops():
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "b": nn.Sequential(nn.BatchNorm1d(2))}
    )
    assert gg.freeze(model, "a.*").statistics == ("a.1",)
    assert gg.freeze(model, "*.bias").statistics == ()
    assert gg.freeze(model, "b.0.weight").statistics == ()
    assert gg.freeze(model, model["b"]).statistics == ("b.0",)


def test_train_only_stops_the_statistics_of_the_rest():
    model = nn.ModuleDict({"body": nn.BatchNorm1d(2), "head": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))})
    assert gg.train_only(model, "head.*").statistics == ("body",)


def test_holds_are_counted_in_any_order():
    model = nn.Sequential(nn.BatchNorm1d(2))
    first, second = gg.freeze(model), gg.freeze(model)
    first.thaw()
    model.train()
    assert not model[0].training
    second.thaw()
    assert model[0].training


def test_copies_and_pickles_sleep_too():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    gg.freeze(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train()
        before = state(other)
        other(torch.randn(8, 2) + 3)
        assert same(state(other), before)
        gg.freezing.thaw(other)
        assert other[0].training
        other(torch.randn(8, 2) + 3)
        assert not same(state(other), before)
    assert not model[0].training  # the original is still held


def test_the_spectral_norm_iterates_no_more():
    model = nn.Sequential(spectral_norm(nn.Linear(4, 4)))
    weight = model[0].weight.detach().clone()
    handle = gg.freeze(model)
    model.train()
    now = [model(torch.randn(2, 4)) is not None and model[0].weight.detach().clone() for _ in range(3)]
    assert all(torch.equal(now[0], other) for other in now)
    torch.testing.assert_close(now[0], weight, rtol=0.2, atol=0.2)
    handle.verify()


def test_a_statistic_that_was_moved_by_hand_is_found():
    model = nn.Sequential(nn.BatchNorm1d(2))
    handle = gg.freeze(model)
    model[0].running_var[1] = 9
    with pytest.raises(FrozenMovedError, match=r"0\.running_var\[1\] is frozen and moved: it was 1\.0 and is 9\.0"):
        handle.verify()


@pytest.mark.slow
def test_a_compiled_frozen_norm_stands_still():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(8, 2))
    gg.freeze(model, "0.*")
    model.train()
    before = state(model)
    compiled(torch.randn(8, 2) + 3)
    assert same(state(model), before)
    torch._dynamo.reset()
