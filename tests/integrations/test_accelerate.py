"""AcceleratedGuard: the weights are those of the run without the bad samples, in every setting of the accelerator."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from tests.integrations.faulty import BAD, FAULTS, Network, Samples, equal, loader_of, run_ranks

pytest.importorskip("accelerate")

import accelerate
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState

from gradgate.integrations.accelerate import AcceleratedGuard

pytestmark = pytest.mark.slow  # importing its framework is


def prepared(loader, scaler=None, **settings):
    accelerator = Accelerator(cpu=True, **settings)
    accelerator.scaler = scaler
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return accelerator, network, *accelerator.prepare(network, optimizer, loader)


def train(fault, epochs=2, **settings):
    loader = loader_of(fault)
    AcceleratorState._reset_state(True)
    accelerator, network, model, optimizer, loader = prepared(gg.resilient(loader) if fault else loader, **settings)
    guard = AcceleratedGuard(accelerator, model)
    incidents = []
    for epoch in range(epochs):
        guard.epoch = epoch
        for batch in loader:
            with accelerator.accumulate(model):
                result = guard.backward(batch, network.loss)
                incidents += result.dropped
                assert result.exact
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if fault == "load":
        incidents += loader.incidents
    return network, [(one.sample_id, one.step, one.epoch) for one in incidents], guard


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_samples_leave_no_trace(fault, window, precision):
    settings = {"gradient_accumulation_steps": window, "mixed_precision": precision}
    network, incidents, guard = train(fault, **settings)
    clean, nothing, _ = train(None, **settings)
    assert equal(network.state_dict(), clean.state_dict())
    assert network.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert incidents == [(str(bad), (6 * epoch + bad // 4) // window, epoch) for epoch in (0, 1) for bad in BAD], (
        "the ids, the optimizer's steps and the epochs"
    )
    assert not nothing
    assert guard.global_step == 12 // window


def test_a_healthy_run_is_that_of_the_accelerator_itself():
    network, _, _ = train(None, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)
    accelerator, plain, model, optimizer, loader = prepared(loader_of(None), gradient_accumulation_steps=2)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(plain.loss(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert equal(network.state_dict(), plain.state_dict())


def test_a_scaler_is_used_and_its_overflow_left_to_it():
    runs = [train(fault, epochs=1, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8)) for fault in ("nan", None)]
    assert equal(runs[0][0].state_dict(), runs[1][0].state_dict())
    overflowing = torch.amp.GradScaler("cpu", init_scale=3e38)
    _, incidents, _ = train("nan", epochs=1, scaler=overflowing)
    assert overflowing.get_scale() < 3e38
    assert [id for id, _, _ in incidents] == ["5", "14"]


def test_totals_are_divided_once_by_what_was_kept():
    gradients = []
    for fault in ("nan", None):
        AcceleratorState._reset_state(True)
        accelerator, network, model, _, loader = prepared(loader_of(fault), gradient_accumulation_steps=6)
        guard = AcceleratedGuard(accelerator, model)
        model.eval()

        def total(batch, network=network):
            loss = (network(*batch) - 1).square()
            return loss.sum(), len(loss)

        for batch in loader:
            with accelerator.accumulate(model):
                guard.backward(batch, total)
        guard.finish()
        gradients.append(network.first.weight.grad)
    rows = torch.stack([Samples()[i][0] for i in range(24) if i not in BAD])
    network.zero_grad()
    (network(rows, torch.zeros(22)) - 1).square().mean().backward()
    torch.testing.assert_close(gradients[0], network.first.weight.grad)
    assert torch.equal(*gradients)


def test_state_goes_on_after_a_resume(tmp_path):
    accelerator, network, model, _, loader = prepared(gg.resilient(loader_of("nan")))
    guard = AcceleratedGuard(accelerator, model)
    for batch in loader:
        guard.backward(batch, network.loss)
    guard.epoch = 3
    accelerator.save_state(tmp_path)
    assert json.loads((tmp_path / "gradgate.json").read_text())["dropped"] == 2
    again = AcceleratedGuard(accelerator, model)
    accelerator.load_state(tmp_path)
    assert (again.summary(), again.epoch, again.global_step) == (guard.summary(), 3, 6)
    (tmp_path / "gradgate.json").unlink()
    accelerator.load_state(tmp_path)  # a checkpoint from before there was a guard


def test_both_orders_of_resilient_and_prepare():
    accelerator = Accelerator(cpu=True)
    given = gg.resilient(loader_of("load"))
    before = accelerator.prepare(given)
    after = gg.resilient(accelerator.prepare(loader_of("load")))
    for loader in (before, after):
        assert type(loader).__name__ == "DataLoaderShard"
        assert [len(rows) for rows, _ in loader] == [4, 3, 4, 3, 4, 4]
        assert [one.sample_id for one in loader.incidents] == ["5", "14"]
    assert given.incidents == before.incidents


def test_a_loader_whose_first_batches_are_skipped_stays_resilient():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(gg.resilient(loader_of("load")))
    rest = accelerator.skip_first_batches(loader, 2)
    assert [len(rows) for rows, _ in rest] == [4, 3, 4, 4]
    assert [one.sample_id for one in loader.incidents] == ["14"]
    rest = accelerate.skip_first_batches(gg.resilient(loader_of("load")), 2)
    assert [len(rows) for rows, _ in rest] == [4, 3, 4, 4]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0))


def test_refusals_say_what_to_do(monkeypatch):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert [batch.tolist() for batch in gg.resilient(loader)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ArgumentTypeError, match="would lose rows of a batch that is short"):
        gg.resilient(accelerator.prepare(DataLoader(Stream(), batch_size=2)))
    with pytest.raises(ArgumentValueError, match="the one that has fewer samples would have fewer batches"):
        gg.resilient(Accelerator(cpu=True).prepare(loader_of("load")), refill=True)
    monkeypatch.undo()
    with pytest.raises(ArgumentTypeError, match=r"was not prepared[\s\S]*accelerator.prepare\(model\)"):
        AcceleratedGuard(accelerator, torch.nn.Linear(2, 1))


def on_rank():
    """Train on one of two ranks; print which runs are equal, the weights, and the ids of this rank's samples."""
    found = []
    for window in (1, 2):
        settings = {"gradient_accumulation_steps": window}
        settings["kwargs_handlers"] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
        clean, _, guard = train(None, epochs=1, **settings)
        assert (guard.summary().samples, guard.global_step) == (22, {1: 3, 2: 2}[window])
        for fault in ("nan", "raise", "load"):
            network, incidents, guard = train(fault, epochs=1, **settings)
            assert guard.summary().samples - guard.summary().dropped == 22
            parameters = dict(network.named_parameters())
            same = [torch.allclose(parameters[name], one, atol=1e-6) for name, one in clean.named_parameters()]
            total = sum(one.detach().double().sum().item() for one in parameters.values())
            found.append([all(same), round(total, 9), [id for id, _, _ in incidents]])
    accelerator, network, model, _, loader = prepared(gg.resilient(DataLoader(Samples("load", range(4)), batch_size=4)))
    guard = AcceleratedGuard(accelerator, model)
    batches = [batch for batch in loader if guard.backward(batch, network.loss)]
    assert len(batches) == 3, "nothing of the first batch can be loaded, and no rank waits for ever"
    assert (batches[0] is None) == accelerator.is_main_process
    print(json.dumps(found))


