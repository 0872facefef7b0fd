"""Gates meet sharded tensors (DTensor, as FSDP2 and tensor parallelism make them), in a group of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import gradgate as gg

KEEP = torch.tensor([[True, False, True]]).repeat(4, 1)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gradient_of(gate, mesh):
    """Send ones through the gate of a sharded leaf and of a sharded activation."""
    found = []
    for make in (lambda x: x, lambda x: x * 1):
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
        y = gate(make(x))
        assert isinstance(y, DTensor)
        y.sum().backward()
        found.append(x.grad.to_local())
    assert torch.equal(*found)
    return found[0]


def test_sharded_tensors(mesh):
    sharded = distribute_tensor(KEEP, mesh, [Shard(0)])
    assert torch.equal(gradient_of(lambda x: gg.gate(x, sharded), mesh), KEEP.float())
    assert torch.equal(gradient_of(lambda x: gg.gate(x, lambda g: g > 2), mesh), torch.zeros(4, 3))
    assert torch.equal(gradient_of(gg.reverse_grad, mesh), -torch.ones(4, 3))
    assert torch.equal(gradient_of(gg.finite_grad, mesh), torch.ones(4, 3))
    assert gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0), mesh).norm().item() == pytest.approx(1)
    assert gradient_of(lambda x: gg.clip_grad(x, max_value=0.5), mesh).unique().tolist() == [0.5]


def test_a_mask_for_a_sharded_tensor_has_to_be_sharded_too(mesh):
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        gradient_of(lambda x: gg.gate(x, KEEP), mesh)
