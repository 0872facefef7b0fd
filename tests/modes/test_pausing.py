"""Generators, coroutines, async generators and tasks: the mode is theirs while they run, and nobody else's."""

import asyncio
import inspect

import pytest
import torch

import gradgate as gg

HANDLE_RUN = asyncio.Handle._run


@pytest.fixture(autouse=True)
def _asyncio_is_left_as_it_was():
    yield
    assert asyncio.Handle._run is HANDLE_RUN


# --- generators ----------------------------------------------------------------------------------------------------


@gg.grad_mode(False)
def echo():
    """Yield (is recording, what was sent or thrown) until told to stop."""
    got = None
    while got != "stop":
        try:
            got = yield torch.is_grad_enabled(), got
        except ValueError as error:
            got = repr(error)
        finally:
            assert not torch.is_grad_enabled()
    return "returned"


def test_a_generator_has_the_mode_only_while_it_runs():
    running = echo()
    assert inspect.isgeneratorfunction(echo)
    assert next(running) == (False, None)
    assert torch.is_grad_enabled()
    assert running.send("hello") == (False, "hello")
    assert running.throw(ValueError("thrown")) == (False, "ValueError('thrown')")
    assert torch.is_grad_enabled()
    with pytest.raises(StopIteration) as stop:
        running.send("stop")
    assert stop.value.value == "returned"
    assert torch.is_grad_enabled()


def test_a_generator_closed_or_thrown_out_half_way():
    seen = []

    @gg.grad_mode(False)
    def body():
        try:
            yield 1
        finally:
            seen.append(torch.is_grad_enabled())

    closed, thrown, dropped = body(), body(), body()
    for running in (closed, thrown, dropped):
        next(running)
    closed.close()
    with pytest.raises(KeyError):
        thrown.throw(KeyError("out"))
    del dropped, running
    assert seen == [False, False, False]
    assert torch.is_grad_enabled()


def test_a_block_inside_a_decorated_generator_is_kept_over_its_pauses():
    @gg.grad_mode(False)
    def body():
        with gg.grad_mode(True):
            yield torch.is_grad_enabled()
            yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()

    running, seen = body(), []
    for inside in running:
        seen.append((inside, torch.is_grad_enabled()))
    assert seen == [(True, True), (True, True), (False, True)]


def test_decorated_generators_that_interleave_under_other_modes():
    off, on = gg.grad_mode(False), gg.grad_mode(True)

    @off
    def never():
        for _ in range(4):
            yield torch.is_grad_enabled()

    @on
    def always():
        for _ in range(4):
            yield torch.is_grad_enabled()

    with torch.no_grad():
        for a, b in zip(never(), always(), strict=True):
            assert (a, b, torch.is_grad_enabled()) == (False, True, False)


# --- coroutines ----------------------------------------------------------------------------------------------------


def run(*coroutines):
    async def together():
        return await asyncio.gather(*coroutines)

    return asyncio.run(together())


async def observer(seen, rounds=12):
    for _ in range(rounds):
        seen.append(torch.is_grad_enabled())
        await asyncio.sleep(0)


@pytest.mark.parametrize("locked", [True, False])
def test_another_task_never_sees_the_mode_of_a_decorated_one(locked):
    @gg.grad_mode(False, locked=locked)
    async def evaluate():
        inside = []
        for _ in range(10):
            inside.append(torch.is_grad_enabled())
            await asyncio.sleep(0)
        return inside

    assert inspect.iscoroutinefunction(evaluate)
    seen = []
    inside, _ = run(evaluate(), observer(seen))
    assert inside == [False] * 10
    assert seen == [True] * 12


@pytest.mark.parametrize("locked", [True, False])
def test_another_task_never_sees_a_block_that_is_held_over_an_await(locked):
    async def evaluate():
        inside = []
        with gg.grad_mode(False, locked=locked):
            for _ in range(5):
                inside.append(torch.is_grad_enabled())
                await asyncio.sleep(0)
            with gg.grad_mode(True, locked=locked):
                await asyncio.sleep(0)
                inside.append(torch.is_grad_enabled())
            inside.append(torch.is_grad_enabled())
        inside.append(torch.is_grad_enabled())
        return inside

    seen = []
    inside, other, _ = run(evaluate(), evaluate(), observer(seen))
    assert inside == other == [False] * 5 + [True, False, True]
    assert seen == [True] * 12
    assert torch.is_grad_enabled()


def test_blocks_of_tasks_that_end_out_of_order():
    async def hold(flag, start, end):
        await asyncio.sleep(start)
        with gg.grad_mode(flag):
            await asyncio.sleep(end)
            return torch.is_grad_enabled()

    assert run(hold(False, 0, 0.02), hold(True, 0.01, 0.03)) == [False, True]
    assert torch.is_grad_enabled()


