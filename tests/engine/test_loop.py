"""The engine's thread against a model that computes only when the test lets it."""

import asyncio
import threading

import httpx
import pytest
import torch

from sumibi.core.errors import EngineUnavailable
from sumibi.engine import loop
from sumibi.engine.app import Door
from sumibi.engine.blocks import BlockPool
from sumibi.engine.loop import Engine, Job
from sumibi.engine.metrics import EngineMetrics
from sumibi.engine.publisher import NullPublisher
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import FinishReason, SamplingParams


class GatedModel:
    """Always says token 1; each step waits for `allow`."""

    def __init__(self):
        self.batches = []
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.error = None

    def forward(self, batch):
        self.batches.append([len(step.token_ids) for step in batch.sequences])
        self.begun.release()
        assert self.allowed.acquire(timeout=10)
        if self.error:
            raise self.error
        wanted = sum(len(step.logits_at) for step in batch.sequences)
        return torch.tensor([0.0, 1.0]).repeat(wanted, 1)

    def copy_blocks(self, pairs):
        pass

    async def begin(self):
        """Wait until a step is under way."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=10)

    async def step(self):
        """Let the next step begin and end."""
        await self.begin()
        self.allowed.release()


class Outside:
    """A source that has the first 8 tokens of everything and ends its loads when the test says so."""

    def __init__(self, *, timeout_s=60.0):
        self.timeout_s = timeout_s
        self.loads = []
        self.begun = threading.Semaphore(0)
        self.may_look = threading.Event()
        self.may_look.set()
        self.error = None

    def look(self, sequence):
        assert self.may_look.wait(10)

    def offer(self, sequence, first_block):
        return max(0, 8 - 4 * first_block)

    def load(self, load, done):
        if self.error:
            raise self.error
        self.loads.append((load, done))
        self.begun.release()


def engine_on(model, *, num_blocks=64, source=None):
    pool = BlockPool(num_blocks, 4)
    scheduler = Scheduler(pool, max_sequences=4, step_tokens=16, max_tokens=200, source=source)
    metrics = EngineMetrics("fake", scheduler, dropped_batches=lambda: 0)
    failures = []
    engine = Engine(
        model,
        scheduler,
        metrics=metrics,
        events=NullPublisher(),
        namespace="fake",
        on_failure=lambda: failures.append(1),
    )
    return engine, pool, failures


def job(prompt=(3, 4, 5), n=1, **params):
    return Job(list(prompt), SamplingParams(**{"max_tokens": 100, "temperature": 0.0} | params), n=n)


def test_what_is_given_up_during_a_step_is_not_part_of_the_next():
    async def scenario():
        model = GatedModel()
        engine, pool, _ = engine_on(model)
        leaving, staying = engine.submit([job()]), engine.submit([job([6, 7], max_tokens=3)])
        engine.start()
        await model.step()
        await model.begin()
        leaving.close()
        model.allowed.release()
        await model.step()
        while not staying.done:
            await staying.take()
        assert model.batches == [[2, 3], [1, 1], [1]]
        assert await engine.clear_prefix_cache()  # nothing is held
        assert pool.held == 0
        await engine.stop()

    asyncio.run(scenario())


def test_tokens_that_came_together_are_taken_together():
    async def scenario():
        model = GatedModel()
        engine, _, _ = engine_on(model)
        engine.start()
        generation = engine.submit([job(max_tokens=3, n=2)])
        for _ in range(3):
            await model.step()
        while not generation.done:
            tokens = await generation.take()
            assert {token.token for token in tokens} == {1}
        assert [t.finish for t in tokens[-2:]] == [FinishReason.LENGTH] * 2
        await engine.stop()

    asyncio.run(scenario())


def test_a_step_that_fails_ends_every_generation_and_the_engine():
    async def scenario():
        model = GatedModel()
        engine, _, failures = engine_on(model)
        engine.start()
        generation = engine.submit([job()])
        model.error = RuntimeError("out of memory")
        await model.step()
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await generation.take()
        assert not engine.healthy
        assert engine.failed
        assert failures == [1]
        with pytest.raises(EngineUnavailable, match="out of memory"):
            engine.submit([job()])
        generation.close()
        await engine.stop()

    asyncio.run(scenario())


def test_health_is_bad_before_the_start_and_after_a_step_has_failed():
    async def scenario():
        model = GatedModel()
        engine, _, _ = engine_on(model)
        door = Door(engine, reader=None, metrics=None, sources=None, dev_mode=True)
        transport = httpx.ASGITransport(door.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            assert (await http.get("/health")).status_code == 503
            engine.start()
            assert (await http.get("/health")).status_code == 200
            model.error = RuntimeError("out of memory")
            generation = engine.submit([job()])
            await model.step()
            with pytest.raises(EngineUnavailable):
                await generation.take()
            assert (await http.get("/health")).status_code == 503
            assert (await http.post("/reset_prefix_cache")).status_code == 503
        await engine.stop()

    asyncio.run(scenario())


def test_whoever_waits_for_the_cache_to_be_cleared_is_told_of_the_end():
    async def scenario():
        model = GatedModel()
        engine, _, _ = engine_on(model)
        engine.start()
        engine.submit([job()])
        await model.begin()
        clearing = asyncio.ensure_future(engine.clear_prefix_cache())
        await asyncio.sleep(0)  # it is asked for before the step fails
        model.error = RuntimeError("out of memory")
        model.allowed.release()
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await clearing
        await engine.stop()

    asyncio.run(scenario())


def test_an_engine_that_stops_tells_those_who_still_read():
    async def scenario():
        model = GatedModel()
        engine, _, _ = engine_on(model)
        engine.start()
        generation = engine.submit([job(max_tokens=50)])
        await model.step()
        await generation.take()
        await model.begin()
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)  # the wish to stop is known before the step ends
        model.allowed.release()
        await stopping
        assert len(await generation.take()) == 1
        with pytest.raises(EngineUnavailable, match="stopped"):
            await generation.take()

    asyncio.run(scenario())


def test_aborting_all_gives_each_choice_its_last_word():
    async def scenario():
        model = GatedModel()
        engine, pool, _ = engine_on(model)
        running = engine.submit([job(), job([7] * 9)])
        engine.start()
        await model.begin()
        engine.abort_all()
        model.allowed.release()
        last = []
        while not running.done:
            last += [token for token in await running.take() if token.finish]
        assert sorted((token.choice, token.token, token.finish) for token in last) == [
            (0, None, FinishReason.ABORT),
            (1, None, FinishReason.ABORT),
        ]
        await engine.stop()
        assert pool.held == 0

    asyncio.run(scenario())


def test_more_requests_than_the_limit_are_refused_and_counted(monkeypatch):
    monkeypatch.setattr(loop, "MAX_GENERATIONS", 2)

    async def scenario():
        engine, _, _ = engine_on(GatedModel())
        first, _ = engine.submit([job()]), engine.submit([job()])
        with pytest.raises(EngineUnavailable, match="already holds 2"):
            engine.submit([job()])
        first.close()
        engine.submit([job()])

    asyncio.run(scenario())


LONG = list(range(3, 13))


def test_others_decode_while_one_loads_and_it_goes_on_when_its_load_has_ended():
    async def scenario():
        model, source = GatedModel(), Outside()
        engine, pool, _ = engine_on(model, source=source)
        engine.start()
        loading = engine.submit([job(LONG, max_tokens=2)])
        assert await asyncio.to_thread(source.begun.acquire, timeout=10)
        other = engine.submit([job([6, 7], max_tokens=2)])  # the 8 tokens offered are more than it has
        assert await asyncio.to_thread(source.begun.acquire, timeout=10)
        source.loads[1][1]([])
        await model.step()
        await model.step()
        while not other.done:
            await other.take()
        source.loads[0][1](["host", "host"])
        await model.step()
        await model.step()
        while not loading.done:
            await loading.take()
        assert model.batches == [[2], [1], [2], [1]]
        report = loading.report(0)
        assert (report.cached_tokens, report.cached_by_source) == (8, {"host": 8})
        await engine.stop()
        assert pool.held == 0

    asyncio.run(scenario())


def test_a_load_that_takes_too_long_or_cannot_begin_is_computed():
    async def scenario():
        model, source = GatedModel(), Outside(timeout_s=0.05)
        engine, pool, _ = engine_on(model, source=source)
        engine.start()
        slow = engine.submit([job(LONG, max_tokens=1)])
        await model.step()  # nobody had to wake the engine
        while not slow.done:
            await slow.take()
        assert model.batches == [[10]]
        assert pool.held == 3  # somebody may still write there
        source.loads[0][1]([])
        source.error = OSError("no such source")
        failing = engine.submit([job([*range(20, 30)], max_tokens=1)])
        await model.step()
        while not failing.done:
            await failing.take()
        assert model.batches == [[10], [10]]
        assert await engine.clear_prefix_cache()
        await engine.stop()

    asyncio.run(scenario())


def test_who_leaves_while_the_source_is_asked_or_loads_is_not_computed():
    async def scenario():
        model, source = GatedModel(), Outside()
        engine, pool, _ = engine_on(model, source=source)
        engine.start()
        source.may_look.clear()
        engine.submit([job(LONG)]).close()
        source.may_look.set()
        loading = engine.submit([job(LONG)])
        assert await asyncio.to_thread(source.begun.acquire, timeout=10)
        loading.close()
        assert await engine.clear_prefix_cache() is False
        source.loads[0][1](["host", "host"])
        assert await engine.clear_prefix_cache() is True
        assert (len(source.loads), model.batches) == (1, [])
        await engine.stop()
        assert pool.held == 0

    asyncio.run(scenario())


def test_an_engine_that_stops_while_it_loads_tells_the_reader():
    async def scenario():
        source = Outside()
        engine, _, _ = engine_on(GatedModel(), source=source)
        engine.start()
        loading = engine.submit([job(LONG)])
        assert await asyncio.to_thread(source.begun.acquire, timeout=10)
        await engine.stop()
        with pytest.raises(EngineUnavailable, match="stopped"):
            await loading.take()
        source.loads[0][1](["host"])  # too late, and harmless

    asyncio.run(scenario())
