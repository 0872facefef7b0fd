"""gg.check: the tensor itself where the condition holds, else an error with the rows; in eager, compiled and vmap."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, FailedCheckError
from tests import witness

NAN = float("nan")


def positive(x):
    return x > 0


def doubled(x):
    return gg.check(x, "finite", "hidden") * 2


def with_bad(rows, shape=(4, 3), value=NAN):
    x = torch.ones(shape)
    for row in rows:
        x[row, -1] = value
    return x


@given(st.data())
def test_the_rows_are_those_that_break_it(data):
    shape = data.draw(st.tuples(st.integers(0, 5), st.integers(1, 3)))
    bad = data.draw(st.sets(st.integers(0, shape[0] - 1), max_size=3)) if shape[0] else set()
    x = with_bad(bad, shape)
    if not bad:
        assert gg.check(x, "finite") is x
        return
    for condition in ("finite", lambda x: ~x.isnan(), lambda x: ~x.isnan().any(1)):
        with pytest.raises(FailedCheckError) as caught:
            gg.check(x, condition)
        assert caught.value.rows == tuple(sorted(bad))


@pytest.mark.parametrize(
    ("condition", "message", "text"),
    [
        ("finite", "hidden", "hidden: 2 of 4 rows are not finite: 1, 3. x[1, 2] is nan."),
        (positive, "", "check(): 2 of 4 rows break positive: 1, 3. x[1, 2] is nan."),
        (lambda x: (x > 0).all(1), "rates", "rates: 2 of 4 rows break <lambda>: 1, 3."),
        (lambda x: bool(x.isfinite().all()), "rates", "rates: x breaks <lambda>."),
        (lambda x: x.isfinite().all(), "rates", "rates: x breaks <lambda>."),
    ],
)
def test_what_it_says(condition, message, text):
    with pytest.raises(FailedCheckError) as caught:
        gg.check(with_bad([1, 3]), condition, message)
    assert str(caught.value) == text
    assert isinstance(caught.value, RuntimeError)


def test_a_tensor_without_dimensions():
    with pytest.raises(FailedCheckError, match=r"^loss: x is not finite\.$"):
        gg.check(torch.tensor(NAN), "finite", "loss")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: gg.check([1.0], "finite"), ArgumentTypeError, "check(): `x` is the list [1.0]."),
        (lambda x: gg.check(x, "positive"), ArgumentValueError, "check(): `condition` is the str 'positive'."),
        (lambda x: gg.check(x, None), ArgumentTypeError, "check(): `condition` is None."),
        (lambda x: gg.check(x, torch.sum), ArgumentTypeError, "check(): `condition(x)` is a float32 tensor"),
        (lambda x: gg.check(x, lambda x: x[0] > 0), ArgumentValueError, "(x)` is a bool tensor of shape (3,) for x of"),
    ],
)
def test_what_is_refused(call, error, text):
    with pytest.raises(error) as caught:
        call(torch.ones(4, 3))
    assert text in str(caught.value)


def test_the_gradient_is_that_of_x():
    witness.check_against(doubled, lambda x: x * 2, [torch.randn(3, 2)])
    x = torch.ones(2, requires_grad=True)
    (gg.check(x, "finite") * torch.tensor([NAN, 1.0])).sum().backward()
    assert x.grad.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("transform", "rows"),
    [
        (torch.vmap, (2,)),
        (lambda f: torch.vmap(f, in_dims=1), (2,)),  # the last column
        (lambda f: torch.vmap(torch.vmap(f)), (2,)),
        (lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())), (2,)),
        (lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()), (2,)),
        (lambda f: torch.func.grad(lambda x: f(x).sum()), (2,)),
    ],
)
def test_transforms(transform, rows):
    transform(doubled)(torch.ones(4, 3))
    with pytest.raises(FailedCheckError) as caught:
        transform(doubled)(with_bad([2]))
    assert caught.value.rows == rows


@pytest.mark.slow
def test_one_graph_in_torch_compile():
    compiled = torch.compile(doubled, fullgraph=True)
    assert compiled(torch.ones(4, 3)).eq(2).all()
    if torch.__version__ >= "2.9":  # the Inductor of torch 2.8 leaves assertions out
        with pytest.raises(RuntimeError, match=r"^hidden: some rows are not finite$"):
            compiled(with_bad([2]))
    torch.compile(lambda x: gg.check(x, positive) + 1, fullgraph=True, backend="eager")(torch.ones(2))


def test_limit_a_compiled_vmap_has_no_rule_for_an_assertion():
    with pytest.raises(Exception, match="_assert_async"):
        torch.compile(torch.vmap(doubled), fullgraph=True, backend="eager")(torch.ones(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_guard_drops_the_samples_that_break_it(compiled):
    model = torch.nn.Linear(3, 1)
    forward = torch.compile(model, backend="eager") if compiled else model

    def loss_fn(x):
        return forward(gg.check(x, lambda x: (x < 100).all(1), "too large")).square().mean()

    loss_fn = torch.compile(loss_fn, backend="eager") if compiled else loss_fn
    x = with_bad([1, 2], value=1000.0)
    result = gg.Guard(model).backward(x, loss_fn)
    assert [incident.row for incident in result.dropped] == [1, 2]
    assert all("too large" in incident.message for incident in result.dropped)
    gradient = model.weight.grad.clone()
    model.zero_grad()
    model(x[[0, 3]]).square().mean().backward()
    assert torch.equal(gradient, model.weight.grad)


@pytest.mark.slow
def test_python_without_assertions_asks_nothing():
    run = subprocess.run(
        [sys.executable, "-O", "-c", "import gradgate as gg; print(gg.check('no tensor', print))"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.stdout, run.returncode) == ("no tensor\n", 0), run.stderr


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("GRADGATE_CHECKS", "0")
    again = importlib.util.module_from_spec(importlib.util.find_spec("gradgate.gates._assertion"))
    again.__spec__.loader.exec_module(again)
    x = with_bad([0])
    assert again.check(x, "finite") is x
