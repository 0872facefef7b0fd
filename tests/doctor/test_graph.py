"""The modules, layers and edges of a step, against what was built and what plain torch says."""

import json
import math

import pytest
import torch
from torch import nn

import gradgate as gg
from tests.doctor.graphs import Residual, X, edges_of, layer_of, module_of, modules_of, norm


def test_norms_are_those_of_the_gradients_and_the_weights():
    model = nn.Sequential(nn.Linear(4, 8), Residual(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 1)))
    diagnosis = gg.diagnose(lambda: model(X).pow(2).mean(), model=model)
    listed = dict(model.named_modules())
    assert [m["name"] for m in diagnosis.graph["modules"]] == list(listed)
    for entry in diagnosis.graph["modules"]:
        own = list(listed[entry["name"]].parameters(recurse=False))
        assert entry["kind"] == type(listed[entry["name"]]).__name__
        assert (entry["calls"], entry["state"], entry["frozen"]) == (1, "ok", 0)
        assert entry["parameters"] == sum(p.numel() for p in own)
        assert entry["gradient_norm"] == (pytest.approx(norm(p.grad for p in own)) if own else None)
    assert [layer["name"] for layer in diagnosis.layers] == [name for name, _ in model.named_parameters()]
    for layer, (name, parameter) in zip(diagnosis.layers, model.named_parameters(), strict=True):
        assert diagnosis.graph["modules"][layer["module"]]["name"] == name.rpartition(".")[0]
        assert layer["shape"] == list(parameter.shape)
        assert layer["gradient_norm"] == pytest.approx(norm([parameter.grad]))
        assert layer["weight_norm"] == pytest.approx(norm([parameter.detach()]))
        assert layer["learns"] is True


def test_the_norms_of_a_step_that_moves_the_weights_are_those_before():
    layer = nn.Linear(4, 1)
    before, optimizer = norm([layer.weight.detach()]), torch.optim.SGD(layer.parameters(), lr=10.0)

    def step():
        layer(X).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = layer_of(gg.diagnose(step, model=layer), "weight")
    assert found["weight_norm"] == pytest.approx(before)
    assert found["gradient_norm"] == pytest.approx(norm([X.mean(dim=0)]))


def test_what_is_frozen_and_pinned():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    handle, pin = gg.freeze(model, "2.*"), gg.pin(model[3].weight, rows=[0])
    part = gg.pin(model[1].weight, rows=[0, 2])
    diagnosis = gg.diagnose(lambda: model(X).mean(), model=model)
    states = {m["name"]: (m["parameters"], m["frozen"], m["state"]) for m in diagnosis.graph["modules"]}
    assert states["0"] == states["2"] == (20, 20, "frozen")
    assert states["1"] == (20, 12, "ok")
    assert states["3"] == (5, 4, "ok")
    learns = {layer["name"]: layer["learns"] for layer in diagnosis.layers}
    assert learns == {
        **dict.fromkeys(["0.weight", "0.bias", "1.bias", "2.weight", "2.bias", "3.weight"], False),
        "1.weight": "part",
        "3.bias": True,
    }
    for held in (handle.thaw, pin.release, part.release):
        held()
    diagnosis = gg.diagnose(lambda: model(X).mean(), model=model)
    assert [m["frozen"] for m in diagnosis.graph["modules"]] == [0, 20, 4, 0, 0]


def test_tied_weights_are_one_layer_of_two_modules():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    diagnosis = gg.diagnose(lambda: model(X).pow(2).mean(), model=model)
    assert [(layer["name"], layer["module"]) for layer in diagnosis.layers] == [("0.weight", 1)]
    size = pytest.approx(norm([model[0].weight.grad]))
    assert [m["gradient_norm"] for m in diagnosis.graph["modules"]] == [None, size, size]
    assert set(edges_of(diagnosis)) == {("input", "0"), ("0", "1"), ("1", "loss")}


def test_sparse_complex_and_half_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    diagnosis = gg.diagnose(lambda: table(torch.tensor([1, 1, 3])).pow(2).sum(), model=table)
    assert layer_of(diagnosis, "weight")["gradient_norm"] == pytest.approx(norm([table.weight.grad]))

    wave = nn.Linear(4, 4, dtype=torch.complex64)
    diagnosis = gg.diagnose(lambda: wave(X.to(torch.complex64)).abs().sum(), model=wave)
    assert layer_of(diagnosis, "weight")["gradient_norm"] == pytest.approx(norm([wave.weight.grad]), rel=1e-5)

    low = nn.Linear(4, 4, dtype=torch.float16)
    diagnosis = gg.diagnose(lambda: (low(X.half()) * 30_000).sum(), model=low)
    found, plain = layer_of(diagnosis, "bias")["gradient_norm"], low.bias.grad
    assert plain.isinf().all() if found == "inf" else found == pytest.approx(norm([plain.double()]), rel=1e-3)


def test_a_norm_beyond_the_range_of_squares_is_still_finite():
    model = modules_of("a", "b")
    diagnosis = gg.diagnose(lambda: (model.b(model.a(X)) * 1e25).sum(), model=model)
    assert layer_of(diagnosis, "b.bias")["gradient_norm"] == pytest.approx(12e25, rel=1e-4)
    assert edges_of(diagnosis)["b", "loss"]["gradient_norm"] == pytest.approx(math.sqrt(24) * 1e25, rel=1e-4)
    assert not any(edge["nonfinite"] for edge in diagnosis.graph["edges"])


