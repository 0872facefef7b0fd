"""GuardedModule and GuardCallback: the weights are those of the run without the bad samples, in every setting."""

import json
import logging
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import gradgate as gg
from gradgate.errors import ArgumentTypeError, GradgateError
from tests.integrations.faulty import BAD, FAULTS, Network, Samples, equal, loader_of, run_ranks

pytest.importorskip("lightning")

with warnings.catch_warnings():  # its own dependencies
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics import MeanMetric

from gradgate.integrations.lightning import GuardCallback, GuardedModule

pytestmark = pytest.mark.slow  # importing its framework is
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = Network()
        self.seen = MeanMetric()
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        rows, _ = batch
        loss = self.network.loss(batch)
        self.seen.update(rows[:, 1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Lit(GuardedModule, Plain):
    pass


class Memory(Logger):
    """A logger that keeps everything."""

    name, version = "memory", "0"

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, {name: round(float(value), 6) for name, value in metrics.items() if name != "epoch"}))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Watcher(L.Callback):
    """What callbacks see."""

    def __init__(self):
        self.losses, self.bars, self.epochs, self.hooks = [], [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.bars.append(trainer.progress_bar_metrics["loss_step"])

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    def on_before_zero_grad(self, *args):
        self.hooks.append("zero_grad")

    def on_before_backward(self, trainer, module, loss):
        self.hooks.append(("before", loss.item()))

    def on_after_backward(self, trainer, module):
        self.hooks.append(("after", sum(p.grad.sum().item() for p in module.parameters())))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.hooks.append("step")


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 1,
}


def train(module, loader, *callbacks, epochs=2, **settings):
    watcher, logger = Watcher(), Memory()
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, watcher],
        logger=logger,
        gradient_clip_val=1.0 if module.automatic_optimization else None,
        **{**QUIET, **settings},
    )
    torch.manual_seed(3)
    trainer.fit(module, loader)
    return watcher, logger, trainer


