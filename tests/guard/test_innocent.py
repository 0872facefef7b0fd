"""Never blame the innocent: models and losses in which a probe can fail for a reason that is not the sample's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg
from tests.guard.cases import random_case


def dropped(result):
    return [incident.row for incident in result.dropped]


def test_batchnorm_that_refuses_single_rows():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x, bad = torch.randn(9, 3), torch.zeros(9)
    bad[6] = 1

    def loss_fn(batch):
        out = model(batch[0])
        if bool(batch[1].any()):
            raise ValueError("bad row")
        return out.mean()

    assert dropped(gg.Guard(model).backward((x, bad), loss_fn)) == [6]


@pytest.mark.parametrize("size", [8, 16])
def test_a_reshape_that_depends_on_the_size_of_the_batch(size):
    """The model looks at samples in fours; four of them are bad, so the reduced batch can still run."""
    model = nn.Linear(12, 1)

    def loss_fn(batch):
        x, bad = batch
        if bool(bad.any()):
            raise ValueError("bad row")
        return model(x.reshape(-1, 12)).mean()

    x, bad = torch.randn(size, 3), torch.zeros(size)
    bad[[0, 3, 5, 6]] = 1
    result = gg.Guard(model).backward((x, bad), loss_fn)
    assert dropped(result) == [0, 3, 5, 6]
    assert result.exact


def test_a_reshape_that_comes_before_the_fault():
    model = nn.Linear(12, 1)

    def loss_fn(batch):
        x, bad = batch
        out = model(x.reshape(-1, 12))
        if bool(bad.reshape(-1, 4).any()):
            raise ValueError("bad row")
        return out.mean()

    x, bad = torch.randn(16, 3), torch.zeros(16)
    bad[4:8] = 1
    result = gg.Guard(model).backward((x, bad), loss_fn)
    assert dropped(result) == [4, 5, 6, 7]


def test_a_model_that_needs_two_rows():
    model = nn.Linear(3, 1)

    def loss_fn(batch):
        x, bad = batch
        if len(x) < 2:
            raise ValueError("needs two rows")
        if bool(bad.any()):
            raise ValueError("bad row")
        return model(x).var()

    x, bad = torch.randn(7, 3), torch.zeros(7)
    bad[2] = 1
    assert dropped(gg.Guard(model).backward((x, bad), loss_fn)) == [2]


def test_samples_whose_label_is_ignored_are_not_bad():
    """Alone, each of them has a loss of 0 / 0; together with others they have none at all."""
    model = nn.Linear(3, 4)
    x, y = torch.randn(12, 3), torch.randint(0, 4, (12,))
    y[[0, 1, 2, 3, 4, 5, 6, 8]] = -100
    x[10] = float("nan")
    result = gg.Guard(model).backward((x, y), lambda b: F.cross_entropy(model(b[0]), b[1]))
    assert dropped(result) == [10]


def test_missing_values_that_the_model_handles_are_not_bad():
    """Rows 1 and 5 hold NaN for missing, which the model replaces; row 7 overflows later."""

    class Imputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, x, factor):
            x = torch.where(x.isnan(), 0.0, x)
            return self.last(self.norm(self.first(x) * factor[:, None]))

    model = Imputing()
    x, factor = torch.randn(10, 3), torch.ones(10)
    x[[1, 5], 0] = float("nan")
    factor[7] = float("inf")
    assert dropped(gg.Guard(model).backward((x, factor), lambda b: model(*b).mean())) == [7]


def test_outputs_that_the_loss_leaves_out_are_not_bad():
    model = nn.Linear(3, 1)
    x, keep, weight = torch.randn(10, 3), torch.ones(10, dtype=torch.bool), torch.ones(10)
    x[[2, 4]] = float("nan")
    keep[[2, 4]] = False
    weight[8] = float("inf")

    def loss_fn(batch):
        x, keep, weight = batch
        return (model(x)[:, 0][keep] * weight[keep]).mean()

    # The rows left out spoil no loss, but their gradients are 0 * NaN: the weights would be spoilt by them, too.
    result = gg.Guard(model).backward((x, keep, weight), loss_fn)
    assert dropped(result) == [2, 4, 8]
    assert [incident.cause for incident in result.dropped] == ["non-finite gradient"] * 2 + ["non-finite loss"]
    model.weight.requires_grad_(False)  # the bias sees only the gradient of the output, which is 0 there
    assert dropped(gg.Guard(model).backward((x, keep, weight), loss_fn)) == [8]


def test_a_mask_of_minus_infinity_is_not_a_fault():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    head = nn.BatchNorm1d(4)
    x = torch.randn(8, 5, 4)
    padding = torch.zeros(8, 5)
    padding[::2, 3:] = float("-inf")
    x[3, 0, 0] = float("nan")

    def loss_fn(batch):
        x, padding = batch
        return head(model(x, src_key_padding_mask=padding)[:, 0]).square().mean()

    assert dropped(gg.Guard([model, head]).backward((x, padding), loss_fn)) == [3]


def test_a_batch_as_long_as_it_is_wide_is_not_mistaken():
    """Time comes first and is as long as the batch: rows of inner tensors are time steps, not samples."""
    rnn, head = nn.GRU(3, 4), nn.Linear(4, 1)
    x = torch.randn(6, 6, 3)
    x[4, 2] = float("nan")  # sample 2 at time 4
    guard = gg.Guard([rnn, head], batch_dim=1)
    result = guard.backward(x, lambda x: head(rnn(x)[0][-1]).square().mean())
    assert dropped(result) == [2]

    class Watching(nn.Module):
        def forward(self, x):
            if bool(x.isnan().any()):
                raise ValueError("NaN")
            return x

    watch = Watching()
    result = gg.Guard([rnn, head, watch], batch_dim=1).backward(x, lambda x: head(rnn(watch(x))[0][-1]).mean())
    assert dropped(result) == [2]


def test_rows_of_an_inner_tensor_that_are_not_samples_are_put_back():
    """The module that raises gets classes along dim 0, as many as there are samples: its rows are not to blame."""
    model = nn.Linear(3, 6)

    class ByClass(nn.Module):
        def forward(self, scores):
            if bool((scores[4] > 1e4).any()):
                raise ValueError("class 4 is too sure")
            return scores

    by_class = ByClass()

    def loss_fn(x):
        return by_class(model(x).T).mean()

    model.weight.data.fill_(1)
    x = torch.randn(6, 3)
    x[1] = 1e6
    assert dropped(gg.Guard([model, by_class]).backward(x, loss_fn)) == [1]


def test_a_fault_that_hangs_on_a_draw_is_found_at_its_place():
    """Dropout makes NaN of an infinite row or lets it pass to tanh, by its place in the batch."""
    model, loss_fn, _, batches, bad = random_case(701_290)
    result = gg.Guard(model).backward(batches[-1], loss_fn)
    assert result.exact
    assert dropped(result) == bad