def test_a_task_inside_a_mode_of_the_thread():
    async def hold():
        with gg.grad_mode(True):
            await asyncio.sleep(0)
            return torch.is_grad_enabled()

    seen = []
    with torch.no_grad():
        inside, _ = run(hold(), observer(seen))
    assert inside
    assert seen == [False] * 12


def test_a_loop_inside_a_decorated_generator():
    async def hold(flag):
        seen = []
        with gg.grad_mode(flag):
            for _ in range(4):
                await asyncio.sleep(0)
                seen.append(torch.is_grad_enabled())
        return seen

    @gg.grad_mode(False)
    def outer():
        yield run(hold(True), hold(False), hold(True), hold(False))
        yield torch.is_grad_enabled()

    assert list(outer()) == [[[True] * 4, [False] * 4] * 2, False]


def test_a_task_started_inside_a_block_is_another_task():
    async def child():
        await asyncio.sleep(0)
        return torch.is_grad_enabled()

    async def parent():
        with gg.grad_mode(False):
            carried = gg.carry_mode(child)
            return await asyncio.gather(asyncio.create_task(child()), asyncio.create_task(carried()))

    assert asyncio.run(parent()) == [True, False]


def test_a_cancelled_task_restores():
    after = []

    async def forever():
        try:
            with gg.grad_mode(False):
                await asyncio.sleep(60)
        finally:
            after.append(torch.is_grad_enabled())

    @gg.grad_mode(False)
    async def decorated():
        try:
            await asyncio.sleep(60)
        finally:
            after.append(torch.is_grad_enabled())

    async def main():
        tasks = [asyncio.create_task(forever()), asyncio.create_task(decorated())]
        await asyncio.sleep(0.01)
        assert torch.is_grad_enabled()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert torch.is_grad_enabled()

    asyncio.run(main())
    assert after == [True, False]
    assert torch.is_grad_enabled()


def test_an_exception_in_a_task_restores():
    async def fail():
        with gg.grad_mode(False):
            await asyncio.sleep(0)
            raise KeyError("task")

    async def main():
        with pytest.raises(KeyError, match="task"):
            await fail()
        return torch.is_grad_enabled()

    assert asyncio.run(main())


def test_the_lock_of_a_task_is_not_the_lock_of_another():
    async def locked():
        with gg.grad_mode(False):
            await asyncio.sleep(0.01)
            torch.set_grad_enabled(True)
            return torch.is_grad_enabled()

    async def free():
        await asyncio.sleep(0)
        torch.set_grad_enabled(False)
        seen = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        return seen

    assert run(locked(), free()) == [False, False]


def test_a_coroutine_method_and_the_call_form_on_a_coroutine():
    class Model:
        @gg.grad_mode(False)
        async def predict(self):
            await asyncio.sleep(0)
            return self, torch.is_grad_enabled()

    async def plain():
        await asyncio.sleep(0)
        return torch.is_grad_enabled()

    async def main():
        model = Model()
        assert await model.predict() == (model, False)
        assert await gg.grad_mode(False, plain) is False
        carried = gg.grad_mode(False, lambda: gg.carry_mode(plain))
        assert await carried() is False
        return await plain()

    assert asyncio.run(main()) is True


# --- async generators ----------------------------------------------------------------------------------------------


@gg.grad_mode(False)
async def stream():
    got = None
    try:
        while got != "stop":
            await asyncio.sleep(0)
            try:
                got = yield torch.is_grad_enabled(), got
            except ValueError as error:
                got = repr(error)
    finally:
        await asyncio.sleep(0)
        assert not torch.is_grad_enabled()


def test_an_async_generator_has_the_mode_only_while_it_runs():
    async def main():
        running = stream()
        assert await anext(running) == (False, None)
        assert torch.is_grad_enabled()
        assert await running.asend("hello") == (False, "hello")
        assert await running.athrow(ValueError("thrown")) == (False, "ValueError('thrown')")
        with pytest.raises(StopAsyncIteration):
            await running.asend("stop")
        assert torch.is_grad_enabled()
        closed = stream()
        await anext(closed)
        await closed.aclose()
        assert torch.is_grad_enabled()
        return [value async for value in _three()]

    assert inspect.isasyncgenfunction(stream)
    assert asyncio.run(main()) == [False] * 3


@gg.grad_mode(False)
async def _three():
    for _ in range(3):
        yield torch.is_grad_enabled()


def test_torchs_own_decorator_is_a_silent_no_op_there():
    """The reason why ours is there (and the day this fails, torch has learnt it)."""

    @torch.no_grad()
    async def evaluate():
        return torch.is_grad_enabled()

    assert asyncio.run(evaluate()) is True
