"""grad_mode inside torch.compile(fullgraph=True)."""

import asyncio

import pytest
import torch

import gradgate as gg


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def block(x, locked):
    with gg.grad_mode(False, locked=locked):
        stopped = x * 2
    return stopped + x


def call(x, locked):
    return gg.grad_mode(False, lambda: x * 2, locked=locked) + x


def nested(x, locked):
    with gg.grad_mode(False, locked=locked):
        with gg.grad_mode(True, locked=locked):
            kept = x * 3
        stopped = x * 2
    return stopped + kept


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("function", "slope"), [(block, 1.0), (call, 1.0), (nested, 3.0)])
def test_the_mode_holds_in_a_full_graph(function, slope, locked):
    x = torch.ones(3, requires_grad=True)
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(x, locked)
    assert torch.equal(out, function(x, locked))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), slope))
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_the_default_backend_too():
    x = torch.ones(3, requires_grad=True)
    torch.compile(block, fullgraph=True)(x, True).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.slow
def test_a_compiled_model_runs_inside_a_mode():
    model = torch.compile(torch.nn.Linear(2, 2), fullgraph=True, backend="aot_eager")
    assert gg.grad_mode(False, lambda: model(torch.ones(1, 2))).requires_grad is False
    assert gg.grad_mode(True, lambda: model(torch.ones(1, 2))).requires_grad is True


# --- limits ---------------------------------------------------------------------------------------------------------


def test_limit_a_mode_made_outside_cannot_be_entered_inside():
    mode = gg.grad_mode(False)

    def entered(x):
        with mode:
            return x * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"context manager|setattr\(\)"):
        torch.compile(entered, fullgraph=True, backend="eager")(torch.ones(2))


def test_limit_a_loop_with_handles_of_its_own_lets_a_held_block_be_seen():
    """Such as uvloop: the decorator still holds there, a block over an await does not."""

    class OwnHandles(asyncio.SelectorEventLoop):
        def call_soon(self, callback, *args, context=None):
            class OwnHandle(asyncio.Handle):
                def _run(self):
                    self._context.run(self._callback, *self._args)

            handle = OwnHandle(callback, args, self, context)
            self._ready.append(handle)
            return handle

    async def hold():
        with gg.grad_mode(False):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @gg.grad_mode(False)
    async def decorated():
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def beside(coroutine):
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        seen = torch.is_grad_enabled()
        await task
        return seen

    loop = OwnHandles()
    try:
        assert loop.run_until_complete(beside(decorated())) is True
        assert loop.run_until_complete(beside(hold())) is False
    finally:
        loop.close()
        torch.set_grad_enabled(True)
