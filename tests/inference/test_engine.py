"""The engine's thread: requests from asyncio and plain code, publication, failure, the end."""

from __future__ import annotations

import asyncio
import threading

import jax
import numpy as np
import pytest

from tests.inference.replay import assert_same, run
from tunix.environments.verifiable import ALPHABET
from tunix.errors import ConfigError, RunError
from tunix.inference import Engine, Request, SamplingParams
from tunix.inference.scheduler import Scheduler
from tunix.text.tokenizer import Tokenizer

SIZES = {"slots": 8, "max_positions": 64}
LONGER = {"slots": 16, "max_positions": 256}
WARM = {"slots": 16, "max_positions": 128}
LETTERS = Tokenizer.characters(ALPHABET)


def request(seed: int = 0, tokens: int = 10, **filters) -> Request:
    return Request([1, 2, 3 + seed % 3], SamplingParams(max_tokens=tokens, **filters), seed)


@pytest.fixture
def engine(tiny_config, tiny_params):
    with Engine(tiny_config, tiny_params, **SIZES) as engine:
        yield engine


def test_async_and_sync_give_what_the_scheduler_gives(engine, tiny_config, tiny_params):
    requests = [request(seed) for seed in range(20)]
    expected = run(Scheduler(tiny_config, tiny_params, **SIZES), requests)

    async def gather():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    for got in (asyncio.run(gather()), engine.generate_sync(requests)):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    stats = engine.stats()
    assert stats["requests_done"] == 40
    assert stats["generated_tokens"] == 400
    assert stats["busy_slot_steps"] == 400


def test_two_loops_at_once(engine):
    results = {}

    def ask(seed: int) -> None:
        results[seed] = asyncio.run(engine.generate(request(seed)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def test_publish_is_recorded_and_shares_nothing(tiny_config, tiny_params):
    """The trainer may donate or delete its buffers right after; only new tokens change version."""
    params = jax.device_put(tiny_params)
    with Engine(tiny_config, params, **SIZES, version=3) as engine:
        before = engine.generate_sync([request()])[0]
        assert set(before.versions.tolist()) == {3}
        engine.publish(params, 4)
        jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)(params)
        assert params["embedding"].is_deleted()
        after = engine.generate_sync([request()])[0]
    assert engine.version == 4
    assert set(after.versions.tolist()) == {4}
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_publish_while_running(tiny_config, tiny_params):
    async def main(engine: Engine):
        long = Request([1, 2], SamplingParams(max_tokens=250, temperature=1.5), 0)
        tasks = [asyncio.create_task(engine.generate(long)) for _ in range(4)]
        while engine.stats()["decode_steps"] < 5:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.publish, tiny_params, 1)
        return await asyncio.gather(*tasks)

    with Engine(tiny_config, tiny_params, **LONGER) as engine:
        for completion in asyncio.run(main(engine)):
            assert set(completion.versions.tolist()) == {0, 1}
            assert (np.diff(completion.versions) >= 0).all()


def test_cancelling_aborts(tiny_config, tiny_params):
    async def main(engine: Engine):
        long = Request([1], SamplingParams(max_tokens=10_000), 0)
        tasks = [asyncio.create_task(engine.generate(long)) for _ in range(20)]  # some wait
        while engine.stats()["decode_steps"] < 3:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        return await engine.generate(request())

    with Engine(tiny_config, tiny_params, **LONGER) as engine:
        assert len(asyncio.run(main(engine)).tokens) == 10
        assert engine.stats()["requests_done"] == 21


def test_a_bad_request_is_refused_where_it_is_made(engine):
    with pytest.raises(ConfigError, match="64 tokens"):
        engine.generate_sync([Request([1] * 64, SamplingParams(max_tokens=1), 0)])
    with pytest.raises(ConfigError, match="64 tokens"):
        asyncio.run(engine.generate(Request([1] * 64, SamplingParams(max_tokens=1), 0)))


def test_a_failure_of_the_thread_reaches_everyone(tiny_config, tiny_params, monkeypatch):
    engine = Engine(tiny_config, tiny_params, **SIZES)

    def fail() -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(engine._scheduler, "step", fail)

    async def main():
        return await asyncio.gather(
            *(engine.generate(request(seed)) for seed in range(3)), return_exceptions=True
        )

    results = asyncio.run(main())
    assert all(isinstance(r, RunError) and "no memory left" in str(r) for r in results)
    with pytest.raises(RunError, match="no memory left"):
        engine.generate_sync([request()])
    with pytest.raises(RunError, match="no memory left"):
        engine.publish(tiny_params, 1)
    engine.close()


