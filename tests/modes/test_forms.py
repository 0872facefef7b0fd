"""Every form of grad_mode: it holds inside, and what was in force comes back."""

import inspect
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg

FLAGS = pytest.mark.parametrize("flag", [True, False])
LOCKED = pytest.mark.parametrize("locked", [True, False])


@pytest.fixture
def weight():
    return torch.ones(2, requires_grad=True)


@FLAGS
@LOCKED
@pytest.mark.parametrize("before", [True, False])
def test_each_form_holds_inside_and_restores(flag, locked, before):
    with torch.set_grad_enabled(before):
        assert gg.grad_mode(flag, torch.is_grad_enabled, locked=locked) is flag
        assert torch.is_grad_enabled() is before
        with gg.grad_mode(flag, locked=locked):
            assert torch.is_grad_enabled() is flag
        assert torch.is_grad_enabled() is before
        assert gg.grad_mode(flag, locked=locked)(torch.is_grad_enabled)() is flag
        assert torch.is_grad_enabled() is before


@LOCKED
def test_an_exception_restores(locked):
    def fail():
        raise KeyError("body")

    for run in (lambda: gg.grad_mode(False, fail, locked=locked), gg.grad_mode(False, locked=locked)(fail)):
        with pytest.raises(KeyError, match="body"):
            run()
        assert torch.is_grad_enabled()
    with pytest.raises(KeyError), gg.grad_mode(False, locked=locked), gg.grad_mode(True, locked=locked):
        fail()
    assert torch.is_grad_enabled()


@given(st.lists(st.tuples(st.sampled_from(["ours", "locked", "no", "enable", "set"]), st.booleans()), max_size=12))
def test_any_nesting_of_blocks_holds_and_restores(blocks):
    """The innermost wins, whoever made it; leaving gives back what was there, level by level."""
    make = {
        "ours": lambda flag: gg.grad_mode(flag, locked=False),
        "locked": gg.grad_mode,
        "no": lambda flag: torch.no_grad(),
        "enable": lambda flag: torch.enable_grad(),
        "set": torch.set_grad_enabled,
    }
    means = {"no": False, "enable": True}

    def enter(rest):
        before = torch.is_grad_enabled()
        if rest:
            (kind, flag), *more = rest
            with make[kind](flag):
                assert torch.is_grad_enabled() is means.get(kind, flag)
                enter(more)
                assert torch.is_grad_enabled() is means.get(kind, flag)
        assert torch.is_grad_enabled() is before

    enter(blocks)


@LOCKED
def test_one_object_is_reusable_and_nests_in_itself(locked):
    mode = gg.grad_mode(False, locked=locked)
    for _ in range(3):
        with mode:
            assert not torch.is_grad_enabled()
            with gg.grad_mode(True), mode, mode:
                assert not torch.is_grad_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


@LOCKED
def test_an_object_made_in_another_mode_restores_what_it_finds(locked):
    with torch.no_grad():
        mode = gg.grad_mode(True, locked=locked)
    with mode:
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        with mode, mode:
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()


@LOCKED
def test_one_object_in_two_threads_at_once(locked):
    mode, meet, seen = gg.grad_mode(False, locked=locked), threading.Barrier(2, timeout=120), []

    def work(first):
        if first:
            torch.set_grad_enabled(False)
        for _ in range(50):
            meet.wait()
            with mode:
                meet.wait()
                seen.append(torch.is_grad_enabled())
            seen.append(torch.is_grad_enabled() is first)
        torch.set_grad_enabled(True)

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 200
    assert torch.is_grad_enabled()


