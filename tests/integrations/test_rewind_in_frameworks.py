"""`rewind=` in the loops of the frameworks: weights are those of the framework's own run without the suspects."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gradgate.errors import ArgumentTypeError, TooManyRewinds

pytest.importorskip("transformers")
pytest.importorskip("lightning")

import lightning as L
from accelerate.state import AcceleratorState
from torchmetrics import MeanSquaredError
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gradgate.integrations.lightning import GuardCallback, GuardedModule
from gradgate.integrations.transformers import GuardedTrainer
from tests.integrations.faulty import equal, run_ranks
from tests.integrations.test_accelerate import Ruinous as RuinousPairs
from tests.integrations.test_accelerate import rewound as accelerated

pytestmark = pytest.mark.slow  # importing its framework is

ROWS, BATCH = 240, 2
SCHEDULE = {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 5}  # whatever the number of steps of the training


class Ruinous(Dataset):
    """Samples in order; some of them, all finite, ruin the weights."""

    def __init__(self, bad=(), without=()):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, 3, generator=generator)
        self.y = self.x.sum(1)
        self.y[list(bad)] *= 1e4
        self.rows = [row for row in range(ROWS) if row not in without]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        row = self.rows[place]
        return {"x": self.x[row], "y": self.y[row]}


class TwoEpochs(Ruinous):
    """Samples of which the first epoch sees one half, and the second the other."""

    def __init__(self, bad=(), without=()):
        super().__init__(())
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2 * ROWS, 3, generator=generator)
        self.y = self.x.sum(1)
        self.y[list(bad)] *= 1e4
        self.halves = [[r for r in rows if r not in without] for rows in (range(ROWS), range(ROWS, 2 * ROWS))]
        self.rows = self.halves.pop(0)

    def __getitem__(self, place):
        item = super().__getitem__(place)
        if place == len(self.rows) - 1 and self.halves:
            self.rows = self.halves.pop()
        return item


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8)
        self.dropout, self.last = torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)

    def forward(self, x, y):
        out = self.last(self.dropout(self.norm(self.first(x)))).squeeze(-1)
        return {"loss": (out - y).square().mean(), "out": out}


def rows_of(steps, window, ranks=1):
    """The rows that some steps were made of."""
    size = BATCH * window * ranks
    return {step * size + row for step in steps for row in range(size)}


def bad_rows(window):
    return range(160, 160 + 3 * BATCH * window)


# --- Transformers ---------------------------------------------------------------------------------------------------


def arguments(folder, window=1, **settings):
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=window,
        learning_rate=0.02,
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"num_train_epochs": 1, "logging_strategy": "no", "save_strategy": "no", **SCHEDULE, **settings},
    )


def hugging(kind, data, folder, window=1, make=Network, resume=None, callbacks=(), rewind=None, **settings):
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    own = {} if rewind is None else {"rewind": rewind, "ledger": f"{folder}/run.ledger"}
    own |= {"eval_dataset": settings.pop("eval_dataset")} if "eval_dataset" in settings else {}
    trainer = kind(make(), arguments(folder, window, **settings), train_dataset=data, callbacks=list(callbacks), **own)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer):
    return str([trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()])


@pytest.mark.parametrize("window", [1, 2])
def test_transformers_a_loss_spike_costs_some_steps(window, tmp_path):
    bad = bad_rows(window)
    trainer = hugging(GuardedTrainer, Ruinous(bad), tmp_path, window, rewind={"every": 5})
    (done,) = trainer.rewind.rewinds
    assert done.exact
    first = 160 // (BATCH * window)
    assert set(done.skipped) >= {first, first + 1, first + 2}
    plain = hugging(Trainer, Ruinous(bad, rows_of(done.skipped, window)), tmp_path, window)
    assert equal(trainer.model.state_dict(), plain.model.state_dict())
    assert state_of(trainer) == state_of(plain)
    assert trainer.state.global_step == ROWS // BATCH // window, "every step that was tried"
    assert trainer.state.epoch == 1


def test_transformers_nothing_changes_in_a_healthy_training(tmp_path):
    settings = {"num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 10}
    trainer = hugging(GuardedTrainer, Ruinous(), tmp_path, rewind={"every": 5}, **settings)
    plain = hugging(Trainer, Ruinous(), tmp_path, **settings)
    assert equal(trainer.model.state_dict(), plain.model.state_dict())
    assert not trainer.rewind.rewinds
    assert [one.get("loss") for one in trainer.state.log_history] == [
        one.get("loss") for one in plain.state.log_history
    ]


def test_transformers_a_spike_at_the_start_of_an_epoch(tmp_path):
    """With the default loader: what an epoch draws when it begins is not drawn again, and that is said."""
    trainer = hugging(
        GuardedTrainer, TwoEpochs(range(ROWS, ROWS + 6)), tmp_path, rewind={"every": 7}, num_train_epochs=2
    )
    (done,) = trainer.rewind.rewinds
    assert done.to_step < ROWS // BATCH <= done.skipped[-1]
    assert trainer.state.global_step == 2 * ROWS // BATCH
    assert not done.exact


def test_transformers_token_means_have_the_count_of_the_step(tmp_path):
    class Tokens(Dataset):
        def __init__(self, bad=(), without=()):
            generator = torch.Generator().manual_seed(0)
            self.tokens = torch.randint(0, 11, (ROWS, 6), generator=generator)
            self.length = torch.randint(3, 7, (ROWS,), generator=generator)
            self.scale = torch.ones(ROWS).index_fill(0, torch.tensor(list(bad), dtype=torch.long), 1e4)
            self.rows = [row for row in range(ROWS) if row not in without]

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, place):
            row = self.rows[place]
            labels = self.tokens[row].where(torch.arange(6) < self.length[row], -100)
            return {"input_ids": self.tokens[row], "labels": labels, "scale": self.scale[row]}

    class Llama(LlamaForCausalLM):
        def __init__(self):
            sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
            super().__init__(LlamaConfig(**sizes, intermediate_size=16, attention_dropout=0.1))

        def forward(self, input_ids=None, labels=None, scale=None, **kwargs):
            made = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            made.loss = made.loss * scale.mean()
            return made

    bad, settings = bad_rows(2), {"window": 2, "make": Llama}
    trainer = hugging(GuardedTrainer, Tokens(bad), tmp_path, rewind={"every": 5}, **settings)
    (done,) = trainer.rewind.rewinds
    plain = hugging(Trainer, Tokens(bad, rows_of(done.skipped, 2)), tmp_path, **settings)
    assert equal(trainer.model.state_dict(), plain.model.state_dict())
    assert done.exact


def test_transformers_a_resumed_training_goes_on(tmp_path):
    settings = {"rewind": {"every": 5}, "save_strategy": "steps", "save_steps": 100}
    whole = hugging(GuardedTrainer, Ruinous(bad_rows(1)), tmp_path, **settings)
    resumed = hugging(
        GuardedTrainer, Ruinous(bad_rows(1)), tmp_path, resume=str(tmp_path / "checkpoint-100"), **settings
    )
    assert equal(whole.model.state_dict(), resumed.model.state_dict())
    assert [one.skipped for one in resumed.rewind.rewinds] == [one.skipped for one in whole.rewind.rewinds]
    assert resumed.rewind._number == whole.rewind._number == ROWS // BATCH


def test_transformers_too_many_rewinds_stop_the_training(tmp_path):
    with pytest.raises(TooManyRewinds, match="there were 0 rewinds before"):
        hugging(GuardedTrainer, Ruinous(bad_rows(1)), tmp_path, rewind={"every": 5, "max_rewinds": 0})


def test_transformers_says_what_it_cannot_rewind(tmp_path):
    with pytest.raises(ArgumentTypeError, match=r"`rewind` is the bool True[\s\S]*rewind={\"every\": 50}"):
        GuardedTrainer(rewind=True)
    settings = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    with pytest.raises(ArgumentTypeError, match=r"the scheduler is[\s\S]*lr_scheduler_type=\"cosine\""):
        hugging(GuardedTrainer, Ruinous(), tmp_path, rewind={}, **settings, eval_dataset=Ruinous())


# --- Lightning ------------------------------------------------------------------------------------------------------


class Lit(GuardedModule, L.LightningModule):
    def __init__(self, interval="step"):
        super().__init__()
        self.network, self.interval = Network(), interval
        self.error = MeanSquaredError()
        self.seen = []

    def training_step(self, batch, batch_idx):
        made = self.network(**batch)
        self.error.update(made["out"], batch["y"])
        self.log("loss", made["loss"], on_epoch=True)
        self.seen.append(batch_idx)
        return made["loss"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


class PlainLit(Lit):
    """The same module, with training steps that nobody guards."""

    trainer = L.LightningModule.trainer


def lightning(kind, data, folder, window=1, rewind=None, resume=None, interval="step", more=(), **settings):
    torch.manual_seed(0)
    callback = GuardCallback(f"{folder}/run.ledger", rewind=rewind)
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "gradient_clip_val": 0.5, **settings}
    trainer = L.Trainer(
        callbacks=[callback, *more] if rewind is not None else [],
        accelerator="cpu",
        default_root_dir=folder,
        accumulate_grad_batches=window,
        enable_model_summary=False,
        enable_progress_bar=False,
        **settings,
    )
    module = kind(interval)
    loader = DataLoader(data, batch_size=BATCH, generator=torch.Generator(), num_workers=0)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module, callback


def states(trainer):
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return str([trainer.optimizers[0].state_dict(), schedulers])


@pytest.mark.parametrize("window", [1, 2])
def test_lightning_a_loss_spike_costs_some_steps(window, tmp_path):
    bad = bad_rows(window)
    trainer, module, callback = lightning(Lit, Ruinous(bad), tmp_path, window, rewind={"every": 5})
    (done,) = callback.rewind.rewinds
    assert done.exact
    plain, other, _ = lightning(PlainLit, Ruinous(bad, rows_of(done.skipped, window)), tmp_path, window)
    assert equal(module.network.state_dict(), other.network.state_dict())
    assert states(trainer) == states(plain)
    assert trainer.global_step == ROWS // BATCH // window, "every step that was tried"
    assert module.error._update_count == ROWS // BATCH, "a metric counts each batch once"
    again = range(done.to_step * window, done.skipped[0] * window)
    spike = (done.skipped[-1] + 1) * window
    assert module.seen == [*range(spike), *again, *range(spike, ROWS // BATCH)]


def test_lightning_nothing_changes_in_a_healthy_training(tmp_path):
    trainer, module, callback = lightning(Lit, Ruinous(), tmp_path, rewind={"every": 5}, max_epochs=2)
    plain, other, _ = lightning(PlainLit, Ruinous(), tmp_path, max_epochs=2)
    assert equal(module.network.state_dict(), other.network.state_dict())
    assert trainer.callback_metrics["loss_epoch"] == plain.callback_metrics["loss_epoch"]
    assert not callback.rewind.rewinds


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lightning_a_spike_at_the_start_of_an_epoch(interval, tmp_path):
    """The way back leads over the start of the epoch, and the suspects lie behind it."""
    bad = range(ROWS + 8, ROWS + 20)
    settings = {"window": 2, "interval": interval, "max_epochs": 2}
    trainer, module, callback = lightning(Lit, TwoEpochs(bad), tmp_path, rewind={"every": 7}, **settings)
    (done,) = callback.rewind.rewinds
    assert done.exact
    assert done.to_step < ROWS // BATCH // 2 < done.skipped[0]
    plain, other, _ = lightning(PlainLit, TwoEpochs(bad, rows_of(done.skipped, 2)), tmp_path, **settings)
    assert equal(module.network.state_dict(), other.network.state_dict())
    assert states(trainer) == states(plain)


def test_limit_suspects_on_both_sides_of_the_start_of_an_epoch_are_not_exact(tmp_path):
    settings = {"window": 2, "interval": "epoch", "max_epochs": 2}
    data = TwoEpochs(range(ROWS, ROWS + 12))
    trainer, _, callback = lightning(Lit, data, tmp_path, rewind={"every": 7}, **settings)
    assert [one.exact for one in callback.rewind.rewinds] == [False]
    # The scheduler was stepped together with the last step of the first epoch, which is a suspect.
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning: no state of the loader is in the checkpoint
def test_lightning_a_resumed_training_goes_on(tmp_path):
    saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=100)
    data, settings = Ruinous(bad_rows(1)), {"rewind": {"every": 5}, "enable_checkpointing": True}
    _, _, whole = lightning(Lit, data, tmp_path, more=[saving], **settings)
    saved = torch.load(saving.best_model_path, weights_only=True)["callbacks"]["GuardCallback"]["rewind"]
    assert [skipped for _, skipped, *_ in saved["rewinds"]] == [list(whole.rewind.rewinds[0].skipped)]
    trainer, _, resumed = lightning(Lit, data, tmp_path, resume=saving.best_model_path, **settings)
    assert [one.skipped for one in resumed.rewind.rewinds] == [one.skipped for one in whole.rewind.rewinds]
    assert resumed.rewind._number == trainer.global_step
    loader = DataLoader(data, batch_size=BATCH, num_workers=0)
    trainer.fit(trainer.lightning_module, loader, ckpt_path=saving.best_model_path)  # with the same callback
    assert [one.skipped for one in resumed.rewind.rewinds] == [one.skipped for one in whole.rewind.rewinds]


def test_lightning_says_what_it_cannot_rewind(tmp_path):
    class Manual(Lit):
        automatic_optimization = False

    class Plateau(Lit):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "monitor": "loss"}]

    with pytest.raises(ArgumentTypeError, match=r"manual optimization[\s\S]*automatic_optimization = True"):
        lightning(Manual, Ruinous(), tmp_path, rewind={}, gradient_clip_val=None)
    with pytest.raises(ArgumentTypeError, match=r"follows a metric at each step[\s\S]*\"interval\": \"epoch\""):
        lightning(Plateau, Ruinous(), tmp_path, rewind={})


class Calls(L.Callback):
    def __init__(self):
        self.optimizer_steps = self.batches = 0

    def on_before_optimizer_step(self, *args):
        self.optimizer_steps += 1

    def on_train_batch_end(self, *args):
        self.batches += 1


def test_limit_callbacks_are_not_called_at_the_end_of_steps_that_are_made_again(tmp_path):
    calls = Calls()
    _, _, callback = lightning(Lit, Ruinous(bad_rows(1)), tmp_path, rewind={"every": 5}, more=[calls])
    (done,) = callback.rewind.rewinds
    assert calls.batches == ROWS // BATCH
    assert calls.optimizer_steps == ROWS // BATCH + done.skipped[0] - done.to_step


# --- Several processes ----------------------------------------------------------------------------------------------


def on_rank(folder):
    """Train on one of two ranks, in each framework; print whether the runs are those without the suspects."""
    found = []
    for window in (1, 2):
        bad = [row for row in range(160, 160 + 12 * window) if row // BATCH % 2]  # only the second rank has them
        trainer = hugging(GuardedTrainer, Ruinous(bad), folder, window, rewind={"every": 5})
        (done,) = trainer.rewind.rewinds
        plain = hugging(Trainer, Ruinous(bad, rows_of(done.skipped, window, 2)), folder, window)
        same = equal(trainer.model.state_dict(), plain.model.state_dict())
        found.append([same, done.exact, done.skipped, trainer.model.first.weight.double().sum().item()])
    # Accelerate: the suspects are left out, and a checkpoint among the steps that come again goes on.
    bad = [row for row in range(160, 172) if row // BATCH % 2]
    model, _, guard = accelerated(RuinousPairs(bad))
    (done,) = guard.rewind.rewinds
    clean, _, _ = accelerated(RuinousPairs(bad, rows_of(done.skipped, 1, 2)))
    found.append([equal(model.state_dict(), clean.state_dict()), done.exact, done.skipped, 0])
    accelerated(RuinousPairs(bad), folder, stop=done.skipped[-1] + 3)
    resumed, _, guard = accelerated(RuinousPairs(bad), folder)
    found.append([equal(model.state_dict(), resumed.state_dict()), len(guard.rewind.rewinds) == 1, done.skipped, 0])
    print(json.dumps(found))


@pytest.mark.distributed
def test_two_processes_go_back_together(tmp_path):
    first, second = map(json.loads, run_ranks("tests.integrations.test_rewind_in_frameworks", str(tmp_path)))
    for one, other in zip(first, second, strict=True):
        assert one == other
        assert one[:2] == [True, True]
