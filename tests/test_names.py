"""Misspelt names and keywords: the error names the right one; the right ones work as if nothing stood in between."""

import copy
import inspect
import pickle
import re

import pytest
import torch
from click.testing import CliRunner

import gradgate as gg
from gradgate import errors, freezing, ledger, losses, masked
from gradgate._names import describe, listed, nearest
from gradgate.cli import main

MODEL = torch.nn.Linear(1, 1)
X = torch.arange(6.0).reshape(2, 3)
KEEP = X > 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (X, "a float32 tensor of shape (2, 3)"),
        (torch.arange(2), "an int64 tensor of shape (2,)"),
        (torch.arange(2, dtype=torch.uint8), "a uint8 tensor of shape (2,)"),
        ("train", "the str 'train'"),
        (None, "None"),
    ],
)
def test_what_a_value_is_called(value, text):
    assert describe(value) == text


def test_lists_of_names():
    assert listed(["a", "b", "c"], limit=2) == "a, b and 1 more"
    assert nearest("encdoer.weight", ["encoder.weight", "head.bias"]) == ["encoder.weight"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: masked.mean(X, mask=KEEP),
            """masked.mean() has no argument 'mask'; did you mean keep=? True takes part
Why: its arguments are x, dim, keepdim, dtype, weights, keep, exclude, empty.""",
        ),
        (lambda: masked.mean(X, axis=1), "masked.mean() has no argument 'axis'; did you mean dim=?"),
        (lambda: masked.amax(X, 1, keepdims=True), "masked.amax() has no argument 'keepdims'; did you mean keepdim=?"),
        (lambda: masked.sum(X, kepp=KEEP), "masked.sum() has no argument 'kepp'; did you mean keep=? True takes part"),
        (lambda: gg.finite_grad(X, fill=1.0), "finite_grad() has no argument 'fill'; did you mean fill_value=?"),
        (lambda: masked.safe_log(X, fill=1.0), "masked.safe_log() has no argument 'fill'; did you mean fill_value=?"),
        (lambda: losses.reduce(X, weight=X), "losses.reduce() has no argument 'weight'; did you mean weights=?"),
        (lambda: gg.gate(X, mask=KEEP), "gate() has no argument 'mask'; did you mean keep=? True takes part"),
        (lambda: masked.std(X, ddof=1), "masked.std() has no argument 'ddof'; did you mean correction=?"),
        (lambda: gg.grad_mode(True, lock=False), "grad_mode() has no argument 'lock'; did you mean locked=?"),
        (lambda: gg.Incident(stge="load"), "Incident() has no argument 'stge'; did you mean stage=?"),
        (lambda: gg.Guard(MODEL).backward(X, lossfn=sum), "Guard.backward() has no argument 'lossfn'; did you mean"),
        (
            lambda: losses.masked_loss(torch.nn.MSELoss(), X, X, mask=KEEP),
            """losses.masked_loss() has no argument 'mask'; did you mean keep=? True takes part
Why: its arguments are loss_fn, input, target, keep, exclude, weights, empty.""",
        ),
        (lambda: gg.pin(X, mask=KEEP), "pin() has no argument 'mask'; did you mean frozen=? True does not move"),
        (lambda: gg.clip_grad(X, maxnorm=1.0), "clip_grad() has no argument 'maxnorm'; did you mean max_norm=?"),
        (lambda: gg.ClipGrad(maxnorm=1.0), "ClipGrad() has no argument 'maxnorm'; did you mean max_norm=?"),
        (lambda: gg.at(X)[0].set(1.0, mod="drop"), "edits.Selection.set() has no argument 'mod'; did you mean mode=?"),
        (
            lambda: gg.Guard(MODEL, lodger="x"),
            "Guard() has no argument 'lodger'; did you mean ledger=?",
        ),
        (lambda: gg.Guard(torch.nn.Linear(1, 1)).backward(X, sum, id=[1, 2]), "did you mean ids=?"),
        (lambda: gg.freeze(torch.nn.Linear(1, 1), "*", statistic=False), "did you mean statistics=?"),
        (
            lambda: gg.diagnose(MODEL, colour=1),
            "diagnose() has no argument 'colour'\nWhy: its arguments",
        ),
    ],
)
def test_a_misspelt_keyword(call, text):
    with pytest.raises(errors.ArgumentTypeError) as caught:
        call()
    assert text in str(caught.value)


