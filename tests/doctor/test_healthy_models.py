"""Ordinary models that learn as they should: the doctor says so, whatever they are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def mlp():
    m = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(), nn.LayerNorm(16), nn.Linear(16, 3))
    return m, lambda: m(torch.randn(8, 5))


def cnn():
    m = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 3),
    )
    return m, lambda: m(torch.randn(8, 3, 16, 16))


def lstm():
    m = nn.ModuleDict(
        {
            "table": nn.Embedding(10, 6, padding_idx=0),
            "lstm": nn.LSTM(6, 7, 2, batch_first=True),
            "head": nn.Linear(7, 3),
        }
    )
    tokens = torch.randint(0, 10, (8, 4))
    return m, lambda: m.head(m.lstm(m.table(tokens))[0][:, -1])


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    m = nn.ModuleDict({"body": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": nn.Linear(8, 3)})
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(8, 5, dtype=torch.bool)
    padding[:, 4] = True
    padding = torch.zeros(8, 5).masked_fill(padding, float("-inf"))
    return m, lambda: m.head(m.body(torch.randn(8, 5, 8), mask=mask, src_key_padding_mask=padding).mean(dim=1))


def checkpointed(reentrant):
    m = nn.ModuleDict({"first": nn.Linear(5, 5), "rest": nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))})
    return m, lambda: checkpoint(m.rest, m.first(torch.randn(8, 5)), use_reentrant=reentrant)


def autocast(dtype):
    m, forward = mlp()

    def run():
        with torch.autocast("cpu", dtype=dtype):
            return forward()

    return m, run


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lstm,
    "transformer": transformer,
    "checkpointed": lambda: checkpointed(False),
    "checkpointed re-entrantly": lambda: checkpointed(True),
    "bfloat16": lambda: autocast(torch.bfloat16),
    "float16": lambda: autocast(torch.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [True, False], ids=["model given", "no model"])
def test_it_is_healthy(name, given):
    m, forward = MODELS[name]()
    optimizer = torch.optim.AdamW(m.parameters())

    def step():
        optimizer.zero_grad()
        F.cross_entropy(forward(), LABELS).backward()
        optimizer.step()

    for _ in range(2):
        diagnosis = gg.diagnose(step, model=m if given else None)
        assert diagnosis.healthy, str(diagnosis)
        assert not diagnosis.findings


@pytest.mark.parametrize("name", MODELS)
def test_the_tracer_changes_nothing(name):
    torch.manual_seed(3)
    m, forward = MODELS[name]()
    start = {key: value.clone() for key, value in m.state_dict().items()}

    def gradients(run):
        m.load_state_dict(start)
        m.zero_grad()
        torch.manual_seed(4)
        run(lambda: F.cross_entropy(forward(), LABELS).backward())
        return [p.grad.clone() for p in m.parameters()], m.state_dict()

    plain, state = gradients(lambda step: step())
    state = {key: value.clone() for key, value in state.items()}
    traced, traced_state = gradients(lambda step: gg.diagnose(step, model=m))
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert all(torch.equal(state[key], traced_state[key]) for key in state)


@pytest.mark.slow
def test_a_compiled_model_runs_uncompiled_and_it_is_said():
    torch._dynamo.reset()  # other tests may have used up its limit of compilations
    m = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(8, 5)
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(m, backend=backend)
    diagnosis = gg.diagnose(lambda: F.cross_entropy(compiled(x), LABELS), model=compiled)
    assert diagnosis.healthy
    assert [finding.code for finding in diagnosis.findings] == ["GG001"]
    assert "without torch.compile" in diagnosis.findings[0].title
    assert not seen
    compiled(x)
    assert seen


def test_a_fault_in_a_compiled_model_is_named_by_its_line():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(self.a(x).detach())

    model = torch.compile(Cut(), backend="eager")
    finding = gg.diagnose(lambda: model(torch.randn(8, 5)).mean(), model=model).findings[0]
    assert finding.source == "return self.b(self.a(x).detach())"
    assert finding.module == "a"


def test_two_networks_and_a_target_network():
    generator, critic, target = nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(5, 1)
    first, second = (torch.optim.Adam(m.parameters()) for m in (generator, critic))
    x = torch.randn(8, 5)

    def step():
        second.zero_grad()
        with torch.no_grad():
            goal = target(x)
        (F.softplus(critic(generator(x).detach())) + (critic(x) - goal).pow(2)).mean().backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(generator(x))).mean().backward()
        first.step()

    for _ in range(2):
        diagnosis = gg.diagnose(step)
        assert diagnosis.healthy, str(diagnosis)


def test_a_gradient_penalty():
    critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = torch.randn(8, 5).requires_grad_()

    def step():
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean() + critic(x).mean()

    diagnosis = gg.diagnose(step, model=critic)
    assert diagnosis.healthy, str(diagnosis)
