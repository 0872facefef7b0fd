"""The graph of steps of every kind: that raise, recompute, recur, run under torch.func or are very large."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg
from gradgate.doctor import Diagnosis
from tests.doctor.graphs import Residual, X, edges_of, module_of, modules_of, norm


def test_a_model_that_is_never_called():
    model, other = modules_of("a"), torch.ones(3, requires_grad=True)
    diagnosis = gg.diagnose(lambda: other.sum(), model=model)
    assert diagnosis.graph["edges"] == []
    assert [(m["calls"], m["state"], m["gradient_norm"]) for m in diagnosis.graph["modules"]] == [
        (0, "no_gradient", None)
    ]


def test_nothing_to_draw():
    assert gg.diagnose(lambda: torch.ones(3, requires_grad=True).sum()).graph is None
    assert gg.diagnose(lambda: 1, model=nn.Identity()).graph is None
    assert Diagnosis().to_dict()["layers"] == []
    assert {Diagnosis(graph={"modules": [], "edges": [], "nonfinite_path": []})}


def test_an_exception_leaves_the_graph_up_to_there():
    model = modules_of("a", "b", wrong=nn.Linear(3, 1))
    diagnosis = gg.diagnose(lambda: model.wrong(model.b(model.a(X))).mean(), model=model)
    assert diagnosis.exception is not None
    assert set(edges_of(diagnosis)) == {("input", "a"), ("a", "b")}
    assert [m["calls"] for m in diagnosis.graph["modules"]] == [1, 1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_counted_once(reentrant):
    model, x = modules_of("a", "b", "c"), X.clone().requires_grad_()
    plain = edges_of(gg.diagnose(lambda: model.c(model.b(model.a(x))).sum(), model=model))

    def step():
        return model.c(checkpoint(lambda x: model.b(model.a(x)), x, use_reentrant=reentrant)).sum()

    diagnosis = gg.diagnose(step, model=model)
    found = edges_of(diagnosis)
    assert [m["calls"] for m in diagnosis.graph["modules"]] == [1, 1, 1]
    assert set(found) == set(plain)
    for ends, edge in plain.items():
        # What happens inside a re-entrant checkpoint is a pass of its own, which is not seen from outside.
        unseen = reentrant and ends == ("a", "b")
        assert found[ends]["gradient_norm"] == (None if unseen else pytest.approx(edge["gradient_norm"])), ends


def test_torch_func_has_no_graph():
    layer = nn.Linear(4, 1)

    def step():
        gradient = torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, X).sum())
        return gradient(dict(layer.named_parameters()))["weight"].sum()

    assert gg.diagnose(step, model=layer).graph is None


def test_a_number_that_left_torch_is_input():
    model = modules_of("a", "b")
    diagnosis = gg.diagnose(lambda: model.b(X * model.a(X).mean().item()).mean(), model=model)
    assert diagnosis.findings[0].code == "GG101"
    assert set(edges_of(diagnosis)) == {("input", "a"), ("input", "b"), ("b", "loss")}


def test_a_module_that_does_nothing_has_no_edges():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))
    diagnosis = gg.diagnose(lambda: model(X).mean(), model=model)
    assert module_of(diagnosis, "1")["calls"] == 1
    assert set(edges_of(diagnosis)) == {("input", "0"), ("0", "2"), ("2", "loss")}


def test_a_scripted_model_is_one_module():
    model = torch.jit.script(nn.Linear(4, 1))
    diagnosis = gg.diagnose(lambda: model(X).mean(), model=model)
    assert diagnosis.healthy
    assert module_of(diagnosis, "")["gradient_norm"] == pytest.approx(norm(p.grad for p in model.parameters()))


def test_several_passes_and_recurrence():
    cell = nn.GRUCell(4, 4)

    def step():
        state = torch.zeros(6, 4)
        for _ in range(5):
            state = cell(X, state)
        loss = state.pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    diagnosis = gg.diagnose(step, model=cell)
    assert module_of(diagnosis, "")["calls"] == 5
    assert set(edges_of(diagnosis)) == {("input", ""), ("", ""), ("", "loss")}


def test_a_trace_has_the_graph_of_the_newest_step_that_was_looked_at():
    model = modules_of("a", "b")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gg.trace(model) as traced:
        for number in range(5):
            optimizer.zero_grad()
            (model.b(model.a(X)) * (math.nan if number == 4 else 1)).mean().backward()
            optimizer.step()
    assert traced.diagnosis.graph["nonfinite_path"] == [-2]
    assert [m["calls"] for m in traced.diagnosis.graph["modules"]] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_five_hundred_modules_stay_small(wide):
    layers = [nn.Linear(4, 4) for _ in range(500)]
    model = nn.ModuleList(layers)

    def step():
        x = X
        for layer in layers:
            x = x + layer(x) if wide else layer(x)
        return x.mean()

    diagnosis = gg.diagnose(step, model=model)
    assert len(diagnosis.graph["modules"]) == 500
    assert len(diagnosis.graph["edges"]) == (2000 if wide else 501)
    assert len(diagnosis.to_json()) < 1_000_000
    found = edges_of(diagnosis)
    assert all((str(n), str(n + 1)) in found for n in range(499))
    assert ("499", "loss") in found


@pytest.mark.parametrize("penalty", [False, True])
def test_gradients_are_bit_identical(penalty):
    class Gated(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x) + x.tanh() * x

    model = nn.Sequential(nn.Linear(4, 8), Residual(8), Gated(), nn.Dropout(0.5), Residual(8), Gated(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)

    def step(m):
        loss = F.cross_entropy(m(X), torch.tensor([0, 1, 0, 1, 0, 1]))
        if penalty:
            loss = loss + sum(g.pow(2).sum() for g in torch.autograd.grad(loss, m.parameters(), create_graph=True))
        loss.backward()

    torch.manual_seed(1)
    step(plain)
    torch.manual_seed(1)
    gg.diagnose(lambda: step(model), model=model)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        assert one.grad.stride() == other.grad.stride()
