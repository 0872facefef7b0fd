"""torch's own table of optimizers and their settings as a law: what is frozen or pinned stays bit-identical."""

import copy

import pytest
import torch
from torch import nn

import gradgate as gg
from tests.freezing.optimizers import classes


@pytest.fixture(scope="module")
def optimizers():
    """The table, which takes some seconds to import."""
    table = pytest.importorskip(
        "torch.testing._internal.common_optimizers",
        reason="torch.testing needs a package that is not installed (expecttest): its optimizers are not tried",
        exc_type=ImportError,
    )
    return {info.optim_cls: info for info in table.optim_db}


class Net(nn.Module):
    """Matrices only, so that Muon takes them; sparse tables for what takes nothing else."""

    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=sparse)
        self.other = nn.Embedding(5, 3, sparse=sparse)

    def forward(self, ids):
        return (self.table(ids) * self.other(ids)).tanh().pow(2).sum()


def trained(info, entry, how):
    """Train, with a freeze after two warm steps; give the handle, what is frozen, the values then and now."""
    torch.manual_seed(0)
    model = Net(sparse=info.only_supports_sparse_grads)
    kw = copy.deepcopy(entry.kwargs)
    optimizer = info.optim_cls(list(model.parameters()), **kw)
    ids = torch.tensor([0, 1, 1, 3, 4])

    def closure():
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        return loss

    def step():
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    for _ in range(2):
        step()
    weight = model.table.weight
    frozen = torch.zeros(5, 3, dtype=torch.bool)
    frozen[[0, 1]] = True
    if how == "freeze":
        frozen[:] = True
        handle = gg.freeze(model, "table.*")
    else:
        frozen[3, 1] = how == "elements"
        handle = gg.pin(weight, frozen=frozen)
    then, moving = weight.detach().clone(), model.other.weight.detach().clone()
    for _ in range(3):
        step()
    return handle, frozen, then, weight.detach(), not torch.equal(moving, model.other.weight)


def runs_here(info, entry):
    """Tell whether the CPU can: capturable needs an accelerator, fused a kernel."""
    if entry.kwargs.get("capturable"):
        return False
    return not entry.kwargs.get("fused") or "cpu" in getattr(info, "supports_fused_on", ())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "rows", "elements"])
@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_frozen_stays_bit_identical(kind, how, optimizers):
    if kind not in optimizers:
        pytest.skip("torch's table does not have it")
    info = optimizers[kind]
    entries = [entry for entry in info.optim_inputs_func(device="cpu") if runs_here(info, entry)]
    assert entries
    for entry in entries:
        handle, frozen, then, now, _ = trained(info, entry, how)
        assert torch.equal(now.view(torch.int32)[frozen], then.view(torch.int32)[frozen]), entry
        handle.verify()


def test_the_rest_does_move(optimizers):
    """A law about what stays would hold for a training that does nothing."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        assert trained(optimizers[kind], optimizers[kind].optim_inputs_func(device="cpu")[0], "rows")[-1]
