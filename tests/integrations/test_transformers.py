"""GuardedTrainer: the weights are those of the Trainer itself on data without the bad samples."""

import json
import tempfile
from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning, TooManyBadSamples
from tests.integrations.faulty import BAD, BATCH, SAMPLES, batches_without, equal, run_ranks

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from gradgate.integrations.transformers import GuardedTrainer, GuardedTrainerMixin

pytestmark = pytest.mark.slow  # importing its framework is

WIDTH, LENGTH = 8, 6
FLAGS = {"raise": 1, "gradient": 2, "collate": 3}
FAULTS = ("nan", "load", *FLAGS)
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}


class Rows(Dataset):
    """Embedded sequences with labels; some rows are bad in one way."""

    def __init__(self, fault=None, tokens=False, bad=BAD):
        generator = torch.Generator().manual_seed(1)
        self.embeddings = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
        labels = torch.randint(0, 11, (SAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)
        self.labels = labels.where(torch.arange(LENGTH) < self.lengths[:, None], -100) if tokens else labels[:, 0] % 3
        self.fault, self.bad = fault, bad if fault else ()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row, bad = self.embeddings[index].clone(), index in self.bad
        if bad and self.fault == "load":
            raise ValueError("truncated")
        if bad and self.fault == "nan":
            row[0, 0] = float("nan")
        flag = FLAGS.get(self.fault, 0) if bad else 0
        return {"inputs_embeds": row, "labels": self.labels[index], "flags": flag, "name": f"row-{index}"}


class Faulty:
    """What the flags of a sample ask for, and statistics of the batch."""

    def add(self):
        self.factor = torch.nn.Parameter(torch.ones(()))
        self.norm = torch.nn.BatchNorm1d(LENGTH)

    def prepare(self, inputs_embeds, flags):
        if (flags == FLAGS["raise"]).any():
            raise ValueError("a row that cannot be read")
        embeddings = self.norm(inputs_embeds * self.factor)
        return embeddings + torch.where(flags[:, None, None] == FLAGS["gradient"], embeddings * 0, 1.0).sqrt() - 1


class Bert(Faulty, BertForSequenceClassification):
    def __init__(self):
        super().__init__(BertConfig(**SMALL, intermediate_size=16, num_labels=3))
        self.add()

    def forward(self, inputs_embeds=None, labels=None, flags=None):
        return super().forward(inputs_embeds=self.prepare(inputs_embeds, flags), labels=labels)


class Llama(Faulty, LlamaForCausalLM):
    def __init__(self):
        super().__init__(LlamaConfig(**SMALL, intermediate_size=16, attention_dropout=0.1))
        self.add()
        self.dtypes = set()

    def forward(self, inputs_embeds=None, labels=None, flags=None, **kwargs):
        output = super().forward(inputs_embeds=self.prepare(inputs_embeds, flags), labels=labels, **kwargs)
        self.dtypes.add(self.lm_head(torch.zeros(1, WIDTH)).dtype)
        return output


def collate(features):
    if any(feature["flags"] == FLAGS["collate"] for feature in features):
        raise ValueError("a row that does not fit")
    return default_data_collator(features)


class Plain(Trainer):
    """The trainer itself; without a fault it gets the same batches without the bad samples."""

    def get_train_dataloader(self):
        if self.train_dataset.fault is not None:
            return super().get_train_dataloader()
        settings = {"collate_fn": self._get_collator_with_removed_columns(self.data_collator)}
        loader = DataLoader(self.train_dataset, batch_sampler=batches_without(BAD), **settings)
        return self.accelerator.prepare(loader)


class Guarded(GuardedTrainerMixin, Plain):
    pass


def trainer_of(kind, model, fault, folder, guard=None, bad=BAD, **settings):
    torch.manual_seed(0)
    network, settings = model(), dict(settings)
    outside = {name: settings.pop(name) for name in ("compute_loss_func", "callbacks", "ledger") if name in settings}
    settings = {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "max_grad_norm": 0.5, **settings}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy=settings.pop("logging_strategy", "no"),
        save_strategy=settings.pop("save_strategy", "no"),
        **settings,
    )
    own = outside if guard is None else {**outside, "guard": guard}
    data = Rows(fault, tokens=model is Llama, bad=bad)
    return kind(network, arguments, data_collator=collate, train_dataset=data, **own)