def public_callables():
    """Yield each public function, constructor and method that takes no `**kwargs`, with what it needs first."""
    for module in map(gg.__getattr__, gg._PACKAGES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value, ()
            elif inspect.isclass(value) and not issubclass(value, Exception) and not getattr(value, "_is_protocol", 0):
                for key in ("__init__", *(key for key in dir(value) if not key.startswith("_"))):
                    method = inspect.getattr_static(value, key)
                    if inspect.isfunction(method) and method.__module__.startswith("gradgate."):
                        yield f"{module.__name__}.{name}.{key}", method, (None,)


CALLABLES = {
    label: (function, first)
    for label, function, first in public_callables()
    if all(each.kind is not each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
}


def test_every_public_callable_refuses_a_keyword_in_one_text():
    """Also where an argument that it needs is missing: it may be the one that is misspelt."""
    assert len(CALLABLES) > 200
    for label, (function, first) in CALLABLES.items():
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        with pytest.raises(errors.ArgumentTypeError) as caught:
            function(*first, zzz=1)
        text = str(caught.value)
        assert re.fullmatch(r"[\w.]+\(\) has no argument 'zzz'", text.splitlines()[0]), label
        assert text.splitlines()[1] == f"Why: its arguments are {', '.join(names)}." if names else "Why: it takes none."
        for right in set(names) & {"keep", "dim", "keepdim"}:
            wrong = {"keep": "mask", "dim": "axis", "keepdim": "keepdims"}[right]
            with pytest.raises(errors.ArgumentTypeError, match=f"no argument '{wrong}'; did you mean {right}=\\?"):
                function(*first, **{wrong: 1})


@pytest.mark.parametrize(
    ("look_up", "text"),
    [
        (lambda: gg.Gaurd, "module 'gradgate' has no attribute 'Gaurd'; did you mean Guard?"),
        (lambda: gg.maksed, "module 'gradgate' has no attribute 'maksed'; did you mean masked?"),
        (lambda: masked.meen, "module 'gradgate.masked' has no attribute 'meen'; did you mean mean?"),
        (lambda: freezing.freze, "module 'gradgate.freezing' has no attribute 'freze'; did you mean freeze?"),
        (lambda: ledger.Leger, "module 'gradgate.ledger' has no attribute 'Leger'; did you mean Ledger?"),
        (lambda: gg.modes.grad_mod, "module 'gradgate.modes' has no attribute 'grad_mod'; did you mean grad_mode?"),
        (
            lambda: errors.LegerError,
            "module 'gradgate.errors' has no attribute 'LegerError'; did you mean LedgerError?",
        ),
        (lambda: gg.records.Incidnt, "module 'gradgate.records' has no attribute 'Incidnt'; did you mean Incident?"),
        (lambda: gg.zzz, "module 'gradgate' has no attribute 'zzz'"),
        (lambda: masked._secret, "module 'gradgate.masked' has no attribute '_secret'"),
    ],
)
def test_a_misspelt_name(look_up, text):
    with pytest.raises(AttributeError) as caught:
        look_up()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ledgr"], "No such command 'ledgr'. Did you mean 'ledger'?"),
        (["ledger", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
    ],
)
def test_a_misspelt_command(words, text):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert text in done.output


def test_signatures_names_and_copies_stay():
    assert list(inspect.signature(masked.mean).parameters) == [
        "x",
        "dim",
        "keepdim",
        "dtype",
        "weights",
        "keep",
        "exclude",
        "empty",
    ]
    assert inspect.signature(gg.pin).parameters["rows"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "self" not in inspect.signature(gg.Guard).parameters
    for thing in (masked.mean, gg.gate, gg.freeze, gg.GateMeter, gg.resilient):
        assert pickle.loads(pickle.dumps(thing)) is copy.deepcopy(thing) is thing
        assert thing.__doc__
        assert inspect.getsource(thing)
    with pytest.raises(TypeError, match=r"mean\(\) missing 1 required positional argument: 'x'"):
        masked.mean()
    with pytest.raises(TypeError, match=r"Guard.__init__\(\) missing 1 required positional argument: 'model'"):
        gg.Guard()
    with pytest.raises(TypeError, match=r"mean\(\) takes from 1 to 2 positional arguments but 3 were given"):
        masked.mean(X, 1, True)


def test_a_fault_inside_a_function_is_its_own():
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'") as caught:
        gg.apply_where(KEEP, X, lambda x: torch.exp(x), lambda x: (lambda: 0)(mask=1))
    assert not isinstance(caught.value, errors.ArgumentTypeError)


def test_a_mask_of_the_loss_itself_is_handed_on():
    def loss(input, target, mask):
        return ((input - target).square() * mask).mean()

    assert losses.masked_loss(loss, X, X + 2, mask=KEEP) == 2


def test_compiled_whole():
    compiled = torch.compile(lambda x: masked.mean(gg.gate(x, x > 2), 1, keep=x > 1), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), masked.mean(X, 1, keep=X > 1))


# --- what a person sees of an object ---------------------------------------------------------------------------------


def test_every_public_class_has_a_repr_of_its_own():
    classes = {
        getattr(module, name)
        for module in map(gg.__getattr__, gg._PACKAGES)
        for name in module.__all__
        if isinstance(getattr(module, name), type) and not getattr(getattr(module, name), "_is_protocol", False)
    }
    assert len(classes) > 30
    assert not [kind for kind in classes if kind.__repr__ is object.__repr__]


def made(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    data, book = torch.utils.data.TensorDataset(torch.ones(4, 3)), gg.Ledger(tmp_path / "run.ledger", run="night")
    book.record(gg.Incident(stage="load", cause="exception", sample_id="2"))
    shown = f"Ledger({str(tmp_path / 'run.ledger')!r}, run='night')"
    guard = gg.Guard([model, torch.nn.ReLU()], ledger=book)
    guard.backward(torch.ones(4, 3), lambda batch: model(batch).mean())
    exact = losses.ExactMean(model)
    yield guard, f"Guard(Sequential, ReLU, steps=1, samples=4, dropped=0, {shown})"
    yield book, shown
    yield exact, "ExactMean(Sequential, nothing added yet)"
    exact.backward(model(torch.ones(2, 3)).sum(), 2)
    yield exact, "ExactMean(Sequential, finish() is due)"
    yield gg.at(X)[1:, ..., [0, 2], None, ::2], "at(a float32 tensor of shape (2, 3))[1:, ..., [0, 2], None, ::2]"
    yield gg.at(X)[KEEP], "at(a float32 tensor of shape (2, 3))[a bool tensor of shape (2, 3)]"
    yield gg.at(X)[list(range(500))], "at(a float32 tensor of shape (2, 3))[[0, 1, 2, 3, 4, 5, ...]]"
    yield gg.at({"a": X}), "at(dict)"
    yield gg.Guard(torch.compile(model)), "Guard(Sequential, steps=0, samples=0, dropped=0)"
    table = gg.trainable(model)
    yield table, str(table)
    yield gg.AdaptiveClip(model), "AdaptiveClip(by='history', steps=0, clipped=0)"
    yield gg.resilient([1.0])[7], "BadSample('7', IndexError: list index out of range)"
    sampler = gg.QuarantineSampler(torch.utils.data.SequentialSampler(data), book)
    yield sampler, f"QuarantineSampler(SequentialSampler, {shown}, known_bad=1)"
    yield gg.without(data, book), "without(TensorDataset: 3 of 4 samples)"
    yield gg.resilient(torch.utils.data.DataLoader(data)), "<resilient DataLoader: 0 samples left out>"
    yield gg.resilient(data), "<resilient TensorDataset: 0 samples left out>"
    yield gg.Rewind(model, torch.optim.SGD(model.parameters(), 0.1)), "Rewind(step 0, 0 rewinds, no snapshot yet)"
    yield gg.GateMeter(), "GateMeter(passed=0, stopped=0, norm_in=0, norm_out=0)"
    yield gg.watch(model), "Watch(Sequential, bad_steps=0)"
    yield gg.trace(model), "Tracing(steps=0, off)"
    yield gg.pin(model[0].weight, rows=[0]), "Pin(3 of 6 elements)"
    yield gg.train_rows(torch.nn.Embedding(10, 3), rows=[1, 2]), "RowTraining(2 of 10 rows of Embedding)"
    with gg.freeze(model, "1.*") as handle:
        yield handle, "FreezeHandle(1.weight, 1.bias)"
    schedule = gg.FreezeSchedule(model, {0: ["1.*"], 3: ["0.bias"]})
    yield schedule, "FreezeSchedule(epoch 0: 2 of 4 parameters learn; more from epoch 3 on)"
    schedule.set_epoch(3)
    yield schedule, "FreezeSchedule(epoch 3: 3 of 4 parameters learn)"
    book.close()


@pytest.mark.slow
def test_reprs(tmp_path):
    for thing, text in made(tmp_path):
        assert repr(thing) == text
