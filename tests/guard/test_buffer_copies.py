"""Copies of buffers: whatever they are and wherever they lie, they come back to the bit."""

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate._state import BufferCopies

KINDS = {
    "floats": lambda: torch.randn(3, 4),
    "one number": lambda: torch.tensor(7),
    "half": lambda: torch.randn(5).half(),
    "booleans": lambda: torch.tensor([True, False, True]),
    "nothing": lambda: torch.empty(0, 3),
    "with gaps": lambda: torch.randn(4, 6)[:, ::2],
    "transposed": lambda: torch.randn(2, 3).T,
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "part of another": lambda: torch.randn(10)[3:7],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taken_is_put_back(kind):
    tensors = [torch.randn(2), KINDS[kind](), torch.tensor(1)]
    copies = BufferCopies(tensors)
    for _ in range(2):
        before = [tensor.clone() for tensor in tensors]
        copies.take()
        for tensor in tensors:
            tensor.zero_()
        copies.put_back()
        assert all(map(torch.equal, tensors, before))
        for tensor in tensors:
            tensor.copy_(tensor + 1)


def test_a_tensor_that_is_given_other_memory_is_followed():
    tensor = torch.arange(4.0)
    copies = BufferCopies([tensor])
    copies.take()
    tensor.data = torch.arange(4.0) + 10
    copies.take()
    tensor.zero_()
    copies.put_back()
    assert tensor.tolist() == [10, 11, 12, 13]


def test_memory_that_was_freed_is_not_read():
    """The storage shrinks and grows again, as sharded training does with what it does not need at the moment."""
    tensor = torch.arange(4.0)
    copies = BufferCopies([tensor])
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4 * tensor.element_size())
    tensor.copy_(torch.arange(4.0) + 5)
    copies.take()
    tensor.zero_()
    copies.put_back()
    assert tensor.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("change", ["assigned", "data", "added", "a view of the same memory"])
def test_buffers_that_changed_between_steps_are_as_before_the_bad_step(change):
    norm = nn.BatchNorm1d(3)
    guard = gg.Guard(norm)
    guard.backward(torch.randn(8, 3), lambda x: norm(x).square().mean())
    if change == "assigned":
        norm.running_mean = torch.full((3,), 2.0)
    elif change == "data":
        norm.running_mean.data = torch.full((3,), 2.0)
    elif change == "added":
        norm.register_buffer("more", torch.ones(2))
    else:
        norm.running_mean = norm.running_mean.view(3)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    objects = dict(norm.named_buffers())

    def loss_fn(x):
        if change == "added":
            norm.more += 1
        norm(x)
        raise KeyError("every sample")

    with pytest.raises(KeyError):
        guard.backward(torch.randn(8, 3), loss_fn)
    after = dict(norm.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(after[name] is objects[name] for name in objects)


@pytest.mark.parametrize("other", [torch.arange(4.0) + 10, torch.arange(4.0).half(), torch.arange(8.0)[::2]])
def test_a_tensor_that_was_given_other_memory_after_the_copy_is_written_there(other):
    tensor = torch.arange(4.0)
    copies = BufferCopies([tensor])
    copies.take()
    before = tensor.data
    tensor.data = other
    copies.put_back()
    assert tensor.tolist() == [0, 1, 2, 3] == before.tolist()
    tensor.copy_(torch.arange(4) + 1)
    copies.take()
    tensor.zero_()
    copies.put_back()
    assert tensor.tolist() == [1, 2, 3, 4] != before.tolist()


def test_autograd_sees_what_is_put_back():
    tensor = torch.arange(4.0)
    copies = BufferCopies([tensor])
    copies.take()
    weight = torch.ones(4, requires_grad=True)
    product = (weight * tensor).sum()
    copies.put_back()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


SPARSE = {
    "coordinates": lambda: torch.eye(4).to_sparse(),
    "rows": lambda: torch.eye(4).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_model_with_a_sparse_buffer_is_guarded(kind):
    class Neighbours(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("edges", SPARSE[kind]())

        def forward(self, x):
            self.edges.mul_(2)
            return (self.edges @ self.inner(x).T).square().sum(0)

    model = Neighbours()
    x = torch.randn(8, 4)
    x[5] = float("nan")
    assert gg.Guard(model).backward(x, model).kept == [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(model.edges.to_dense(), 2 * torch.eye(4))


@pytest.mark.parametrize("way", ["resize", "data"])
def test_a_buffer_that_grows_in_place_has_its_old_length_before_every_try(way):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)
            self.register_buffer("means", torch.zeros(1))

        def forward(self, x):
            longer = torch.cat([self.means, x.detach().mean().reshape(1)])
            if way == "resize":
                self.means.resize_(len(longer)).copy_(longer)
            else:
                self.means.data = longer
            return self.inner(x)[:, 0]

    model = Growing()
    guard = gg.Guard(model)
    good = torch.randn(8, 4)
    spoilt = torch.where(torch.arange(8)[:, None] == 3, float("nan"), good)
    rows = [0, 1, 2, 4, 5, 6, 7]
    guard.backward(good, model)
    assert guard.backward(spoilt, model).kept == rows
    guard.backward(good, model)
    assert model.means.tolist() == [0.0, good.mean().item(), good[rows].mean().item(), good.mean().item()]