@pytest.mark.distributed
def test_two_processes_agree_and_end():
    """Batches 0, 2 and 4 are the first rank's, so the bad sample 5 is the second's and 14 too."""
    first, second = map(json.loads, run_ranks("tests.integrations.test_accelerate"))
    for (same, total, ids), (other_same, other_total, other_ids) in zip(first, second, strict=True):
        assert same
        assert other_same
        assert total == other_total, "the ranks have the same weights"
        assert (ids, other_ids) == ([], ["5", "14"])


# --- loss spikes ----------------------------------------------------------------------------------------------------


class Ruinous(torch.utils.data.Dataset):
    """Samples in order; some of them, all finite, ruin the weights."""

    def __init__(self, bad=(), without=()):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(240, 3, generator=generator)
        self.y = self.x.sum(1)
        self.y[list(bad)] *= 1e4
        self.rows = [row for row in range(240) if row not in without]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        row = self.rows[place]
        return self.x[row], self.y[row]


def rewound(data, tmp_path=None, stop=None, **settings):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(data, batch_size=2, generator=torch.Generator())  # a seed of its own for each epoch
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    guard = AcceleratedGuard(accelerator, model, rewind={"every": 5})
    if tmp_path is not None and stop is None:
        accelerator.load_state(tmp_path)
    for made, batch in enumerate(guard.batches(loader), 1):
        with accelerator.accumulate(model):
            guard.backward(batch, lambda batch: (model(batch[0])[:, 0] - batch[1]).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if made == stop:
            accelerator.save_state(tmp_path)
            break
    return accelerator.unwrap_model(model), optimizer, guard


@pytest.mark.parametrize("window", [1, 2])
def test_a_loss_spike_costs_some_batches(window):
    bad = range(160, 160 + 6 * window)
    model, optimizer, guard = rewound(Ruinous(bad), gradient_accumulation_steps=window)
    (done,) = guard.rewind.rewinds
    assert done.exact
    first = 160 // (2 * window)
    assert set(done.skipped) >= {first, first + 1, first + 2}
    skipped = {step * window * 2 + row for step in done.skipped for row in range(2 * window)}
    clean, expected, other = rewound(Ruinous(bad, without=skipped), gradient_accumulation_steps=window)
    assert not other.rewind.rewinds
    assert equal(model.state_dict(), clean.state_dict())
    assert str(optimizer.state_dict()) == str(expected.state_dict())
    assert guard.global_step == other.global_step == 120 // window - len(done.skipped)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rewind_is_saved_and_loaded_with_the_accelerator(tmp_path):
    whole, _, _ = rewound(Ruinous(range(160, 166)))
    rewound(Ruinous(range(160, 166)), tmp_path, stop=86)  # among the batches that come again
    resumed, _, guard = rewound(Ruinous(range(160, 166)), tmp_path)
    assert equal(whole.state_dict(), resumed.state_dict())
    assert len(guard.rewind.rewinds) == 1


def test_rewind_needs_an_optimizer():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentTypeError, match="`rewind` is given, and no optimizer is prepared"):
        AcceleratedGuard(accelerator, model, rewind={})