def test_blocks_that_end_out_of_order_leave_the_first_mode_in_the_end():
    first, second = gg.grad_mode(False), gg.grad_mode(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.is_grad_enabled()


# --- the call form -------------------------------------------------------------------------------------------------


def test_the_call_gives_what_fn_gives(weight):
    assert gg.grad_mode(False, lambda: {"doubled": weight * 2})["doubled"].requires_grad is False
    assert gg.grad_mode(True, lambda: None) is None
    with torch.no_grad():
        assert gg.grad_mode(True, lambda: weight * 2).requires_grad


def test_the_call_of_a_generator_function_runs_its_body_in_the_mode():
    def modes():
        yield torch.is_grad_enabled()

    assert list(gg.grad_mode(False, modes)) == [False]


# --- decorators ----------------------------------------------------------------------------------------------------


def test_a_decorated_function_keeps_its_name_signature_and_kind():
    @gg.grad_mode(False)
    def double(x: int, *, by: int = 2) -> int:
        """Say it twice."""
        return x * by

    assert double(3, by=4) == 12
    assert (double.__name__, double.__doc__) == ("double", "Say it twice.")
    assert str(inspect.signature(double)) == "(x: int, *, by: int = 2) -> int"


def test_methods_classmethods_staticmethods_and_callables():
    class Model:
        @gg.grad_mode(False)
        def forward(self):
            return self, torch.is_grad_enabled()

        @classmethod
        @gg.grad_mode(False)
        def made(cls):
            return cls, torch.is_grad_enabled()

        @staticmethod
        @gg.grad_mode(False)
        def alone():
            return torch.is_grad_enabled()

    model = Model()
    assert model.forward() == (model, False)
    assert Model.made() == (Model, False)
    assert Model.alone() is False
    layer = torch.nn.Linear(2, 2)
    assert gg.grad_mode(False)(layer)(torch.ones(1, 2)).requires_grad is False


def test_a_recursive_decorated_function():
    @gg.grad_mode(False)
    def depth(n):
        assert not torch.is_grad_enabled()
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(20) == 20


# --- threads -------------------------------------------------------------------------------------------------------


def test_a_mode_stays_in_its_thread_and_carry_mode_takes_it_along(weight):
    def doubled(factor=2):
        return (weight * factor).requires_grad

    with ThreadPoolExecutor(1) as pool:
        with gg.grad_mode(False):
            plain = pool.submit(doubled)
            carried = pool.submit(gg.carry_mode(doubled), factor=3)
            function = gg.carry_mode(doubled)
        assert plain.result() is True
        assert carried.result() is False
        assert function() is False, "the mode is the one that was in force when carry_mode was called"
        assert pool.submit(torch.is_grad_enabled).result() is True
        assert pool.submit(gg.carry_mode(doubled)).result() is True


def test_carry_mode_takes_the_lock_along():
    def disturbed():
        torch.set_grad_enabled(True)
        return torch.is_grad_enabled()

    with gg.grad_mode(False):
        locked = gg.carry_mode(disturbed)
    with gg.grad_mode(False, locked=False):
        unlocked = gg.carry_mode(disturbed)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(locked).result() is False
        assert pool.submit(unlocked).result() is True


def test_what_carry_mode_gives_can_be_pickled():
    with gg.grad_mode(False):
        carried = gg.carry_mode(torch.is_grad_enabled)
    assert pickle.loads(pickle.dumps(carried))() is False
    assert carried.__name__ == "is_grad_enabled"


# --- wrong arguments -----------------------------------------------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (1, ["`flag` is the int 1", "Fix: gg.grad_mode(True)"]),
        (0, ["`flag` is the int 0", "Fix: gg.grad_mode(False)"]),
        ("train", ["`flag` is the str 'train'", "Fix: gg.grad_mode(True)"]),
        ("False", ["`flag` is the str 'False'", "Fix: gg.grad_mode(False)"]),
        ("eval", ["`flag` is the str 'eval'", "Fix: gg.grad_mode(False)"]),
        (None, ["`flag` is None", "Fix: gg.grad_mode(False)"]),
        (torch.nn.Linear(1, 1), ["`flag` is the module Linear", "Fix: gg.grad_mode(model.training)"]),
        (torch.tensor(True), ["a bool tensor of shape ()", "Fix: gg.grad_mode(True)"]),
        (len, ["`flag` is the builtin_function_or_method", "Fix: @gg.grad_mode(False)"]),
    ],
)
def test_a_flag_that_is_not_a_bool(flag, words):
    with pytest.raises(gg.errors.ArgumentTypeError) as caught:
        gg.grad_mode(flag)
    assert all(word in str(caught.value) for word in [*words, "Why: recording is either on or off"])
    assert isinstance(caught.value, TypeError)


def test_what_cannot_be_called_or_decorated():
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`fn` is a float32 tensor.*lambda: model\(x\)"):
        gg.grad_mode(False, torch.ones(2))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`fn` is a float32 tensor.*carry_mode\(model\), x"):
        gg.carry_mode(torch.ones(2))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)stands on the class Thing.*on each method"):
        gg.grad_mode(False)(Thing)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)stands on a classmethod.*@classmethod\n@gg.grad_mode"):
        gg.grad_mode(False)(classmethod(lambda cls: None))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)was given the int 3.*with gg.grad_mode\(True\)"):
        gg.grad_mode(True)(3)
    assert torch.is_grad_enabled()


def test_it_says_what_it_is():
    assert repr(gg.grad_mode(False)) == "grad_mode(False, locked=True)"
    assert repr(gg.grad_mode(True, locked=False)) == "grad_mode(True, locked=False)"
