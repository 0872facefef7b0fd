"""Slow and obvious: loops over pairs, windows and queries, with what is left out removed."""

import itertools
import math

import torch


def _stacked(rows, shape, like):
    return torch.stack(rows).reshape(shape) if rows else like.new_zeros(shape)


def _pairs(x, keep, of_pair):
    keep = keep.expand(x.shape)
    found = []
    for i, j in itertools.product(range(len(x)), repeat=2):
        both = keep[i] & keep[j]
        found.append(of_pair(x[i][both], x[j][both]))
    return _stacked(found, (len(x), len(x)), x)


def cov(x, keep, correction=1):
    def of_pair(a, b):
        if len(a) <= correction:
            return x.new_full((), math.nan)
        return ((a - a.mean()) * (b - b.mean()).conj()).sum() / (len(a) - correction)

    return _pairs(x, keep, of_pair)


def corrcoef(x, keep):
    def of_pair(a, b):
        a, b = a - a.mean() if len(a) else a, b - b.mean() if len(b) else b
        if (a.abs() < 1e-12).all() or (b.abs() < 1e-12).all():
            return x.new_full((), math.nan)
        return (a * b.conj()).sum() / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))

    return _pairs(x, keep, of_pair)


def histogram(x, keep, edges, weights):
    """The weights in each bin, or the counts."""
    found = []
    for low, high in itertools.pairwise(edges.tolist()):
        inside = keep & (x >= low) & ((x <= high) if high == edges[-1] else (x < high))
        found.append(inside.sum() if weights is None else weights[inside & (weights != 0)].sum())
    return torch.stack(found)


def _windows(sizes, kernel, stride, padding, dilation):
    """For each place of the result, which places of the kernel meet which places of x."""
    spans = [
        range((n + 2 * padding - dilation * (k - 1) - 1) // stride + 1) for n, k in zip(sizes, kernel, strict=True)
    ]
    for place in itertools.product(*spans):
        meets = []
        for inner in itertools.product(*map(range, kernel)):
            outer = [p * stride - padding + t * dilation for p, t in zip(place, inner, strict=True)]
            if all(0 <= o < n for o, n in zip(outer, sizes, strict=True)):
                meets.append((inner, tuple(outer)))
        yield place, meets


def _result_shape(sizes, kernel, stride, padding, dilation):
    return [(n + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(sizes, kernel, strict=True)]


def pool(x, keep, kernel, of_kept, stride=None, padding=0, dilation=1):
    options = (kernel, kernel[0] if stride is None else stride, padding, dilation)
    keep = keep.expand(x.shape)
    found = []
    for n, c in itertools.product(range(len(x)), range(x.shape[1])):
        for _, meets in _windows(x.shape[2:], *options):
            own = [x[(n, c, *place)] for _, place in meets if keep[(n, c, *place)]]
            found.append(of_kept(torch.stack(own)) if own else x.new_full((), math.nan))
    return _stacked(found, [*x.shape[:2], *_result_shape(x.shape[2:], *options)], x)


def largest(kept):
    return kept[kept.detach().argmax()]


def conv(x, weight, bias, keep, stride=1, padding=0, dilation=1, groups=1):
    options = (weight.shape[2:], stride, padding, dilation)
    keep = keep.expand(x.shape)
    per_group = len(weight) // groups
    found = []
    for n, out in itertools.product(range(len(x)), range(len(weight))):
        first = out // per_group * weight.shape[1]
        for _, meets in _windows(x.shape[2:], *options):
            spots = [(c, *spot) for c in range(weight.shape[1]) for spot in meets]
            own = [
                weight[(out, c, *inner)] * x[(n, first + c, *outer)]
                for c, inner, outer in spots
                if keep[(n, first + c, *outer)]
            ]
            found.append(sum(own) * (len(spots) / len(own)) + bias[out] if own else x.new_zeros(()))
    return _stacked(found, [len(x), len(weight), *_result_shape(x.shape[2:], *options)], x)


def attention(query, key, value, keep):
    """Batches one by one, queries one by one, their own keys alone."""
    found = []
    for n, i in itertools.product(range(len(query)), range(query.shape[1])):
        own = keep[n, i]
        scores = key[n][own] @ query[n, i] / math.sqrt(query.shape[-1])
        found.append(scores.softmax(0) @ value[n][own] if own.any() else value.new_zeros(value.shape[-1]))
    return _stacked(found, [*query.shape[:2], value.shape[-1]], query)
