"""Bit-identical, under every optimizer of torch.optim, in every order of calls. Printed as a table by the run."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import gradgate as gg
from tests.compat import PINNED
from tests.freezing.optimizers import classes, recipes, runs_here

RECIPES = recipes()


class Net(nn.Module):
    """An embedding and two layers; only matrices learn, so that Muon takes it, and only the embedding if sparse."""

    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Embedding(6, 4, sparse=sparse)

    def forward(self, ids):
        return self.inner(self.table(ids)) * self.outer(ids)


class Run:
    """One training, with a freeze of `table`, or of some rows or some elements of it, put in at any time."""

    def __init__(self, recipe, how):
        torch.manual_seed(1)
        self.recipe, self.how = recipe, how
        self.model = Net(recipe.sparse)
        with torch.no_grad():
            self.model.table.weight[0, 0] = -0.0  # a bit that careless arithmetic loses
        if recipe.sparse:
            self.model.inner.requires_grad_(False)
        self.ids = torch.tensor([0, 1, 2, 3, 3, 5])
        self.optimizer = recipe.build([p for p in self.model.parameters() if p.requires_grad])
        self.accumulate, self.set_to_none, self.scaler = 1, True, None

    def freeze(self):
        weight = self.model.table.weight
        if self.how == "parameter":
            self.frozen = torch.ones_like(weight, dtype=torch.bool)
            self.handle = gg.freeze(self.model, "table.*")
        else:
            self.frozen = torch.zeros_like(weight, dtype=torch.bool)
            self.frozen[[0, 3]] = True
            if self.how == "elements":
                self.frozen[1:, ::2] = True
            elif self.how == "most rows":
                self.frozen[:5] = True
            self.handle = gg.pin(weight, frozen=self.frozen)
        self.start = weight.detach().clone()
        self.elsewhere = self.model.outer.weight.detach().clone()

    def backward(self):
        loss = self.model(self.ids).pow(2).mean() + self.model(self.ids).sum() * 0.1
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss

    def evaluate(self):
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        for _ in range(self.accumulate):
            loss = self.backward()
        return loss

    def step(self, count=3):
        for _ in range(count):
            closure = {"closure": self.evaluate} if self.recipe.closure else {}
            if not closure or self.scaler:
                self.evaluate()
            if self.scaler:
                self.scaler.step(self.optimizer, **closure)
                self.scaler.update()
            else:
                self.optimizer.step(**closure)

    def check(self):
        now = self.model.table.weight.detach()
        assert torch.equal(now[self.frozen].view(torch.int32), self.start[self.frozen].view(torch.int32))
        self.handle.verify()
        assert not torch.equal(self.model.outer.weight, self.elsewhere), "nothing was trained, so nothing was shown"
        if self.how != "parameter":
            free = ~self.frozen & torch.tensor([r in self.ids for r in range(6)])[:, None]
            assert (now[free] != self.start[free]).any(), "the free elements did not move"


def before_training(run):
    run.freeze()
    run.step()


def in_mid_training(run):
    run.step()
    run.freeze()
    run.step()


def stale_gradient(run):
    run.step()
    run.evaluate()
    run.freeze()
    if not run.recipe.closure:
        run.optimizer.step()
    run.step()


def gradient_put_back(run):
    """A gradient that the library did not see: written by hand, after the freeze."""
    run.step()
    run.freeze()
    run.evaluate()
    if run.how == "parameter":
        stale = torch.ones_like(run.model.table.weight)
        run.model.table.weight.grad = stale.to_sparse(1) if run.recipe.sparse else stale
    if not run.recipe.closure:
        run.optimizer.step()
    run.step(1)


def zeroed_gradient(run):
    run.set_to_none = False
    run.step()
    run.freeze()
    run.step()


def accumulation(run):
    run.accumulate = 3
    run.step()
    run.freeze()
    run.step()


def grad_scaler(run):
    run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.step()
    run.freeze()
    run.step()


def added_param_group(run):
    run.optimizer = run.recipe.build([run.model.outer.weight])
    run.freeze()
    run.optimizer.add_param_group({"params": [run.model.table.weight]})
    run.step()


def after_loading(run):
    run.step()
    model, optimizer = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    run.freeze()
    run.step()
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.handle.accept()
    run.start = run.model.table.weight.detach().clone()
    run.step()


WHEN = [
    before_training,
    in_mid_training,
    stale_gradient,
    gradient_put_back,
    zeroed_gradient,
    accumulation,
    grad_scaler,
    added_param_group,
    after_loading,
]
HOW = ("parameter", "rows", "most rows", "elements")
# What torch itself refuses, with its words.
REFUSED = {
    ("LBFGS", "grad_scaler"): "Closure use is not currently supported",
    ("LBFGS", "added_param_group"): "Expected exactly one param_group",
}


@functools.cache
def outcome(recipe):
    """Run one optimizer through everything; give a word for each order of calls."""
    here = runs_here(recipe)
    if here is not True:
        assert recipe.way == "capturable", f"torch cannot step so: {here}"
        return dict.fromkeys((when.__name__ for when in WHEN), "no GPU")
    words = {}
    for when in WHEN:
        reason = REFUSED.get((recipe.kind.__name__, when.__name__))
        if recipe.kind is torch.optim.Adagrad and when is added_param_group and torch.__version__ < "2.12":
            continue  # torch's own Adagrad fails there up to 2.10
        if reason == REFUSED["LBFGS", "added_param_group"] and torch.__version__ < "2.9":
            reason = "^$"  # an assertion without words
        for how in HOW:
            run = Run(recipe, how)
            if reason is not None:
                with pytest.raises((RuntimeError, AssertionError), match=reason):
                    when(run)
            else:
                when(run)
                run.check()
        words[when.__name__] = "same" if reason is None else "torch refuses"
    return words


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # torch 2.8's own LBFGS
@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{recipe.name}-{recipe.way}" for recipe in RECIPES])
def test_frozen_is_bit_identical(recipe):
    assert set(outcome(recipe).values()) <= {"same", "torch refuses", "no GPU"}


TRAININGS = ("plain", "foreach", "fused", "capturable", "maximize")


def summary(words):
    """Give one cell: what all orders of calls show, and those that torch refuses."""
    refused = [when.replace("_", " ") for when, word in words.items() if word == "torch refuses"]
    (rest,) = set(words.values()) - {"torch refuses"}
    return f"{rest}; torch refuses: {', '.join(refused)}" if refused else rest


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the table is that of torch {PINNED}")
def test_the_table_of_the_documentation_is_what_the_run_shows(capsys):
    """Print what was shown, one line for each optimizer and one column for each implementation, and compare."""
    cells = {}
    for recipe in RECIPES:
        cells.setdefault(recipe.name, dict.fromkeys(TRAININGS, "-"))[recipe.way] = summary(outcome(recipe))
    shown = Table("optimizer", *TRAININGS)
    lines = ["| optimizer | " + " | ".join(TRAININGS) + " |", "|---|" + "---|" * len(TRAININGS)]
    for name, row in cells.items():
        shown.add_row(name, *row.values())
        lines.append("| " + " | ".join([name, *row.values()]) + " |")
    with capsys.disabled():
        Console(width=200).print(shown)
    page = (Path(__file__).parents[2] / "docs" / "packages" / "freezing.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "the table in docs/packages/freezing.md is out of date"


def test_every_optimizer_of_torch_is_in_the_table():
    assert {recipe.kind for recipe in RECIPES} == set(classes())
    assert len(classes()) >= (15 if hasattr(torch.optim, "Muon") else 14)


def test_the_matrix_can_fail():
    """Without the freeze the same run moves the same elements."""
    run = Run(RECIPES[0], "rows")
    run.freeze()
    run.handle.release()
    run.step()
    with pytest.raises(AssertionError):
        run.check()