def test_close_ends_those_who_wait(tiny_config, tiny_params):
    engine = Engine(tiny_config, tiny_params, **LONGER)

    async def main():
        long = Request([1], SamplingParams(max_tokens=10_000), 0)
        tasks = [asyncio.create_task(engine.generate(long)) for _ in range(20)]
        while engine.stats()["decode_steps"] < 2:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(r, RunError) and "closed" in str(r) for r in asyncio.run(main()))
    assert not engine._thread.is_alive()
    engine.close()
    with pytest.raises(RunError, match="closed"):
        engine.generate_sync([request()])


def test_nothing_compiles_after_warm_up(tiny_config, tiny_params):
    """Fifty random settings and lengths, arriving at random; jax itself counts compilations."""
    rng = np.random.default_rng(0)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    scheduler = Scheduler(tiny_config, tiny_params, tokenizer=LETTERS, **WARM)
    scheduler.warm_up()
    assert compiled  # the counter counts
    compiled.clear()
    done = []
    for seed in range(50):
        how = SamplingParams(
            max_tokens=int(rng.integers(1, 20)),
            temperature=float(rng.choice([0, 0.3, 0.7, 1.1])),
            top_k=int(rng.integers(1, 90)) if rng.random() < 0.5 else None,
            top_p=float(rng.uniform(0.2, 1)) if rng.random() < 0.5 else 1.0,
            min_p=float(rng.uniform(0, 0.2)) if rng.random() < 0.5 else 0.0,
            stop_ids=frozenset(rng.integers(0, 96, rng.integers(0, 6)).tolist()),
            stop=tuple(rng.choice(["ab", "c", "1+"], rng.integers(0, 3)).tolist()),
        )
        tokens = rng.integers(0, 96, rng.integers(1, 60 if seed % 10 else 127)).tolist()
        request = Request(tokens, how, seed)
        for _ in range(rng.integers(1, 4)):
            scheduler.submit(request, done.append)
        for _ in range(rng.integers(0, 6)):
            scheduler.step()
        if seed == 25:
            scheduler.publish(tiny_params, 1)
    while scheduler.has_work:
        scheduler.step()
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert scheduler.stats.as_dict()["compilations"] > 10
    assert compiled == []


def test_warm_up_changes_nothing(tiny_config, tiny_params):
    """In the middle of requests, whose keys and values lie in the cache."""
    sizes = {"slots": 8, "max_positions": 128}
    asked = [request(seed) for seed in range(12)]
    expected = run(Scheduler(tiny_config, tiny_params, **sizes), asked)
    scheduler, done = Scheduler(tiny_config, tiny_params, **sizes), {}
    for i, one in enumerate(asked):
        scheduler.submit(one, lambda result, i=i: done.__setitem__(i, result))
    for _ in range(3):
        scheduler.step()
    scheduler.warm_up()
    while scheduler.has_work:
        scheduler.step()
    for i, other in enumerate(expected):
        assert_same(done[i], other)


def test_a_stream_yields_what_is_drawn(tiny_config, tiny_params):
    """Pieces join to the completion; one that is left early is aborted, beside others."""

    async def whole(engine, asked):
        pieces = [piece async for piece in engine.stream(asked)]
        assert [p.completion is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
        return [token for piece in pieces for token in piece.tokens], pieces[-1].completion

    async def left_early(engine):
        stream = engine.stream(Request([1], SamplingParams(max_tokens=10_000), 0))
        async for piece in stream:
            await stream.aclose()
            return piece.tokens

    async def main(engine):
        return await asyncio.gather(
            whole(engine, request()), left_early(engine), whole(engine, request(1, stop=("a",)))
        )

    with Engine(tiny_config, tiny_params, tokenizer=LETTERS, **LONGER) as engine:
        (tokens, completion), some, (stopped, other) = asyncio.run(main(engine))
        assert tokens == completion.tokens.tolist()
        assert stopped == other.tokens.tolist()
        assert 1 <= len(some) < 10_000
        assert_same(completion, engine.generate_sync([request()])[0])
        assert engine.stats()["requests_done"] == 4
        with pytest.raises(ConfigError, match="256 tokens"):
            asyncio.run(whole(engine, Request([1] * 256, SamplingParams(max_tokens=1), 0)))
    with pytest.raises(RunError, match="closed"):
        asyncio.run(whole(engine, request()))