class Incidents(list):
    """A sink."""

    def record_many(self, incidents, payloads=None):
        self.extend(incidents)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_samples_leave_no_trace(fault, window, precision):
    settings = {"accumulate_grad_batches": window, "precision": precision}
    lit, clean = Lit(), Plain()
    loader, incidents = gg.resilient(loader_of(fault)), Incidents()
    watcher, logger, _ = train(lit, loader, GuardCallback(sink=incidents), **settings)
    plain, plain_logger, _ = train(clean, loader_of(None), **settings)
    assert equal(lit.state_dict(), clean.state_dict())
    assert lit.network.dtypes == {torch.bfloat16 if precision == "bf16-mixed" else torch.float32}
    found = loader.incidents if fault == "load" else incidents
    assert [(one.sample_id, one.step, one.epoch) for one in found] == [
        (str(bad), (6 * epoch + bad // 4) // window, epoch) for epoch in (0, 1) for bad in BAD
    ], "the ids, the optimizer's steps and the epochs"
    assert (watcher.losses, watcher.bars) == (plain.losses, plain.bars)
    assert watcher.hooks == plain.hooks
    dropped = [epoch.pop("gradgate/dropped_total") for epoch in watcher.epochs]
    assert dropped == ([0, 0] if fault == "load" else [2, 4])
    assert watcher.epochs == plain.epochs, "the means over an epoch weigh the kept samples, and metrics count them"
    assert [line for line in logger.lines if "gradgate/kept" not in line[1]] == plain_logger.lines


def test_the_counters_are_logged_when_there_is_news():
    _, logger, _ = train(Lit(), loader_of("nan"), GuardCallback(), log_every_n_steps=4)
    counts = [
        (step, *(line.get(f"gradgate/{name}") for name in ("kept", "dropped", "dropped_total", "bad_steps")))
        for step, line in logger.lines
        if "gradgate/kept" in line
    ]
    assert counts == [
        (1, 7, 1, 1, 1),
        (3, 7, 1, 2, 2),
        (6, 8, 0, 2, None),
        (7, 7, 1, 3, 3),
        (9, 7, 1, 4, 4),
        (11, 8, 0, 4, None),
    ]


class WithDict(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rows": len(batch[0])}


class PerSample(Lit):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return (self.network(*batch) - batch[0].sum(1)).square()


class GuardedDict(GuardedModule, WithDict):
    pass


class Rows(L.Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rows.append(outputs["rows"])


def test_a_dict_is_that_of_the_kept_samples():
    rows, lit, clean = Rows(), GuardedDict(), WithDict()
    watcher, _, _ = train(lit, loader_of("raise"), rows, epochs=1)
    plain, _, _ = train(clean, loader_of(None), epochs=1)
    assert rows.rows == [4, 3, 4, 3, 4, 4]
    assert watcher.losses == plain.losses
    assert equal(lit.state_dict(), clean.state_dict())


def test_one_loss_for_each_sample():
    watcher, _, _ = train(PerSample(), loader_of("nan"), epochs=1)
    assert all(map(torch.isfinite, torch.tensor(watcher.losses)))


@pytest.mark.parametrize("optimizer", ["Adam", "LBFGS"])
def test_a_healthy_run_is_that_of_lightning_itself(optimizer):
    def configured(self):
        settings = {} if optimizer == "Adam" else {"lr": 0.01, "max_iter": 3}
        return getattr(torch.optim, optimizer)(self.parameters(), **settings)

    modules = [type("Own", (kind,), {"configure_optimizers": configured})() for kind in (Lit, Plain)]
    ours, plain = (train(module, DataLoader(Samples(), 5), epochs=1, accumulate_grad_batches=2) for module in modules)
    assert equal(modules[0].state_dict(), modules[1].state_dict())
    assert modules[0].calls == modules[1].calls
    assert (ours[0].losses, ours[0].hooks) == (plain[0].losses, plain[0].hooks)
    assert ours[2].global_step == plain[2].global_step
    assert modules[0].seen.update_count == modules[1].seen.update_count


def test_a_scaler_is_used_and_its_overflow_left_to_it():
    runs = []
    for module, fault in ((Lit(), "nan"), (Plain(), None)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        train(module, loader_of(fault), epochs=1, plugins=[precision])
        runs.append(module)
    assert equal(runs[0].state_dict(), runs[1].state_dict())
    assert runs[0].network.dtypes == {torch.float16}
    overflowing = torch.amp.GradScaler("cpu", init_scale=3e38)
    incidents = Incidents()
    plugins = [MixedPrecision("16-mixed", "cpu", overflowing)]
    train(Lit(), gg.resilient(loader_of("nan")), GuardCallback(sink=incidents), epochs=1, plugins=plugins)
    assert overflowing.get_scale() < 3e38
    assert [one.sample_id for one in incidents] == ["5", "14"]


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.before_backward(batch)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()

    def before_backward(self, batch):
        self.result = self.guarded_backward(batch, self.loss_of)

    def loss_of(self, batch):
        return super().training_step(batch, 0)


class ManualPlain(Manual):
    def before_backward(self, batch):
        self.manual_backward(self.loss_of(batch))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_optimization(precision):
    seen = []
    for module, fault in ((Manual(), "gradient"), (ManualPlain(), None)):
        watcher = Watcher()
        watcher.on_train_batch_end = lambda *_: None
        trainer = L.Trainer(max_epochs=2, callbacks=[watcher], logger=False, precision=precision, **QUIET)
        torch.manual_seed(3)
        trainer.fit(module, loader_of(fault))
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if "gradgate" not in name}
        seen.append((module.state_dict(), metrics, watcher.hooks))
    assert equal(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]
    assert trainer.callback_metrics["gradgate/dropped_total"] == 0


class Totals(Manual):
    def before_backward(self, batch):
        def total(batch):
            losses = (self.network(*batch) - 1).square()
            return losses.sum(), len(losses)

        self.guarded_backward(batch, total)
        self.mean = self.guard.finish()


def test_totals_with_manual_optimization():
    weights = []
    for fault in ("nan", None):
        module = Totals()
        torch.manual_seed(3)
        L.Trainer(max_epochs=1, logger=False, **QUIET).fit(module, loader_of(fault))
        weights.append(module.state_dict())
    assert equal(*weights)


class Skipping(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class GuardedSkipping(GuardedModule, Skipping):
    pass


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_the_user_skips_is_skipped():
    lit, clean = GuardedSkipping(), Skipping()
    for module, fault in ((lit, "nan"), (clean, None)):
        torch.manual_seed(3)
        trainer = L.Trainer(max_epochs=1, logger=False, **QUIET)
        trainer.fit(module, loader_of(fault))
        module.metrics = trainer.callback_metrics
    assert equal(lit.state_dict(), clean.state_dict())
    assert lit.metrics["loss_epoch"] == clean.metrics["loss_epoch"]
    assert lit.guard.summary().dropped == 2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_where_too_few_are_left_nothing_is_logged_or_counted():
    class One(Lit):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.outputs = [*getattr(self, "outputs", ()), outputs]
            self.counted = self.seen.update_count

    module = One()
    trainer = L.Trainer(max_epochs=1, logger=False, callbacks=[GuardCallback(min_kept=4)], **QUIET)
    trainer.fit(module, loader_of("nan"))
    assert [bool(outputs) for outputs in module.outputs] == [True, False, True, False, True, True]
    assert module.counted == 4
    assert trainer.callback_metrics["loss_epoch"].isfinite()


def test_a_training_goes_on_after_a_resume(tmp_path):
    weights, guards, state = [], [], None
    whole = Lit()
    train(whole, gg.resilient(loader_of("nan")), epochs=3)
    for epochs, path in ((2, None), (3, tmp_path / "a.ckpt")):
        lit, incidents = Lit(), Incidents()
        callback = GuardCallback(sink=incidents)
        trainer = L.Trainer(max_epochs=epochs, logger=False, gradient_clip_val=1.0, callbacks=[callback], **QUIET)
        torch.manual_seed(3)
        if state is not None:
            torch.set_rng_state(state)
        trainer.fit(lit, gg.resilient(loader_of("nan")), ckpt_path=path)
        state = torch.get_rng_state()
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        weights.append(lit.state_dict())
        guards.append((lit.guard.summary(), lit.guard.global_step, lit.guard.epoch))
    assert equal(weights[1], whole.state_dict())
    assert (guards[0][0].dropped, guards[0][0].steps, *guards[0][1:]) == (4, 12, 12, 1)
    assert guards[1] == (whole.guard.summary(), 18, 2)
    assert [(one.step, one.epoch) for one in incidents] == [(13, 2), (15, 2)]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(lit, loader_of("nan"))  # the same Trainer again: it counts on
    assert lit.guard.summary().dropped == 8


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(24):
            yield (*Samples("nan")[index], index)


class Moving(Lit):
    """Batches are copied on their way, as to a device."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [part.clone() for part in batch]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


@pytest.mark.parametrize("kind", ["resilient", "stream", "key"])
def test_ids_are_those_of_the_batch(kind):
    """A stream has no length, so that Lightning loads a batch ahead."""
    incidents = Incidents()
    loader = DataLoader(Stream(), batch_size=4) if kind != "resilient" else loader_of("nan")
    ids = (lambda batch: batch[2]) if kind == "key" else None
    if kind != "key":
        loader = gg.resilient(loader)
    train(Moving(), loader, GuardCallback(sink=incidents, ids=ids), epochs=1)
    assert [(one.sample_id, one.step, one.row) for one in incidents] == [("5", 1, 1), ("14", 3, 2)]


class OwnGuard(Plain):
    def training_step(self, batch, batch_idx):
        return gg.Guard(self.network).backward(batch, self.network.loss).loss


class Nested(Lit):
    def training_step(self, batch, batch_idx):
        return self.guard.backward(batch, self.network.loss).loss


class ManualInAutomatic(Lit):
    def training_step(self, batch, batch_idx):
        return self.guarded_backward(batch, self.network.loss).loss


class OwnBackward(Lit):
    def backward(self, loss):
        loss.backward()


class OwnLoader(Lit):
    def training_step(self, dataloader_iter):
        return self.network.loss(next(dataloader_iter)[0])


class Tuple(Lit):
    def training_step(self, batch, batch_idx):
        return {"value": self.network.loss(batch)}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (OwnGuard, GradgateError, r"automatic optimization[\s\S]*class Lit\(GuardedModule, L.LightningModule\)"),
        (Nested, GradgateError, "a guard was used inside one of its own steps"),
        (ManualInAutomatic, GradgateError, r"return loss   # or self.automatic_optimization = False"),
        (OwnBackward, ArgumentTypeError, r"has a `backward` of its own[\s\S]*self.guarded_backward\(batch, loss_fn\)"),
        (OwnLoader, ArgumentTypeError, r"def training_step\(self, batch, batch_idx\):"),
        (Tuple, Exception, "the 'loss' key needs to be present"),
    ],
)
def test_what_is_done_wrong_is_said(kind, error, text):
    with pytest.raises(error, match=text):
        train(kind(), loader_of(None), epochs=1)


def test_the_callback_needs_a_guarded_module():
    with pytest.raises(ArgumentTypeError, match=r"class Plain\(GuardedModule, L.LightningModule\):"):
        train(Plain(), loader_of(None), GuardCallback(), epochs=1)
    with pytest.raises(GradgateError, match=r"trainer.fit\(module\)"):
        GuardCallback().guard  # noqa: B018
    with pytest.raises(RuntimeError, match="is not attached to a `Trainer`"):
        Lit().guard  # noqa: B018


class Validated(Lit):
    def validation_step(self, batch, batch_idx):
        self.log("validation", self.network.loss(batch))


@pytest.mark.filterwarnings("ignore:The `train_dataloader` yielded", "ignore:Found .* in eval mode")
def test_other_callbacks_and_loops_see_nothing_of_it():
    weights = []
    for fault in ("nan", None):
        module, average = Validated(), EMAWeightAveraging(decay=0.9)
        settings = {**QUIET, "callbacks": [average], "logger": False, "val_check_interval": 2}
        torch.manual_seed(3)
        trainer = L.Trainer(max_epochs=1, **settings)
        trainer.fit(module, gg.resilient(loader_of(fault)), gg.resilient(loader_of("load")))
        weights.append({**module.state_dict(), "validation": trainer.callback_metrics["validation"]})
        assert module.guard.summary().dropped == 2 * bool(fault)
    assert equal(*weights)


class Synced(Lit):
    def training_step(self, batch, batch_idx):
        loss = self.network.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class SyncedManual(Manual):
    def loss_of(self, batch):
        return Synced.training_step(self, batch, 0)


def on_rank():
    """Train on one of two ranks; print what each run came to, and the ids that this rank's loader or guard has."""
    rank, found = torch.distributed.get_rank(), []
    order = [list(DistributedSampler(Samples(), 2, rank)) for rank in range(2)]  # as that of Lightning
    assert (BAD[0] in order[0], BAD[1] in order[0]) == (False, False)

    def run(kind, fault, bad=BAD, window=1):
        module, incidents = kind(), Incidents()
        batches = [[index for index in order[rank][at : at + 4] if index not in bad] for at in (0, 4, 8)]
        given = DataLoader(Samples(), batch_sampler=batches) if fault is None else DataLoader(Samples(fault, bad), 4)
        loader = gg.resilient(given)
        strategy = DDPStrategy(process_group_backend="gloo", broadcast_buffers=False)
        trainer = L.Trainer(
            max_epochs=1,
            strategy=strategy,
            logger=False,
            callbacks=[GuardCallback(sink=incidents)],
            accumulate_grad_batches=window,
            use_distributed_sampler=fault is not None,
            **{**QUIET, "devices": 2},
        )
        torch.manual_seed(3)
        trainer.fit(module, loader)
        total = sum(one.detach().double().sum().item() for one in module.parameters())
        loss = trainer.callback_metrics["loss_epoch"].item()
        ids = [one.sample_id for one in (*loader.incidents, *incidents)]
        found.append([total, loss, ids, module.guard.summary().steps, module.guard.global_step])

    for window, kind in ((1, Synced), (2, Synced), (1, SyncedManual)):
        for fault in (None, "nan", "load"):
            run(kind, fault, window=window)
    for fault in ("nan", "load"):
        run(Synced, fault, bad=order[1][:4])  # nothing is left of the second rank's first batch
    print(json.dumps(found))


@pytest.mark.distributed
def test_two_processes_agree_and_end():
    """The sampler of Lightning gives both bad samples to the second rank."""
    ranks = [json.loads(line) for line in run_ranks("tests.integrations.test_lightning")]
    for (total, loss, _, *steps), (other_total, other_loss, _, *other_steps) in zip(*ranks, strict=True):
        assert (total, loss, steps) == (other_total, other_loss, other_steps), "the ranks have the same weights"
    for clean, nan, load in (ranks[0][start : start + 3] for start in (0, 3, 6)):
        assert nan[:2] == pytest.approx(clean[:2], abs=1e-5)
        assert load[:2] == pytest.approx(clean[:2], abs=1e-5)
        assert nan[3:] == load[3:] == clean[3:]
    assert ranks[0][9][:2] == pytest.approx(ranks[0][10][:2], abs=1e-5), "a rank of which nothing is left"
    assert [found[2] for found in ranks[0][1:3]] == [["5", "14"], []], "the first rank writes for all"
    assert [found[2] for found in ranks[1][1:3]] == [[], ["5", "14"]]
