"""The guard is for one process: what waits for others is refused before it can hang."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["ddp", "fsdp"])
def test_a_model_shared_between_processes_is_refused(one_process, wrap):
    model = wrap(torch.nn.Linear(2, 1))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)shared between processes.*ExactMean"):
        gg.Guard(model)
