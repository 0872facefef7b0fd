"""Train on damaged digits in Lightning, without and with one more base class.

The handwritten digits of scikit-learn: some files are truncated, some images have a dead sensor (NaN), and some have a
label that does not exist. Lightning stops at the first such file or label; with dead sensors alone it trains on and
ends without an error, but with NaN weights. With `GuardedModule` the weights are those of the training without the
damaged images, bit for bit, and so is the loss that callbacks receive.

Run it: python examples/lightning_digits.py        (needs scikit-learn and lightning, no network; a few seconds)
"""

from __future__ import annotations

import logging
import sys
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import gradgate as gg
from gradgate.integrations.lightning import GuardCallback, GuardedModule

images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
DAMAGED = {number: ("truncated", "dead sensor", "no such label")[number % 3] for number in range(7, 1200, 41)}


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of 8 x 8, and which digit they show."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, damage = images[index].float() / 16, DAMAGED.get(index)
        if damage == "truncated":
            raise OSError(f"digit-{index}.png: truncated file")
        if damage == "dead sensor":
            image[20:28] = torch.nan
        return image, labels[index] + 10 if damage == "no such label" else labels[index]


class Classifier(L.LightningModule):
    """A small network, as written for Lightning alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss, and log it."""
        image, label = batch
        loss = F.cross_entropy(self.net(image), label)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Guarded(GuardedModule, Classifier):
    """The same, guarded."""


def train(module: L.LightningModule, loader: object, *callbacks: L.Callback) -> str:
    """Train for two epochs, and return the last loss that callbacks see."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False, callbacks=list(callbacks), **quiet)
    torch.manual_seed(1)
    try:
        trainer.fit(module, loader)
    except (OSError, IndexError) as error:
        return f"crashed: {error}"
    return f"loss {trainer.callback_metrics['loss'].item():.3f}"


def loader_of(among: set[int]) -> DataLoader[list[torch.Tensor]]:
    """Return batches of 32 of these images."""
    batches = [[number for number in range(start, start + 32) if number in among] for start in range(0, 1200, 32)]
    return DataLoader(Digits(), batch_sampler=batches)


warnings.simplefilter("ignore")  # Lightning advises against loaders as small as these
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("gradgate").setLevel(logging.ERROR)
everything = set(range(1200))
dead = everything - {number for number, damage in DAMAGED.items() if damage != "dead sensor"}

plain, spoilt, guarded, clean = Classifier(), Classifier(), Guarded(), Classifier()
loader = gg.resilient(loader_of(everything))
print("Lightning                      ", train(plain, loader_of(everything)))
print("Lightning, dead sensors only   ", train(spoilt, loader_of(dead)))
print("gradgate                       ", train(guarded, loader, GuardCallback()))
print("Lightning, no damaged image    ", train(clean, loader_of(everything - set(DAMAGED))))

weights, wanted = guarded.state_dict(), clean.state_dict()
same = all(torch.equal(weights[name], wanted[name]) for name in wanted)
found = {incident.sample_id for incident in loader.incidents}
count = len(found) + guarded.guard.summary().dropped // 2
print("the weights and statistics are those of the undamaged images, bit for bit:", "yes" if same else "no")
print(f"damaged images that were dropped, of {len(DAMAGED)}: {count}")
sys.exit(0 if same and count == len(DAMAGED) else 1)
