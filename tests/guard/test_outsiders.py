"""A module that runs in the loss and is not under guard: one warning, with the line to write, and no false one."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import GradgateWarning


def batch(*bad):
    x = torch.linspace(-1, 1, 24).reshape(8, 3)
    x[list(bad)] = float("nan")
    return x


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def warned_in(guard, loss_fn, *batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [guard.backward(x, loss_fn) for x in batches]
    return [str(one.message) for one in caught if issubclass(one.category, GradgateWarning)], results


@pytest.mark.parametrize("batches", [[batch()], [batch(), batch(1)], [batch(1)], [batch(1), batch(2), batch()]])
def test_the_wrong_module_is_warned_of_once_with_the_line_to_write(batches):
    other, model = nn.Linear(3, 3), net()
    texts, _ = warned_in(gg.Guard(other), lambda x: model(x).square().mean(), *batches)
    (text,) = texts
    assert text == (
        "Guard: a module runs in the loss and is not under guard: `model` (Sequential).\n"
        "Why: it has parameters that the loss trains and buffers that the step writes; "
        "only what is under guard is checked and put back in every step.\n"
        "Fix: guard = gg.Guard(model)"
    )
    guard = eval(text.rpartition("= ")[2], {"gg": gg, "model": model})
    model.load_state_dict(net().state_dict())
    texts, results = warned_in(guard, lambda x: model(x).square().mean(), batch(1))
    assert not texts
    assert results[0].exact
    assert all(bool(b.isfinite().all()) for b in model.buffers())


def test_the_warning_stands_at_the_line_of_the_step():
    model, head = nn.Linear(3, 3), nn.Linear(3, 1)
    with pytest.warns(GradgateWarning, match=r"Fix: guard = gg.Guard\(\[model, head\]\)") as caught:
        gg.Guard(model).backward(batch(), lambda x: head(model(x)).mean())
    assert caught[0].filename == __file__


def test_a_part_under_guard_is_not_enough():
    model = net()
    texts, results = warned_in(gg.Guard(model[0]), lambda x: model(x).square().mean(), batch(1))
    assert texts[0].endswith("Fix: guard = gg.Guard(model)")
    assert not results[0].exact


class Trainer:
    """The model and what belongs to it as attributes of something that is no module."""

    def __init__(self):
        self.model = nn.Linear(3, 3)
        self.parts = {"head": [nn.BatchNorm1d(3, affine=False)]}

    def loss(self, x, power=2):
        return self.parts["head"][0](self.model(x)).pow(power).mean()


class Hiding(nn.Module):
    """Keeps a layer in a list, where `parameters()` does not find it."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 3)]
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.layers[0](x))


trainer = Trainer()


def test_what_is_reached_through_attributes_functions_and_partials_is_found():
    def helper(x):
        return trainer.loss(x)

    for loss_fn, line in (
        (trainer.loss, "gg.Guard([self.model, self.parts['head'][0]])"),
        (lambda x: trainer.loss(x), "gg.Guard([trainer.model, trainer.parts['head'][0]])"),
        (lambda x: helper(x), "gg.Guard([trainer.model, trainer.parts['head'][0]])"),
        (functools.partial(trainer.loss, power=4), "gg.Guard([self.model, self.parts['head'][0]])"),
        (lambda x, trainer=trainer: trainer.loss(x), "gg.Guard([trainer.model, trainer.parts['head'][0]])"),
    ):
        texts, _ = warned_in(gg.Guard(trainer.model), loss_fn, batch())
        assert [text.rpartition("guard = ")[2] for text in texts] == [line]
    model = Hiding()
    texts, _ = warned_in(gg.Guard(model), lambda x: model(x).mean(), batch())
    assert texts[0].endswith("guard = gg.Guard([model, model.layers[0]])")


def test_a_module_that_only_a_search_sees_is_warned_of_in_the_bad_step():
    model, late = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)
    steps = iter(range(100))
    guard = gg.Guard(model)
    loss_fn = lambda x: (late(model(x)) if next(steps) else model(x)).square().mean()  # noqa: E731
    texts, results = warned_in(guard, loss_fn, batch(), batch(1))
    assert not results[1].exact
    assert len(texts) == 1


