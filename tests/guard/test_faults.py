"""Each kind of fault on its own: who is blamed, for what, and where."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg


class Refusing(nn.Module):
    def forward(self, x):
        if bool((x > 1e4).any()):
            raise ValueError("too large")  # the line that incidents name
        return x


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def step_of(model, batch, loss_fn, **options):
    return gg.Guard(model, **options).backward(batch, loss_fn)


def rows(step):
    return [incident.row for incident in step.dropped]


def test_an_exception_in_a_module_names_the_line_and_the_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), Refusing()), nn.Linear(3, 1))
    model[0].weight.data = torch.eye(3)
    model[1][0] = nn.Identity()
    x = torch.randn(12, 3)
    x[[4, 9]] = 1e6
    step = step_of(model, x, lambda x: model(x).mean())
    assert rows(step) == [4, 9]
    incident = step.dropped[0]
    assert (incident.stage, incident.cause, incident.module) == ("forward", "exception", "1.1")
    assert incident.exception_type == "ValueError"
    assert incident.message == "too large"
    path, line = incident.where.rsplit(":", 1)
    assert path.endswith("test_faults.py")
    assert "too large" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_an_exception_in_the_loss_has_no_module():
    model = nn.Linear(3, 1)

    def loss_fn(batch):
        x, weight = batch
        out = model(x)
        if bool((weight < 0).any()):
            raise ArithmeticError("a negative weight")
        return (out[:, 0] * weight).mean()

    weight = torch.ones(10)
    weight[7] = -1
    step = step_of(model, (torch.randn(10, 3), weight), loss_fn)
    assert rows(step) == [7]
    assert (step.dropped[0].stage, step.dropped[0].module) == ("loss", None)
    assert step.dropped[0].message == "a negative weight"


def test_a_value_born_in_a_module_is_laid_to_that_module_though_batchnorm_spreads_it():
    model = nn.Sequential(nn.Linear(3, 3), Log(), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].weight.data, model[0].bias.data = torch.eye(3), torch.zeros(3)
    x = torch.rand(16, 3) + 1
    x[5] = -1
    step = step_of(model, x, lambda x: model(x).mean())
    assert rows(step) == [5]
    incident = step.dropped[0]
    assert (incident.stage, incident.cause, incident.module) == ("forward", "non-finite loss", "1")
    assert incident.where.rsplit(":", 1)[0].endswith("test_faults.py")


def test_a_ctc_loss_that_is_infinite_for_one_sample():
    model = nn.Linear(4, 5)
    lengths = torch.full((6,), 8)
    targets = torch.randint(1, 5, (6, 4))
    target_lengths = torch.full((6,), 4)
    lengths[2] = 2  # fewer frames than labels

    def loss_fn(batch):
        x, frames, labels, label_lengths = batch
        log_probs = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, labels, frames, label_lengths, reduction="none") / label_lengths

    step = step_of(model, (torch.randn(6, 8, 4), lengths, targets, target_lengths), loss_fn)
    assert rows(step) == [2]
    assert step.dropped[0].loss == float("inf")
    assert step.losses.shape == (5,)


def test_a_batched_factorisation_that_raises_for_one_singular_matrix():
    model = nn.Linear(9, 9)
    model.weight.data, model.bias.data = torch.eye(9), torch.zeros(9)

    def loss_fn(x):
        a = model(x).reshape(-1, 3, 3)
        return torch.linalg.inv(a).square().mean()

    x = torch.randn(8, 9)
    x[6] = 0
    step = step_of(model, x, loss_fn)
    assert rows(step) == [6]
    assert "singular" in step.dropped[0].message


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda h, zero: (h.square().sum(1) * zero).sqrt(),  # sqrt at 0
        lambda h, zero: (h * zero[:, None]).pow(2).sum(1).pow(0.5),  # norm at 0
        lambda h, zero: (h.sum(1) * zero).pow(0.3),  # a power at 0
    ],
    ids=["sqrt", "norm", "power"],
)  # fmt: skip
def test_a_finite_loss_with_a_gradient_that_is_not(loss_of):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    zero = torch.ones(10)
    zero[[1, 8]] = 0
    step = step_of(model, (torch.randn(10, 4), zero), lambda batch: loss_of(model(batch[0]), batch[1]).mean())
    assert rows(step) == [1, 8]
    assert {(i.stage, i.cause) for i in step.dropped} == {("backward", "non-finite gradient")}
    assert not torch.tensor(step.dropped[0].grad_norm).isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_gradient_born_behind_batchnorm_is_not_laid_to_everyone():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))

    def loss_fn(batch):
        x, zero = batch
        return (model(x).square().sum(1) * zero).sqrt().mean()

    zero = torch.ones(12)
    zero[3] = 0
    step = step_of(model, (torch.randn(12, 3), zero), loss_fn)
    assert rows(step) == [3]


def test_a_weight_gradient_that_overflows_where_no_activation_does():
    """Both factors are finite in every row; only their product over the batch is not."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1e-30)
    x = torch.ones(6, 2)
    x[4] = 1e30
    scale = torch.ones(6)
    scale[4] = 1e20

    step = step_of(model, (x, scale), lambda batch: (model(batch[0])[:, 0] * batch[1]).mean())
    assert rows(step) == [4]
    assert step.dropped[0].cause == "non-finite gradient"
    assert step.dropped[0].details["tried"] == "search with the whole function"


