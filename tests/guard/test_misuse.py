"""Wrong calls are refused before any search, and the advice fits what went wrong: it works when pasted."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg
from gradgate.errors import ArgumentTypeError


class Counted:
    """A loss function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def refusal(model, batch, loss_fn):
    with pytest.raises(ArgumentTypeError) as caught:
        gg.Guard(model).backward(batch, loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())
    return caught.value


def pasted(fix, **names):
    """Run a fix as a user does, and give what it assigned or made."""
    names |= {"gg": gg, "torch": torch}
    exec(fix, names)
    return names


# --- what is refused at once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [torch.ones(()), 0.5, None, "loss", [1.0]], ids=repr)
def test_a_loss_in_place_of_the_function(given):
    model = nn.Linear(3, 1)
    error = refusal(model, torch.ones(4, 3), given)
    assert error.what.startswith("Guard.backward(): `loss_fn` is ")
    assert error.fix == "guard.backward(batch, loss_fn)   # the function itself, not what it returned"
    pasted(error.fix, guard=gg.Guard(model), batch=torch.ones(4, 3), loss_fn=lambda x: model(x).mean())
    assert model.weight.grad is not None


def test_arguments_in_the_other_order():
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    error = refusal(model, lambda x: model(x).mean(), x)
    assert "and `batch` a function" in error.what
    assert (error.why, error.fix) == ("the batch comes first.", "guard.backward(batch, loss_fn)")
    with pytest.raises(
        ArgumentTypeError, match=r"Guard.forward\(\): `fn` is a float32 tensor.*\n.*comes first"
    ) as caught:
        gg.Guard(model).forward(model, x)
    assert caught.value.fix == "guard.forward(batch, fn)"


def two(x, y):
    return (x - y).square().mean()


PAIR = (torch.ones(4, 3), torch.zeros(4, 3))
MODEL = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("function", "batch", "fix"),
    [
        (lambda x, y: (MODEL(x) - y).square().mean(), PAIR, "loss_fn(*batch)"),
        (lambda x, y: (MODEL(x) - y).square().mean(), {"x": PAIR[0], "y": PAIR[1]}, "loss_fn(**batch)"),
        (lambda model, batch: model(batch).mean(), PAIR[0], "loss_fn(model, batch)"),
        (lambda batch, net: net(batch).mean(), PAIR[0], "loss_fn(batch, model)"),
        (nn.MSELoss(), PAIR, "loss_fn(model(batch[0]), batch[1])"),
        (F.mse_loss, PAIR, "loss_fn(model(batch[0]), batch[1])"),
        (functools.partial(lambda p, x, y: (MODEL(x) - y).norm(p), 2), PAIR, "loss_fn(*batch)"),
        (two, PAIR[0], ""),
        (lambda: MODEL(PAIR[0]).mean(), PAIR[0], ""),
        (lambda x, *, target: two(x, target), PAIR[0], ""),
    ],
)
def test_a_function_of_other_arguments(function, batch, fix):
    MODEL.zero_grad()
    error = refusal(MODEL, batch, function)
    assert "cannot be called with the batch alone" in error.what
    assert error.fix == (fix and f"guard.backward(batch, lambda batch: {fix})")
    if fix:
        pasted(error.fix, guard=gg.Guard(MODEL), batch=batch, model=MODEL, loss_fn=function)
        assert MODEL.weight.grad is not None


def test_a_type_error_of_a_sample_is_still_a_sample():
    """Raised from within the function, or by one that can be called so."""
    model = nn.Linear(3, 1)
    rows = [torch.ones(3), torch.ones(3), None, torch.ones(3)]
    for loss_fn in (
        lambda rows: model(torch.stack(rows)).mean(),
        functools.partial(lambda scale, rows: model(torch.stack(rows)).mean() * scale, 2.0),
    ):
        assert gg.Guard(model).backward(rows, loss_fn, ids=range(4)).kept == [0, 1, 3]


@pytest.mark.parametrize("gave", [None, 0.5, (torch.ones(()), 1, 2)], ids=["None", "float", "tuple"])
def test_what_is_no_loss_is_refused_after_one_call(gave):
    model = nn.Linear(3, 1)
    loss_fn = Counted(lambda x: (model(x).mean(), gave)[1])
    error = refusal(model, torch.ones(4, 3), loss_fn)
    assert error.what.startswith("Guard.backward(): `loss_fn` returned ")
    assert loss_fn.calls == 1


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize(
    "gives", [lambda loss: loss, lambda loss: None, lambda loss: loss.item(), lambda loss: loss.detach()]
)
@pytest.mark.parametrize("bad", [False, True])
def test_a_loss_function_that_calls_backward_itself(keeps_graph, gives, bad):
    model = nn.Linear(3, 1)
    x = torch.ones(4, 3)
    if bad:
        x[1] = float("nan")

    def walks_back(x):
        loss = model(x).square().mean()
        loss.backward(retain_graph=keeps_graph)
        return gives(loss)

    loss_fn = Counted(walks_back)
    error = refusal(model, x, loss_fn)
    assert error.what == "Guard.backward(): `loss_fn` calls backward() itself."
    assert loss_fn.calls == 1