def test_lazy_modules_that_never_ran_and_parameters_without_elements():
    model = nn.ModuleDict(
        {"lazy": nn.LazyLinear(3), "used": nn.Linear(4, 1), "none": nn.ParameterList([torch.ones(0)])}
    )
    diagnosis = gg.diagnose(lambda: model.used(X).mean(), model=model)
    assert [layer["name"] for layer in diagnosis.layers] == ["used.weight", "used.bias", "none.0"]
    assert module_of(diagnosis, "lazy")["parameters"] == 0
    assert layer_of(diagnosis, "none.0")["weight_norm"] == 0
    json.dumps(diagnosis.to_dict(), allow_nan=False)


def test_residual_connections_are_passed_through():
    model = nn.Sequential(nn.Linear(4, 8), Residual(8), Residual(8), nn.Linear(8, 1))
    found = edges_of(gg.diagnose(lambda: model(X).pow(2).mean(), model=model))
    assert set(found) == {
        *{("input", "0"), ("0", "1.norm"), ("1.norm", "1.linear"), ("2.norm", "2.linear"), ("3", "loss")},
        *{("0", "2.norm"), ("1.linear", "2.norm"), ("0", "3"), ("1.linear", "3"), ("2.linear", "3")},
    }


def test_the_gradient_of_an_edge_is_what_the_reader_sends_back():
    """Each reader gets a copy of its own, which keeps its gradient: the slow way to the same number."""
    model = modules_of("a", "b", "c")

    def forward(own):
        h = model.a(X)
        return (model.b(own("b", h)) * model.c(own("c", h))).sum() + (own("loss", h) ** 2).sum()

    found = edges_of(gg.diagnose(lambda: forward(lambda name, h: h), model=model))
    copies = {}

    def own(name, h):
        copies[name] = h.clone()
        copies[name].retain_grad()
        return copies[name]

    forward(own).backward()
    for name, tensor in copies.items():
        assert found["a", name]["gradient_norm"] == pytest.approx(norm([tensor.grad])), name


def test_a_tensor_that_is_read_several_times_has_the_norm_of_the_sum():
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x) - x

    model = modules_of("a", act=Swish())
    diagnosis = gg.diagnose(lambda: model.act(model.a(X)).pow(3).mean(), model=model)
    h = model.a(X).detach().requires_grad_()
    model.act(h).pow(3).mean().backward()
    assert edges_of(diagnosis)["a", "act"]["gradient_norm"] == pytest.approx(norm([h.grad]))


def test_a_shared_module_that_runs_twice():
    model = modules_of("first", "shared", "last")
    diagnosis = gg.diagnose(lambda: model.last(model.shared(model.shared(model.first(X)))).mean(), model=model)
    assert module_of(diagnosis, "shared")["calls"] == 2
    assert set(edges_of(diagnosis)) == {
        *{("input", "first"), ("first", "shared"), ("shared", "shared"), ("shared", "last"), ("last", "loss")},
    }


def test_several_inputs_and_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

        def forward(self, x, y):
            left, right = self.left(x), self.right(y)
            return {"joined": self.join(left, right), "cat": torch.cat([left, right], dim=-1)}

    model, y = Two(), X.clone().requires_grad_()

    def step():
        out = model(X, y=y)
        return out["joined"].pow(2).mean() + out["cat"].pow(2).mean()

    found = edges_of(gg.diagnose(step, model=model))
    assert set(found) == {
        *{("input", "left"), ("input", "right"), ("left", "join"), ("right", "join")},
        *{("join", "loss"), ("left", "loss"), ("right", "loss")},
    }
    assert found["input", "left"]["gradient_norm"] is None
    assert found["input", "right"]["gradient_norm"] == pytest.approx(norm([y.grad]))


def test_what_the_model_computes_itself_and_attention():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 8), "encoder": encoder, "head": nn.Linear(8, 2)})
    tokens, labels = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([0, 1])
    criterion = nn.CrossEntropyLoss()
    step = lambda: criterion(model.head(model.encoder(model.embed(tokens)).mean(dim=1)), labels)  # noqa: E731
    found = edges_of(gg.diagnose(step, model=model))
    for ends in [("embed", "encoder.self_attn"), ("encoder.linear1", "encoder.linear2"), ("encoder.norm2", "head")]:
        assert found[ends]["gradient_norm"] > 0
    assert {ends for ends in found if "loss" in ends} == {("head", "loss")}


def test_a_model_that_gives_its_loss():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.weight).pow(2).mean()

    model = Whole()
    found = edges_of(gg.diagnose(lambda: model(X), model=model))
    assert found["", "loss"]["gradient_norm"] == 1
    model.zero_grad()
    model(X).backward(torch.tensor(3.0))
    found = edges_of(gg.diagnose(lambda: model(X).backward(torch.tensor(3.0)), model=model))
    assert found["", "loss"]["gradient_norm"] == 3


def test_an_autograd_function_between_modules():
    model = modules_of("a", "b")
    step = lambda: model.b(gg.scale_grad(gg.clip_grad(model.a(X), max_norm=1e-3), 3.0)).sum()  # noqa: E731
    found = edges_of(gg.diagnose(step, model=model))
    assert found["a", "b"]["gradient_norm"] == pytest.approx(norm([model.b.weight.sum(dim=0).expand(6, 4)]))


def test_without_a_model_the_modules_that_were_called_are_drawn():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    head = nn.Linear(4, 1)
    diagnosis = gg.diagnose(lambda: head(net(X)).mean())
    assert [m["name"] for m in diagnosis.graph["modules"]] == ["net", "net.0", "net.1", "head"]
    assert set(edges_of(diagnosis)) == {("input", "net.0"), ("net.0", "net.1"), ("net.1", "head"), ("head", "loss")}
    assert layer_of(diagnosis, "head.bias")["module"] == 3
