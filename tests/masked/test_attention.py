"""Attention built on masked.softmax: a fully padded sample changes nothing for the others."""

import math

import pytest
import torch

from gradgate import masked


class Attention(torch.nn.Module):
    """What torch.nn.MultiheadAttention(need_weights=True) computes, with the softmax exchanged."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inside = torch.nn.Linear(width, 3 * width)
        self.outside = torch.nn.Linear(width, width)

    def forward(self, x, keep):
        batch, length, width = x.shape
        q, k, v = self.inside(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(width // self.heads)
        weights = masked.softmax(scores, dim=-1, keep=keep[:, None, None, :])
        return self.outside((weights @ v).transpose(1, 2).reshape(batch, length, width)), weights


def gradients(model, x, keep):
    model.zero_grad()
    out, weights = model(x, keep)
    per_sample = masked.mean(out.square(), (1, 2), keep=keep[:, :, None], empty=0.0)
    (per_sample.sum() + weights.square().sum()).backward()
    return out, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("length", "width"), [(5, 8), (40, 16)])
def test_gradients_are_those_of_the_batch_without_the_padded_sample(length, width):
    model = Attention(width, 2)
    x = torch.randn(4, length, width)
    keep = torch.arange(length) < torch.tensor([length, 3, 0, 2])[:, None]
    out, ours = gradients(model, x, keep)
    rest = [0, 1, 3]
    theirs_out, theirs = gradients(model, x[rest], keep[rest])
    torch.testing.assert_close(out[rest], theirs_out)
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_it_is_torchs_attention_where_nothing_is_fully_padded():
    width, heads = 8, 2
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True)
    ours = Attention(width, heads)
    with torch.no_grad():
        ours.inside.weight.copy_(theirs.in_proj_weight)
        ours.inside.bias.copy_(theirs.in_proj_bias)
        ours.outside.weight.copy_(theirs.out_proj.weight)
        ours.outside.bias.copy_(theirs.out_proj.bias)
    x, keep = torch.randn(3, 6, width), torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    expected, weights = theirs(x, x, x, key_padding_mask=~keep, average_attn_weights=False)
    out, our_weights = ours(x, keep)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(our_weights, weights)


@pytest.mark.slow
def test_a_compiled_attention_gives_the_same():
    model = Attention(8, 2)
    x, keep = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [False] * 5])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, keep)[0], model(x, keep)[0])
