"""The guard in frameworks: a healthy epoch with it, against the same epoch of the framework alone."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Row

STEPS, BATCH = 30, 64


def transformers_epoch():
    """Line up `Trainer.train` and `GuardedTrainer.train` on a language model of 0.4 M parameters."""
    import transformers

    from gradgate.integrations.transformers import GuardedTrainer

    tokens = torch.randint(256, (8 * STEPS, 32))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    transformers.logging.set_verbosity_error()

    def run(kind):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
        )
        with tempfile.TemporaryDirectory() as folder:  # nothing is written to it
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=8, num_train_epochs=1, dataloader_pin_memory=False, **quiet
            )
            trainer = kind(transformers.LlamaForCausalLM(config), arguments, train_dataset=data)

        def epoch() -> None:
            with contextlib.redirect_stdout(None):
                trainer.train()

        return epoch

    return {"plain": run(transformers.Trainer), "guarded": run(GuardedTrainer)}


def network() -> nn.Module:
    """Give a network whose step takes some milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 1))


def batches() -> DataLoader:
    """Give a loader that costs next to nothing."""
    x = torch.randn(STEPS, BATCH, 512)
    return DataLoader(TensorDataset(x, x.mean(2)), batch_size=None)


def accelerate_epoch():
    """Line up `accelerator.backward` and `AcceleratedGuard.backward`."""
    from accelerate import Accelerator

    from gradgate.integrations.accelerate import AcceleratedGuard

    def run(guarded: bool):
        accelerator = Accelerator(cpu=True)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
        guard = AcceleratedGuard(accelerator, model)

        def loss_fn(batch):
            x, y = batch
            return F.mse_loss(model(x).squeeze(-1), y)

        def epoch() -> None:
            for batch in loader:
                optimizer.zero_grad()
                if guarded:
                    guard.backward(batch, loss_fn)
                else:
                    accelerator.backward(loss_fn(batch))
                optimizer.step()

        return epoch

    return {"plain": run(False), "guarded": run(True)}


def lightning_epoch():
    """Line up `Trainer.fit` of a LightningModule and of a GuardedModule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning as L

        from gradgate.integrations.lightning import GuardedModule

    class Plain(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.mse_loss(self.model(x).squeeze(-1), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-6)

    class Guarded(GuardedModule, Plain):
        pass

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    loader = batches()

    def run(kind):
        module = kind()
        trainer = L.Trainer(max_epochs=0, accelerator="cpu", enable_progress_bar=False, **quiet)

        def epoch() -> None:
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(module, loader)

        return epoch

    return {"plain": run(Plain), "guarded": run(Guarded)}


ROWS = [
    Row("integrations", f"healthy epoch in {name}, {STEPS} steps", made, "guarded", "plain",
        at_most=1.03, rounds=15, seconds=20.0)
    for name, made in (
        ("Transformers", transformers_epoch), ("Accelerate", accelerate_epoch), ("Lightning", lightning_epoch)
    )
    if find_spec(name.lower())
]  # fmt: skip
