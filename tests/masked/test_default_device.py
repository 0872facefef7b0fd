"""Where torch.set_default_device says that new tensors go elsewhere, tensors of the CPU stay on the CPU."""

import pytest
import torch

from gradgate import masked
from tests.masked.laws import LAWS


@pytest.fixture
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def value_and_gradient(fn, x):
    value = fn(x)
    gradient = torch.autograd.grad(value.sum(), x, materialize_grads=True)[0] if value.requires_grad else value
    return value.detach(), gradient


@pytest.mark.parametrize("shape", [(3, 5), (30, 3001)])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_reductions(law, shape, request):
    x, keep = torch.randn(shape, requires_grad=True), torch.rand(shape) < 0.8
    expected = value_and_gradient(lambda x: law.fn(x, 1, keep=keep, empty=0), x)
    request.getfixturevalue("elsewhere")
    found = value_and_gradient(lambda x: law.fn(x, 1, keep=keep, empty=0), x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_mode(dtype, size, request):
    for spread in (2, 200):
        x = torch.randint(0, spread, (4, size)).to(dtype)
        keep = torch.rand(4, size) < 0.8
        expected = [masked.mode(x, keep=keep, empty=0), masked.mode(x)]
        with torch.device("meta"):
            found = [masked.mode(x, keep=keep, empty=0), masked.mode(x)]
        assert all(map(torch.equal, found[0] + found[1], expected[0] + expected[1]))


def test_bytes(elsewhere):
    x = torch.tensor([1, 255, 3], dtype=torch.uint8, device="cpu")
    assert masked.sum(x, exclude=255) == 4
