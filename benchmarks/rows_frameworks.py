"""The guard in frameworks: a healthy epoch with it, against the same epoch of the framework alone."""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec

import torch

from benchmarks.harness import Row

STEPS = 30


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


ROWS = [
    Row("integrations", f"healthy epoch in {name}, {STEPS} steps", made, "guarded", "plain",
        at_most=1.03, rounds=15, seconds=20.0)
    for name, made in (("Transformers", transformers_epoch),)
    if find_spec(name.lower())
]  # fmt: skip
