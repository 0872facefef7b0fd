"""What is wrong, in the graph: lines that cut an edge, and the path of a NaN."""

import json
import math

import torch
from torch import nn

import gradgate as gg
from tests.doctor.graphs import X, edges_of, layer_of, module_of, modules_of, path_of


def test_a_cut_edge_carries_the_line():
    model = modules_of("a", "b", "c")

    def step():
        h = model.a(X).detach()
        with torch.no_grad():
            k = model.b(X)
        return model.c(h + k).mean()

    diagnosis = gg.diagnose(step, model=model)
    found = edges_of(diagnosis)
    for name, source in (("a", "h = model.a(X).detach()"), ("b", "with torch.no_grad():")):
        cut, finding = found[name, "c"]["cut"], next(f for f in diagnosis.findings if f.source == source)
        assert cut == {"code": "GG101", "where": finding.where, "source": source}
        assert found[name, "c"]["gradient_norm"] is None
        assert module_of(diagnosis, name)["state"] == "no_gradient"
    assert [ends for ends, edge in found.items() if edge["cut"]] == [("a", "c"), ("b", "c")]
    assert found["c", "loss"]["gradient_norm"] > 0


def test_an_edge_names_the_line_that_cuts_it_not_a_mask_before_it():
    model = modules_of("a", "b")

    def step():
        h = model.a(X)
        h = h * (h > 0)
        h = h.detach()
        return model.b(h).mean()

    diagnosis = gg.diagnose(step, model=model)
    cut = edges_of(diagnosis)["a", "b"]["cut"]
    assert (cut["source"], cut["where"]) == ("h = h.detach()", diagnosis.findings[0].where)


def test_a_cut_before_the_loss_has_the_code_of_its_finding():
    model = modules_of("a")
    diagnosis = gg.diagnose(lambda: model.a(X).detach().mean(), model=model)
    edge = edges_of(diagnosis)["a", "loss"]
    assert (edge["cut"]["code"], edge["cut"]["where"]) == ("GG201", diagnosis.findings[0].where)


def test_a_cut_inside_a_module():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight * x.detach()

    class Stop(nn.Module):
        def forward(self, x):
            return x.detach()

    for inner, onward in ((Half(), True), (Stop(), False)):
        model = modules_of("a", "b", inner=inner)
        found = edges_of(gg.diagnose(lambda m=model: m.b(m.inner(m.a(X))).mean(), model=model))
        assert "x.detach()" in found["a", "inner"]["cut"]["source"]
        assert found["inner", "b"]["cut"] is None
        assert (found["inner", "b"]["gradient_norm"] is not None) is onward


def test_a_detach_beside_a_living_way_is_no_cut():
    model = modules_of("a", "b")
    found = edges_of(gg.diagnose(lambda: model.b((h := model.a(X)) + h.detach()).mean(), model=model))
    assert found["a", "b"]["cut"] is None
    assert found["a", "b"]["gradient_norm"] > 0


def test_a_cut_that_does_no_harm_is_drawn_all_the_same():
    """A discriminator that looks at what a generator made."""
    model = modules_of("generator", "judge")

    def step():
        fake = model.generator(X)
        model.judge(fake.detach()).mean().backward()
        (-fake).mean().backward()

    diagnosis = gg.diagnose(step, model=model)
    assert not diagnosis.findings
    found = edges_of(diagnosis)
    assert found["generator", "judge"]["cut"]["source"] == "model.judge(fake.detach()).mean().backward()"
    assert found["generator", "loss"]["gradient_norm"] > 0


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def test_the_path_of_a_nan_starts_at_its_birth():
    model = modules_of("a", "b", "beside", root=Root())
    with torch.no_grad():
        model.a.bias.fill_(-9)
    step = lambda: (model.b(model.root(model.a(X))) + model.beside(X)).mean()  # noqa: E731
    diagnosis = gg.diagnose(step, model=model)
    assert path_of(diagnosis) == ["root", "b", "loss"]
    bad = {ends for ends, edge in edges_of(diagnosis).items() if edge["nonfinite"]}
    assert {("root", "b"), ("b", "loss")} <= bad
    assert ("input", "beside") not in bad
    assert module_of(diagnosis, "root")["state"] == "nonfinite"
    assert module_of(diagnosis, "beside")["state"] == "ok"
    assert module_of(diagnosis, "a")["gradient_norm"] == layer_of(diagnosis, "a.weight")["gradient_norm"] == "nan"
    json.dumps(diagnosis.to_dict(), allow_nan=False)


def test_the_path_of_a_gradient_that_went_bad_goes_back():
    model = modules_of("a", "b", "c", root=Root())
    with torch.no_grad():
        model.b.weight.zero_()
        model.b.bias.zero_()
    diagnosis = gg.diagnose(lambda: model.c(model.root(model.b(model.a(X)))).mean(), model=model)
    assert diagnosis.findings[0].code == "GG403"
    assert path_of(diagnosis) == ["root", "b", "a"]
    found = edges_of(diagnosis)
    assert found["b", "root"]["gradient_norm"] in ("inf", "nan")
    assert found["b", "root"]["nonfinite"]
    assert not found["root", "c"]["nonfinite"]


def test_a_nan_that_came_in_with_data_or_weights_or_was_born_in_the_loss():
    model = modules_of("a", "b")
    bad = X.clone()
    bad[1, 1] = math.nan
    assert path_of(gg.diagnose(lambda: model.b(model.a(bad)).mean(), model=model)) == ["input", "a", "b", "loss"]
    assert path_of(gg.diagnose(lambda: (model.a(X) * 0).log().sum() * 0, model=model)) == ["loss"]
    with torch.no_grad():
        model.b.weight[0, 0] = math.inf
    assert path_of(gg.diagnose(lambda: model.b(model.a(X)).pow(2).mean(), model=model)) == ["b", "loss"]


def test_layers_in_a_plain_list_work_for_the_module_that_calls_them():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = nn.Linear(4, 4), [nn.Linear(4, 4), Root()]

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = modules_of("head", inner=Forgetful())
    with torch.no_grad():
        model.inner.layers[0].bias.fill_(-9)
    diagnosis = gg.diagnose(lambda: model.head(model.inner(X)).mean(), model=model)
    assert set(edges_of(diagnosis)) == {("input", "inner"), ("inner", "head"), ("head", "loss")}
    assert path_of(diagnosis) == ["inner", "head", "loss"]


def test_a_mask_of_infinities_and_a_harmless_nan_have_no_path():
    model = modules_of("a", "b")
    future = torch.ones(4, 4).triu(1).bool()

    def step():
        scores = model.a(X)[:4].masked_fill(future, -math.inf)
        return model.b(scores.softmax(dim=-1)).mean()

    diagnosis = gg.diagnose(step, model=model)
    assert diagnosis.graph["nonfinite_path"] == []
    assert all(m["state"] == "ok" for m in diagnosis.graph["modules"])
