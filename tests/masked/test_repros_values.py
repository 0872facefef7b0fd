"""Problems that users reported, told again with these functions, each with a good end and the number of its story."""

import math

import pytest
import torch

import gradgate as gg
from gradgate import masked

NAN = math.nan


def gradient_of(out, x):
    return torch.autograd.grad(out.sum(), x)[0].tolist()


def test_21_where_sends_no_nan_from_the_branch_that_was_not_taken():
    x = torch.tensor([16.0, 0.0, -4.0], requires_grad=True)
    assert gradient_of(gg.apply_where(x > 0, x, torch.sqrt, otherwise=lambda rest: rest), x) == [0.125, 1.0, 1.0]

    a = torch.tensor(100.0, requires_grad=True)
    out = gg.apply_where(a <= 0, a, torch.exp, otherwise=lambda a: 1 + a)
    assert out.item() == 101.0
    assert gradient_of(out, a) == 1.0


def test_21_a_quotient_overwritten_where_the_divisor_is_zero():
    x = torch.tensor([1.0, 1.0], requires_grad=True)
    divisor = torch.tensor([0.0, 1.0])
    assert gradient_of(masked.safe_divide(x, divisor), x) == [0.0, 1.0]
    assert gradient_of(gg.apply_where(divisor != 0, (x, divisor), torch.div), x) == [0.0, 1.0]


def test_22_choosing_before_the_operation_instead_of_after_it():
    a = torch.arange(4.0, requires_grad=True)
    last = torch.tensor([False, False, False, True])
    assert gradient_of(gg.apply_where(last, a, torch.log), a) == [0.0, 0.0, 0.0, pytest.approx(1 / 3)]

    x = torch.tensor([1.0, 0.0, 2.0, 3.0], requires_grad=True)
    y = torch.tensor([2.0, 0.0, 0.0, 0.0])
    keep = torch.tensor([True, False, True, True])
    angles = gg.apply_where(keep, (y, x), torch.atan2)
    assert gradient_of(masked.mean(angles, keep=keep), x) == [pytest.approx(-2 / 15), 0.0, 0.0, 0.0]


def test_22_a_result_that_is_overwritten_afterwards():
    z = torch.tensor([0.0, 100.0], requires_grad=True)
    f = gg.apply_where(torch.tensor([True, False]), z, lambda z: (z.exp() + 1).log())
    assert f.tolist() == [pytest.approx(math.log(2)), 0.0]
    assert gradient_of(f, z) == [0.5, 0.0]


def test_24_a_nan_that_is_replaced_in_value_and_in_gradient():
    x, w = torch.ones(1, requires_grad=True), torch.tensor([NAN])
    z = gg.apply_where(w.isfinite(), (x, w), torch.mul)
    assert z.tolist() == [0.0]
    assert gradient_of(z, x) == [0.0]


def test_26_norms_and_roots_at_zero():
    x = torch.zeros(3, requires_grad=True)
    zero = [0.0, 0.0, 0.0]
    assert gradient_of(masked.safe_norm(x), x) == zero
    assert gradient_of(masked.safe_sqrt(x.pow(2).sum()), x) == zero
    assert gradient_of(x * masked.safe_pow(x.pow(2).sum(), -0.5), x) == zero
    assert gradient_of(masked.safe_normalize(x), x) == zero

    points = torch.zeros(2, 3, requires_grad=True)
    distances = masked.safe_norm(points[:, None] - points[None], dim=-1)
    assert gradient_of(distances, points) == [zero, zero]


def test_29_a_mode_that_leaves_a_value_out():
    found = masked.mode(torch.tensor([255, 255, 255, 7, 7, 3]), exclude=255)
    assert [result.item() for result in found] == [7, 4, 2]

    padded = torch.tensor([[-100, -100, 5], [-100, -100, -100]])
    found = masked.mode(padded, exclude=-100, empty=-1)
    assert found.values.tolist() == [5, -1]
    assert found.counts.tolist() == [1, 0]

    missing = torch.tensor([NAN, NAN, NAN, 1.0, 1.0, 2.0])
    assert masked.mode(missing).values.isnan()  # kept, they are one value, three times
    assert masked.mode(missing, exclude=NAN).values == 1.0
    assert masked.mode(torch.tensor([NAN, NAN])).counts == 2
    assert masked.mode(torch.tensor([NAN, NAN]), exclude=NAN).counts == 0