def test_several_faults_of_several_kinds_in_one_batch():
    model = nn.Sequential(nn.Linear(3, 3), Refusing(), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].weight.data = torch.eye(3)
    x = torch.randn(20, 3)
    zero, spoil = torch.ones(20), torch.zeros(20)
    x[2], x[11] = 1e6, float("nan")
    zero[5] = 0
    spoil[17] = float("inf")

    def loss_fn(batch):
        x, zero, spoil = batch
        return ((model(x).square().sum(1) * zero).sqrt() + spoil).mean()

    step = step_of(model, (x, zero, spoil), loss_fn)
    assert {i.row: i.cause for i in step.dropped} == {
        2: "exception",
        5: "non-finite gradient",
        11: "non-finite loss",
        17: "non-finite loss",
    }
    assert step.exact


def pair_loss(model):
    """A loss with the distances of all pairs: two equal samples give NaN, each alone does not."""

    def loss_fn(x):
        h = model(x)
        squares = (h[:, None] - h[None]).square().sum(-1) + torch.eye(len(h))
        return squares.sqrt().mean()

    return loss_fn


def test_samples_that_are_bad_only_together_are_dropped_together():
    model = nn.Linear(3, 2)
    x = torch.randn(10, 3)
    x[7] = x[2]
    step = step_of(model, x, pair_loss(model))
    assert rows(step) == [2, 7]
    assert {i.cause for i in step.dropped} == {"together"}
    assert step.dropped[0].details["together_with"] == [7]
    assert step.dropped[0].details["fault"] == "non-finite gradient"


@pytest.mark.parametrize("pair", [(0, 1), (0, 5), (2, 3), (4, 9), (8, 9)])
def test_an_exception_that_needs_two_samples(pair):
    model = nn.Linear(3, 2)

    def loss_fn(batch):
        x, key = batch
        if len(set(key.tolist())) < len(key):
            raise KeyError("twice the same key")
        return model(x).mean()

    key = torch.arange(10)
    key[pair[1]] = key[pair[0]]
    step = step_of(model, (torch.randn(10, 3), key), loss_fn)
    assert rows(step) == sorted(pair)
    assert {i.cause for i in step.dropped} == {"together"}


def test_a_token_that_the_vocabulary_does_not_have():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randint(0, 10, (16, 3))
    x[5, 1], x[9, 0] = 99, -3
    step = step_of(model, x, lambda x: model(x).mean())
    assert rows(step) == [5, 9]
    assert step.dropped[0].module == "0"


def test_a_label_that_the_head_does_not_have():
    model = nn.Linear(4, 3)
    y = torch.randint(0, 3, (16,))
    y[4] = 7
    step = step_of(model, (torch.randn(16, 4), y), lambda b: F.cross_entropy(model(b[0]), b[1]))
    assert rows(step) == [4]
    assert "Target 7 is out of bounds" in step.dropped[0].message


def test_a_module_that_runs_twice_and_takes_keywords():
    class Scaling(nn.Module):
        def forward(self, x, scale=1.0):
            if bool((x.abs() > 1e4).any()):
                raise ValueError("too large")
            return x * scale

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaling, self.linear = Scaling(), nn.Linear(4, 4)

        def forward(self, x, factor):
            return self.scaling(x=self.linear(self.scaling(x, scale=2)) * factor[:, None], scale=3)

    model, factor = Twice(), torch.ones(12)
    factor[3] = 1e9
    assert rows(step_of(model, (torch.randn(12, 4), factor), lambda b: model(*b).mean())) == [3]


def test_an_exception_in_backward():
    class Fussy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mark):
            ctx.save_for_backward(mark)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if bool((ctx.saved_tensors[0] > 0).any()):
                raise FloatingPointError("not on the way back")
            return grad, None

    model = nn.Linear(2, 2)
    mark = torch.zeros(9)
    mark[4] = 1
    step = step_of(model, (torch.randn(9, 2), mark), lambda b: Fussy.apply(model(b[0]), b[1]).mean())
    assert rows(step) == [4]
    assert (step.dropped[0].stage, step.dropped[0].exception_type) == ("backward", "FloatingPointError")
