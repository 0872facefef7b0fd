"""Trainings to be rewound: every kind of state that a step can write."""

import copy
import random
from collections import deque

import torch
from torch import nn

import gradgate as gg

POISON = 1e4


def stream(steps, poisoned=(), *, seed=0, rows=6):
    """Batches with a target; from each poisoned step on, some with a target far off, which ruins the weights."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    far = {step + more for step in poisoned for more in range(3)}
    for step in range(steps):
        x = torch.randn(rows, 4, generator=generator)
        y = x.sum(1, keepdim=True).tanh() * (POISON if step in far else 1)
        batches.append({"x": x, "y": y, "id": torch.arange(rows) + step * rows})
    return batches


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02), amsgrad=True, foreach=False),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
}


class Training:
    """A model with dropout and BatchNorm, an optimizer, a scheduler, a scaler and an average of the weights."""

    def __init__(self, optimizer="adamw", *, scaled=False, accumulate=1, guarded=False):
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        schedulers = torch.optim.lr_scheduler
        if optimizer in ("sgd", "adamw", "fused"):
            self.scheduler = schedulers.OneCycleLR(self.optimizer, 0.05, total_steps=400)
        else:
            self.scheduler = schedulers.StepLR(self.optimizer, 7, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**4, growth_interval=5)
        self.accumulate = accumulate
        self.guard = gg.Guard(self.model) if guarded else None
        self.losses = []

    @property
    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.average, self.scaler

    def loss_of(self, batch):
        return nn.functional.mse_loss(self.model(batch["x"] * (1 + 0.01 * random.random())), batch["y"])

    def run(self, batches, rewind=None, at_step=None):
        """Train on batches; gives the rewinds."""
        rewound, total = [], 0.0
        for number, batch in enumerate(batches):
            if not rewind and number % self.accumulate == 0:
                total = 0.0
            if self.guard is not None:
                total = self.guard.backward(batch, self.loss_of).loss
            else:
                loss = self.loss_of(batch) / self.accumulate
                self.scaler.scale(loss).backward()
                total = total + loss.detach()
            if (number + 1) % self.accumulate:
                continue
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            if rewind is not None and (done := rewind.observe(total)) is not None:
                rewound.append(done)
            self.optimizer.zero_grad()
            total = 0.0
            if at_step is not None:
                at_step(self)
        return rewound

    def state(self):
        """Everything that the law speaks of."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if not callable(v)},
                "average": self.average.state_dict(),
                "scaler": self.scaler.state_dict(),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
            }
        )


def assert_same(found, wanted, path=""):
    """Compare two trees bit by bit."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), path
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, (list, tuple, deque)):
        assert len(found) == len(wanted), path
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}[{place}]")
    else:
        assert found == wanted, path


def without(batches, rewound, accumulate=1):
    """The stream without the suspects."""
    skipped = {number for one in rewound for number in one.skipped}
    return [batch for place, batch in enumerate(batches) if place // accumulate not in skipped]