def train(kind, model, fault, folder, **settings):
    AcceleratorState._reset_state(True)
    trainer = trainer_of(kind, model, fault, folder, **settings)
    trainer.train()
    return trainer


@cache
def clean(model, **settings):
    """The weights of the trainer itself."""
    with tempfile.TemporaryDirectory() as folder:
        return train(Plain, model, None, folder, **settings).model.state_dict()


@pytest.mark.parametrize(("window", "precision"), [(1, "float32"), (2, "float32"), (2, "bf16")])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", [Bert, Llama])
def test_bad_samples_leave_no_trace(model, fault, window, precision, tmp_path):
    settings = {"gradient_accumulation_steps": window, "bf16": precision == "bf16"}
    trainer = train(Guarded, model, fault, tmp_path, ledger=tmp_path / "run.ledger", **settings)
    assert equal(trainer.model.state_dict(), clean(model, **settings))
    with gg.Ledger(tmp_path / "run.ledger") as ledger:
        found = [(one.sample_id, one.step, one.epoch) for one in ledger.incidents()]
    assert found == [(str(bad), bad // BATCH // window, 0) for bad in BAD]
    if model is Llama:
        assert trainer.model.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_a_healthy_run_is_that_of_the_trainer_itself(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    guarded, plain = (train(kind, Llama, None, tmp_path, **settings) for kind in (Guarded, Plain))
    assert equal(guarded.model.state_dict(), plain.model.state_dict())
    for entry, same in zip(guarded.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
        assert entry == {**same, "gradgate/dropped": 0, "gradgate/dropped_total": 0}


def per_token(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def with_a_term_of_its_own(outputs, labels, num_items_in_batch=None):
    return per_token(outputs, labels, num_items_in_batch) + 0.1 * outputs.logits.square().mean()


def steep(outputs, labels, num_items_in_batch=None):
    return 1000 * per_token(outputs, labels, num_items_in_batch)


@pytest.mark.parametrize("window", [1, 6])  # in one step, both samples are bad
@pytest.mark.parametrize(
    "setting",
    [
        {"label_smoothing_factor": 0.1},
        {"compute_loss_func": per_token},
        {"compute_loss_func": with_a_term_of_its_own},  # part of the loss does not hang on the count
    ],
)
def test_losses_have_the_count_of_what_was_kept(setting, window, tmp_path):
    settings = {"gradient_accumulation_steps": window, **setting}
    trainer = train(Guarded, Llama, "nan", tmp_path, **settings)
    assert equal(trainer.model.state_dict(), clean(Llama, **settings))
    assert trainer.guard.summary().dropped == 2


class Tiny(Faulty, torch.nn.Module):
    """A module that is none of Transformers'."""

    def __init__(self):
        super().__init__()
        self.add()
        self.last = torch.nn.Linear(WIDTH, 3)

    def forward(self, inputs_embeds, labels=None, flags=None):
        logits = self.last(self.prepare(inputs_embeds, flags).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo, at a graph break
@pytest.mark.parametrize("settings", [{}, {"torch_compile": True, "torch_compile_backend": "eager"}])
def test_any_module_is_trained_compiled_or_not(settings, tmp_path):
    trainer = train(Guarded, Tiny, "nan", tmp_path, **settings)
    assert equal(trainer.model.state_dict(), clean(Tiny, **settings))
    assert trainer.guard.summary().dropped == 2


@pytest.mark.parametrize("fault", ["nan", "load"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(fault, window, tmp_path):
    settings = {"gradient_accumulation_steps": window, "num_train_epochs": 2}
    whole = train(Guarded, Llama, fault, tmp_path, save_strategy="steps", save_steps=2 // window, **settings)
    assert json.loads((tmp_path / f"checkpoint-{2 // window}" / "gradgate.json").read_text())["steps"] == 2
    AcceleratorState._reset_state(True)
    again = trainer_of(Guarded, Llama, fault, tmp_path, ledger=tmp_path / "run.ledger", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{2 // window}"))
    assert equal(again.model.state_dict(), whole.model.state_dict())
    assert again.guard.state_dict() == whole.guard.state_dict()
    with gg.Ledger(tmp_path / "run.ledger") as ledger:
        found = [(one.sample_id, one.step, one.epoch) for one in ledger.incidents()]
    late = [(str(bad), (6 * epoch + bad // BATCH) // window, epoch) for epoch in (0, 1) for bad in BAD]
    assert found == late[1:], "the first was before the checkpoint"


def test_the_log_has_what_was_dropped(tmp_path):
    settings = {"logging_strategy": "steps", "logging_steps": 2, "num_train_epochs": 2}
    trainer = train(Guarded, Bert, "raise", tmp_path, **settings)
    counts = [(entry["gradgate/dropped"], entry["gradgate/dropped_total"]) for entry in trainer.state.log_history[:-1]]
    assert counts == [(1, 1), (1, 2), (0, 2), (1, 3), (1, 4), (0, 4)]
    assert "gradgate/unloaded_total" not in trainer.state.log_history[0]
    trainer = train(Guarded, Bert, "load", tmp_path, **settings)
    assert [entry["gradgate/unloaded_total"] for entry in trainer.state.log_history[:-1]] == [1, 2, 2, 3, 4, 4]
    plain = clean(Bert, num_train_epochs=2)
    assert equal(trainer.model.state_dict(), plain)


def test_the_logged_loss_is_that_of_what_was_kept(tmp_path):
    settings = {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2}
    guarded, plain = (
        train(kind, Llama, fault, tmp_path, **settings) for kind, fault in [(Guarded, "nan"), (Plain, None)]
    )
    for entry, same in zip(guarded.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
        assert entry["loss"] == pytest.approx(same["loss"])
        assert entry["grad_norm"] == same["grad_norm"]


class WithColumns(Rows):
    """A dataset that can read one column alone, as those of `datasets` can."""

    def select_columns(self, names):
        return [dict.fromkeys(names, f"row-{index}") for index in range(SAMPLES)]


@pytest.mark.parametrize(
    ("kind", "fault", "names"), [(Rows, "nan", "row-{}"), (Rows, "load", "{}"), (WithColumns, "load", "row-{}")]
)
def test_ids_are_those_of_the_column(kind, fault, names, tmp_path):
    """Of a sample that cannot be loaded, the column can be read only by itself."""
    trainer = trainer_of(
        GuardedTrainer,
        Bert,
        fault,
        tmp_path,
        guard={"ids": "name"},
        ledger=tmp_path / "run.ledger",
        train_sampling_strategy="random",
        num_train_epochs=2,
    )
    trainer.train_dataset.__class__ = kind
    trainer.train()
    with gg.Ledger(tmp_path / "run.ledger") as ledger:
        found = sorted((one.epoch, one.sample_id) for one in ledger.incidents())
    assert found == sorted((epoch, names.format(bad)) for epoch in (0, 1) for bad in BAD)


def test_a_batch_of_which_nothing_can_be_loaded_changes_nothing(tmp_path):
    for window, bad in ((1, range(8, 12)), (2, range(8, 12)), (2, range(4, 12))):
        trainer = train(GuardedTrainer, Llama, "load", tmp_path, bad=bad, gradient_accumulation_steps=window)
        assert trainer.state.global_step == 6 // window
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
        assert (trainer.guard.summary().steps, trainer.guard.summary().samples) == (6, 24 - len(bad))


def test_a_scaler_is_used_and_its_overflow_left_to_it(tmp_path):
    for scale, dropped in ((2.0**8, 2), (3e38, 2)):
        AcceleratorState._reset_state(True)
        trainer = trainer_of(Guarded, Llama, "nan", tmp_path, compute_loss_func=steep)
        trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        assert trainer.guard.summary().dropped == dropped
        assert (scaler.get_scale() < scale) == (scale == 3e38)


class Counting(Plain):
    """A trainer in the shape of trl's: a loss with metrics of all processes, a context around the step, a log."""

    def __init__(self, *args, **options):
        self.metrics, self.inside = [], False
        super().__init__(*args, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert self.inside
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        right = (outputs.logits.argmax(-1) == inputs["labels"]).float()
        self.metrics.append(self.accelerator.gather_for_metrics(right).mean().item())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **options):
        self.inside = True
        try:
            return super().training_step(*args, **options)
        finally:
            self.inside = False

    def log(self, logs, start_time=None):
        logs["right"] = sum(self.metrics) / max(len(self.metrics), 1)
        super().log(logs, start_time)


class GuardedCounting(GuardedTrainerMixin, Counting):
    pass


def test_a_subclass_keeps_what_is_its_own(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    trainer = train(GuardedCounting, Llama, "raise", tmp_path, **settings)
    assert equal(trainer.model.state_dict(), train(Counting, Llama, None, tmp_path, **settings).model.state_dict())
    assert {"right", "gradgate/dropped"} <= trainer.state.log_history[0].keys()
    assert "backward" not in vars(trainer.accelerator)


class Stream(IterableDataset):
    fault = "nan"

    def __iter__(self):
        return iter([Rows()[index] for index in range(SAMPLES)])


def test_refusals_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ArgumentTypeError, match=r"`guard` is the bool True[\s\S]*guard={"):
        GuardedTrainer(guard=True)
    with pytest.raises(ArgumentValueError, match=r'"out_of_memory": \'split\'[\s\S]*auto_find_batch_size=True'):
        GuardedTrainer(guard={"out_of_memory": "split"})
    trainer = trainer_of(GuardedTrainer, Bert, "nan", tmp_path, guard={"ids": "name"}, max_steps=2)
    trainer.train_dataset = Stream()
    with pytest.raises(ArgumentValueError, match="the training data is a stream"):
        trainer.train()
    trainer = trainer_of(GuardedTrainer, Bert, "nan", tmp_path, guard={"max_bad": 0.1})
    with pytest.raises(TooManyBadSamples):
        trainer.train()
    trainer.args.optim, trainer.guard = "lomo", None
    with pytest.raises(ArgumentTypeError, match="changes the weights while backward runs"):
        trainer._begin(trainer.model)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ArgumentTypeError, match="sharded by FSDP"):
        trainer._begin(trainer.model)
    loader = [{"labels": torch.zeros(2)}]
    monkeypatch.setattr(Trainer, "get_train_dataloader", lambda self: loader)
    with pytest.warns(GradgateWarning, match="cannot be loaded will stop the training"):
        assert trainer.get_train_dataloader() is loader


def on_rank(folder):
    """Train on one of two ranks; print which runs are those of the trainer itself, the weights, and the incidents."""
    found = []
    for model, window, faults in ((Llama, 1, ("nan", "load")), (Llama, 2, ("raise", "load")), (Bert, 1, ("raise",))):
        settings = {"gradient_accumulation_steps": window}
        plain = train(Plain, model, None, folder, **settings).model.state_dict()
        for fault in faults:
            trainer = train(GuardedCounting if model is Llama else Guarded, model, fault, folder, **settings)
            weights = trainer.model.state_dict()
            incidents = [one.sample_id for one in trainer._loader.incidents]
            summary = trainer.guard.summary()
            total = sum(one.double().sum().item() for one in trainer.model.parameters())
            found.append([equal(weights, plain), total, summary.dropped, summary.samples, incidents])
    for bad in (range(4), range(8, 12)):
        trainer = train(Guarded, Llama, "load", folder, bad=bad)
        found.append([True, trainer.model.factor.item(), 0, trainer.guard.summary().samples, []])
    print(json.dumps(found))


@pytest.mark.distributed
def test_two_processes_agree_and_end(tmp_path):
    """Batches 0, 2 and 4 are the first rank's, so the bad sample 5 is the second's and 14 too."""
    first, second = map(json.loads, run_ranks("tests.integrations.test_transformers", str(tmp_path)))
    for (same, total, *counts, incidents), (other_same, other_total, *other_counts, others) in zip(
        first[:-2], second[:-2], strict=True
    ):
        assert same
        assert other_same
        assert total == other_total, "the ranks have the same weights"
        assert counts == other_counts
        assert (counts, incidents, others) in (([2, 24], [], []), ([0, 22], [], ["5", "14"]))
    assert first[-2:] == second[-2:], "nothing of a batch can be loaded, and no rank waits for ever"
