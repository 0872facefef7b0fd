"""`watch` and the doctor on models that FSDP2 shards, over one and two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradgate as gg
from gradgate.errors import BadStepError

SCRIPT = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def train_sharded(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.watch(model, optimizer) as watch:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).mean().backward()
                optimizer.step()
            assert watch.bad_steps == 0
            model(torch.full((3, 4), torch.nan)).mean().backward()
            with pytest.raises(BadStepError, match=r"0\.weight"):
                optimizer.step()
        path = Path(folder) / f"train{rank}.py"
        path.write_text(SCRIPT)
        report = gg.doctor.examine_script(path)
        assert (report.exit_code, report.steps) == (0, 4)
        assert report.diagnosis.healthy, str(report.diagnosis)
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_model_is_watched_and_examined(tmp_path, world):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(train_sharded, (world, str(tmp_path)), nprocs=world)


@pytest.mark.distributed
def test_the_first_rank_prints_for_all(tmp_path):
    """Under torchrun the findings are printed and written once; other ranks name theirs in one line of stderr."""
    script = SCRIPT.replace("    optimizer.zero_grad()\n", "").replace(
        "torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)"
    )
    (tmp_path / "train.py").write_text(script + "del model, optimizer\ntorch.distributed.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradgate"]
    done = subprocess.run(
        [*command, "doctor", "--json", "found.json", "--fail-on", "never", "train.py"],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    title = "gradients grow from step to step: zero_grad is missing"
    assert done.stdout.count(title) == 1, done.stdout + done.stderr
    (finding,) = [one for one in json.loads((tmp_path / "found.json").read_text())["findings"] if one["title"] == title]
    assert f"gradgate doctor, rank 1: {finding['code']} ({finding['severity']})" in done.stderr