def test_gradients_of_earlier_steps_and_of_inputs_are_not_the_loss_function_s():
    model = nn.Linear(3, 1)
    x = torch.ones(4, 3, requires_grad=True)
    model(x).mean().backward()

    def adversarial(x):
        (slope,) = torch.autograd.grad(model(x).mean(), x, create_graph=True)
        return model(x).mean() + slope.square().mean()

    gg.Guard(model).backward(x, adversarial)
    assert model.weight.grad is not None


# --- when every sample fails ---------------------------------------------------------------------------------------


def told(model, batch, loss_fn):
    """Give what stands behind the exception, or our own."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the user's code raises
        gg.Guard(model).backward(batch, loss_fn)
    error = caught.value
    return error if isinstance(error, gg.GradgateError) else error.__cause__


def linear_loss(model):
    return lambda batch: model(batch[0] if isinstance(batch, tuple | list) else batch).square().mean()


def test_an_exception_of_the_code_has_no_fix():
    model = nn.Linear(3, 1)
    for loss_fn in (lambda x: model(x).meen(), lambda x: model(x[:, :2]).mean(), lambda x: {}["key"] + model(x)):
        error = told(model, torch.ones(4, 3), loss_fn)
        assert (error.why, error.fix) == ("a fault of the code must be seen; no sample was dropped.", "")


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        (torch.ones(4, 3, dtype=torch.float64), "batch = batch.to(torch.float32)"),
        (
            (torch.ones(4, 3, dtype=torch.float64), torch.ones(4, dtype=torch.long)),
            "batch = (batch[0].to(torch.float32), batch[1])",
        ),
    ],
)
def test_a_batch_of_another_dtype(batch, fix):
    model = nn.Linear(3, 1)
    error = told(model, batch, linear_loss(model))
    assert error.why == "the model has torch.float32 parameters, and the batch another dtype."
    assert error.fix == fix
    gg.Guard(model).backward(pasted(fix, batch=batch)["batch"], linear_loss(model))


def test_a_batch_of_another_dtype_by_name():
    model = nn.Linear(3, 1)
    batch = {"x": torch.ones(4, 3, dtype=torch.float64), "y": torch.ones(4)}
    loss_fn = lambda b: (model(b["x"])[:, 0] - b["y"]).square().mean()  # noqa: E731
    error = told(model, batch, loss_fn)
    assert error.fix == "batch = {**batch, 'x': batch['x'].to(torch.float32)}"
    gg.Guard(model).backward(pasted(error.fix, batch=batch)["batch"], loss_fn)


def test_a_batch_on_another_device():
    model = nn.Linear(3, 1, device="meta")
    error = told(model, [torch.ones(4, 3)], lambda b: (model.weight + b[0]).sum())
    assert error.why == "the model is on meta, and the batch is not."
    assert error.fix == 'batch = [batch[0].to("meta")]'
    assert pasted(error.fix, batch=[torch.ones(4, 3)])["batch"][0].is_meta


def test_something_else_on_another_device():
    model = nn.Linear(3, 1)
    error = told(model, torch.ones(4, 3), lambda x: (model(x) + torch.ones(4, 4, device="meta")).mean())
    assert (error.why, error.fix) == ("model and batch are on cpu; something else is not.", "")


def test_a_graph_that_was_walked_already():
    encoder, model = nn.Linear(3, 3), nn.Linear(3, 1)
    batch = encoder(torch.ones(4, 3)).tanh()
    batch.sum().backward()
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    error = told(model, batch, loss_fn)
    assert error.fix == "batch = batch.detach()"
    gg.Guard(model).backward(pasted(error.fix, batch=batch)["batch"], loss_fn)


def test_a_state_that_is_carried_from_step_to_step():
    model = nn.Linear(3, 3)
    hidden = torch.zeros(3)

    def loss_fn(x):
        nonlocal hidden
        hidden = model(x + hidden).tanh().mean(0)
        return hidden.square().mean()

    guard = gg.Guard(model)
    guard.backward(torch.ones(4, 3), loss_fn)
    with pytest.raises(RuntimeError, match="second time") as caught:
        guard.backward(torch.ones(4, 3), loss_fn)
    error = caught.value.__cause__
    assert error.fix == "hidden = hidden.detach()   # before guard.backward(...)"
    hidden = pasted(error.fix, hidden=hidden)["hidden"]
    guard.backward(torch.ones(4, 3), loss_fn)


def test_no_gradient_is_recorded():
    model = nn.Linear(3, 1)
    batch, loss_fn = torch.ones(4, 3), linear_loss(model)
    with torch.no_grad():
        error = told(model, batch, loss_fn)
        assert "recording is switched off" in error.why
        pasted(error.fix, guard=gg.Guard(model), batch=batch, loss_fn=loss_fn)
    assert model.weight.grad is not None


def test_nothing_is_trained():
    model = nn.Linear(3, 1).requires_grad_(False)
    batch, loss_fn = torch.ones(4, 3), linear_loss(model)
    error = told(model, batch, loss_fn)
    assert (error.why, error.fix) == (
        "no parameter of the guarded model requires a gradient.",
        "model.requires_grad_(True)",
    )
    pasted(error.fix, model=model)
    gg.Guard(model).backward(batch, loss_fn)


def test_a_loss_that_is_cut_off_is_shown_by_the_doctor(capsys):
    model = nn.Linear(3, 1)
    batch, loss_fn = torch.ones(4, 3), lambda x: model(x).detach().mean()
    error = told(model, batch, loss_fn)
    assert "something cuts it off" in error.why
    pasted(error.fix, model=model, batch=batch, loss_fn=loss_fn)
    assert "detach" in capsys.readouterr().out


def test_parameters_that_are_not_finite():
    model = nn.Linear(3, 1)
    model.weight.data.fill_(float("nan"))
    error = told(model, torch.ones(4, 3), linear_loss(model))
    assert "parameters are not finite themselves: weight" in error.what
    assert (error.why.startswith("the parameters were not finite before this step"), error.fix) == (True, "")


def test_a_batch_in_which_nothing_is_finite():
    model = nn.Linear(3, 1)
    error = told(model, torch.full((4, 3), float("nan")), linear_loss(model))
    assert (error.why.startswith("no row of a float32 tensor of shape (4, 3) in the batch is finite"), error.fix) == (
        True,
        "",
    )


@pytest.mark.parametrize("function", [lambda y: (y * 0).log().sum() * 0, lambda y: (y.mean() * 0).sqrt() + y.sum() * 0])
def test_a_value_of_everything_is_shown_by_the_doctor(function, capsys):
    model = nn.Linear(3, 1)
    batch, loss_fn = torch.ones(4, 3), lambda x: function(model(x))
    error = told(model, batch, loss_fn)
    assert isinstance(error, gg.TooManyBadSamples)
    pasted(error.fix, model=model, batch=batch, loss_fn=loss_fn)
    assert "test_misuse.py" in capsys.readouterr().out


def test_a_loss_that_does_not_read_its_batch():
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    for loss_fn in (lambda batch: model(x).meen(), lambda batch: model(x).mean() * float("nan")):
        error = told(model, x, loss_fn)
        assert (error.why, error.fix) == (
            "`loss_fn` must use the batch that it is given: the guard calls it with parts of yours.",
            "",
        )
    for loss_fn in (lambda batch: (lambda: model(batch).meen())(), lambda batch: [model(batch).meen() for _ in "a"]):
        assert "must use the batch" not in told(model, x, loss_fn).why


# --- what a step gives back, and the guard as a thing --------------------------------------------------------------


def test_backward_of_the_result_says_that_the_gradients_are_there():
    model = nn.Linear(3, 1)
    result = gg.Guard(model).backward(torch.ones(4, 3), lambda x: model(x).square().mean())
    for loss in (result.loss, copy.deepcopy(result.loss)):
        for arguments in ({}, {"retain_graph": True}):
            with pytest.raises(gg.GradgateError, match=r"result.loss.backward\(\): the gradients are already there"):
                loss.backward(**arguments)


def test_the_loss_of_a_result_is_a_plain_detached_tensor():
    model = nn.Linear(3, 1)
    result = gg.Guard(model).backward(torch.ones(4, 3), lambda x: model(x).square().mean())
    loss = result.loss
    assert (type(loss), loss.dim(), loss.requires_grad, loss.grad_fn) == (torch.Tensor, 0, False, None)
    assert float(loss) == loss.item() == float(loss.numpy())
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=True)["loss"], pickle.loads(pickle.dumps(loss)), copy.copy(loss)):
        assert torch.equal(twin, loss)
        assert not twin.__dict__
    sum_ = loss + model(torch.ones(1, 3)).sum()
    sum_.backward()
    twin = pickle.loads(pickle.dumps(result))
    assert (twin.kept, twin.exact, twin.loss.item()) == ([0, 1, 2, 3], True, loss.item())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_guard_is_copied_and_pickled_with_its_model(tmp_path, again):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    guard = gg.Guard(model, ledger=tmp_path / "run.ledger", max_bad=0.25, min_kept=2)
    guard.epoch, guard.patience = 3, 7
    x = torch.randn(8, 3)
    x[1] = float("nan")
    guard.backward(x, lambda x: model(x).square().mean())
    twin, its_model = again((guard, model))
    assert (twin.max_bad, twin.min_kept, twin.epoch, twin.patience, twin.run) == (0.25, 2, 3, 7, guard.run)
    assert twin.summary() == guard.summary()
    model.zero_grad()
    its_model.zero_grad()
    result = twin.backward(x, lambda x: its_model(x).square().mean())
    guard.backward(x, lambda x: model(x).square().mean())
    assert (result.kept, result.exact) == ([0, 2, 3, 4, 5, 6, 7], True)
    assert all(map(torch.equal, model.state_dict().values(), its_model.state_dict().values()))
    assert len(gg.Ledger(tmp_path / "run.ledger").incidents()) == 3
