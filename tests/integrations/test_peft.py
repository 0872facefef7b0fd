"""PEFT and programs in the manner of timm: names with and without the prefix of a wrapper, adapters, EMA, mixup."""

import copy
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gradgate as gg
from gradgate.errors import NothingMatchedError
from tests.integrations.faulty import equal


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(torch.relu(self.query(x)) + x)


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"layers": torch.nn.Sequential(Block(), Block())})
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.model["layers"](x)).squeeze(-1)


@pytest.fixture
def adapted():
    pytest.importorskip("peft")
    with warnings.catch_warnings():  # its own dependencies
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["head"], init_lora_weights=False)
    return get_peft_model(Base(), config)


PREFIX = "base_model.model."


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_names_with_and_without_the_prefix(adapted, prefix):
    frozen = gg.freeze(adapted, f"{prefix}model.layers.0.*")
    assert set(frozen.names) == {name for name, _ in adapted.named_parameters() if ".layers.0." in name}
    assert all(name.startswith(PREFIX) for name in frozen.names)
    frozen.thaw()
    alone = gg.train_only(adapted, f"{prefix}model.layers.1.query.lora_A.*")
    learning = [name for name, entry in gg.trainable(adapted).items() if entry["learning"]]
    assert learning == [f"{PREFIX}model.layers.1.query.lora_A.default.weight"]
    alone.thaw()
    schedule = gg.FreezeSchedule(adapted, {0: [f"{prefix}head.*"], 1: [f"{prefix}model.layers.1"]})
    schedule.set_epoch(0)
    assert all("head" in name for name, entry in gg.trainable(adapted).items() if entry["learning"])


def test_names_in_full_come_first():
    """What matches in the model itself is never looked for in what it wraps."""
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapper = torch.nn.Sequential(inner)
    assert gg.freeze(wrapper, "0.*").names == ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias")
    assert gg.freeze(wrapper, "1.*").names == ("0.1.weight", "0.1.bias")
    compiled = torch.nn.Sequential(torch.compile(inner))
    assert gg.freeze(compiled, "1.weight").names == ("0.1.weight",)
    two = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "decoder": torch.nn.Linear(2, 2)})
    with pytest.raises(NothingMatchedError):
        gg.freeze(two, "weight")  # two parts are no wrapper
    own = torch.nn.Sequential(inner)
    own.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(NothingMatchedError):
        gg.freeze(own, "1.*")  # it has a parameter of its own


def test_the_table_shows_adapters(adapted):
    table = gg.trainable(adapted)
    adapter = table[f"{PREFIX}model.layers.0.query.lora_A.default.weight"]
    base = table[f"{PREFIX}model.layers.0.query.base_layer.weight"]
    assert (adapter["state"], adapter["learning"]) == ("learns", 8)
    assert (base["state"], base["learning"], base["why"]) == ("frozen", 0, "requires_grad is False")


def test_elements_of_an_adapter_stay(adapted):
    adapter = adapted.get_parameter(f"{PREFIX}model.layers.0.query.lora_B.default.weight")
    before = adapter.detach().clone()
    with gg.pin(adapter, rows=[0]):
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        adapted(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    assert torch.equal(adapter[0], before[0])
    assert not torch.equal(adapter[1], before[1])


def test_a_guard_of_an_adapted_model(adapted):
    other = copy.deepcopy(adapted)
    rows = torch.randn(8, 4)
    bad = rows.clone()
    bad[3] = float("nan")
    keep = [row for row in range(8) if row != 3]
    result = gg.Guard(adapted).backward(bad, lambda x: adapted(x).square().mean())
    assert [one.row for one in result.dropped] == [3]
    other(rows[keep]).square().mean().backward()
    for one, alike in zip(adapted.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (alike.grad is None) == (not one.requires_grad)
        assert one.grad is None or torch.equal(one.grad, alike.grad)
    assert equal(dict(adapted.named_buffers()), dict(other.named_buffers()))


class Images(Dataset):
    def __init__(self, bad):
        self.rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
        self.rows[list(bad)] = float("inf")

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"image": self.rows[index], "target": self.rows[index].nan_to_num(0, 0, 0).sum(), "id": f"row-{index}"}


def mixup(model, batch):
    """Mix each sample with another one of the batch: a bad one spoils its partner, and is blamed alone."""
    weight = float(torch.distributions.Beta(0.8, 0.8).sample())
    partner = torch.arange(len(batch["image"])).flip(0)
    image = weight * batch["image"] + (1 - weight) * batch["image"][partner]
    target = weight * batch["target"] + (1 - weight) * batch["target"][partner]
    return torch.nn.functional.mse_loss(model(image), target)


def train_in_the_manner_of_timm(bad, batches):
    model = Base()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard, dropped = gg.Guard(model, ids="id"), []
    torch.manual_seed(1)
    for batch in DataLoader(Images(bad), batch_sampler=batches):
        optimizer.zero_grad()
        result = guard.backward(batch, lambda batch: mixup(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        dropped += [one.sample_id for one in result.dropped]
        assert result.exact
    return model, average, dropped


def test_batches_of_dicts_with_mixup_and_an_average():
    bad = (5, 14)
    batches = [list(range(start, start + 6)) for start in range(0, 24, 6)]
    model, average, dropped = train_in_the_manner_of_timm(bad, batches)
    kept = [[index for index in batch if index not in bad] for batch in batches]
    clean, clean_average, nothing = train_in_the_manner_of_timm((), kept)
    assert (dropped, nothing) == (["row-5", "row-14"], [])
    assert equal(model.state_dict(), clean.state_dict())
    assert equal(average.state_dict(), clean_average.state_dict())