def no_false_warning():
    """Programs in which everything that is written or trained is under guard."""
    model, other, teacher = net(), net(), net().eval()
    average = torch.optim.swa_utils.AveragedModel(model)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    position = nn.Module()
    position.register_buffer("table", torch.ones(3))
    scale = nn.Parameter(torch.ones(()))
    parallel, frozen = nn.DataParallel(model), copy.deepcopy(teacher).requires_grad_(False)
    late = nn.Linear(3, 3)
    of_late = gg.Guard(late)
    nn.utils.parametrizations.weight_norm(late)

    def distilled(x):
        with torch.no_grad():
            wanted = teacher(x) + average.module.eval()(x)
        return (model(x) - wanted).square().mean()

    def functional(x):
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()

    labels = torch.zeros(8, dtype=torch.long)
    yield "a loss with a constant buffer", gg.Guard(model), lambda x: weighted(model(x), labels[: len(x)])
    yield "a loss without state", gg.Guard(model), lambda x: nn.MSELoss()(model(x), x)
    yield "a constant table", gg.Guard(model), lambda x: (model(x) + position.table).square().mean()
    yield "a teacher and an average in eval mode", gg.Guard(model), distilled
    yield "a frozen extractor", gg.Guard(model), lambda x: frozen(model(x)).square().mean()
    yield "a parameter of nobody", gg.Guard(model), lambda x: (model(x) * scale).square().mean()
    yield "a wrapper in the loss", gg.Guard(model), lambda x: parallel(x).square().mean()
    yield "a wrapper under guard", gg.Guard(parallel), lambda x: model(x).square().mean()
    yield "a compiled wrapper", gg.Guard(torch.compile(model, backend="eager")), lambda x: model(x).square().mean()
    yield "a part of what is under guard", gg.Guard(model), lambda x: model[0](x).square().mean()
    yield "a functional call", gg.Guard(model), functional
    yield "parametrized afterwards", of_late, lambda x: late(x).square().mean()
    yield "reachable, but not run", gg.Guard(model), lambda x: (model if len(x) else other)(x).square().mean()


@pytest.mark.parametrize(
    ("name", "guard", "loss_fn"), list(no_false_warning()), ids=lambda it: it if isinstance(it, str) else ""
)
def test_there_is_no_false_warning(name, guard, loss_fn):
    texts, results = warned_in(guard, loss_fn, batch(), batch(1), batch())
    assert not texts, name
    assert all(result.exact for result in results), name


@pytest.mark.slow
def test_a_guard_holds_on_to_nothing_outside_of_its_step():
    model, others = nn.Linear(3, 3), [nn.Linear(3, 3)]
    guard = gg.Guard(model)
    guard.backward(batch(), lambda x: model(x).mean() * len(others))
    with pytest.raises(AttributeError):
        guard.backward(batch(), lambda x: model(x).meen() * len(others))
    seen = weakref.ref(others.pop())
    gc.collect()
    assert seen() is None


def test_a_walk_ends_even_where_the_objects_do_not():
    """A list that holds itself, a dataset of a million, an empty cell, an object that denies its attributes."""

    class Denying:
        def __getattr__(self, name):
            raise RuntimeError(name)

    endless = [range(10), Denying(), list(range(1_000_000))]
    endless.append(endless)
    model = nn.Linear(3, 1)

    def loss_fn(x):
        return model(x).mean() + 0 * len(endless) if x is not None else later

    gg.Guard(model).backward(batch(), loss_fn)
    later = None


def test_a_weak_proxy_of_a_module_is_no_module():
    """Lightning's modules have such a thing; nothing can be noted about it."""
    model = net()
    proxy = weakref.proxy(model)
    texts, _ = warned_in(gg.Guard(model), lambda x: proxy(x).square().mean(), batch(), batch(1))
    assert texts == []
