"""What a request gets depends on the request and the weights only, bit for bit."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.inference.replay import alone, assert_same, run
from tunix.environments.verifiable import ALPHABET
from tunix.errors import ConfigError, ModelError
from tunix.inference import Request, SamplingParams
from tunix.inference import scheduler as scheduling
from tunix.inference.scheduler import Scheduler
from tunix.models import llama
from tunix.text.tokenizer import Tokenizer

SIZES = {"slots": 16, "max_positions": 256, "tokenizer": Tokenizer.characters(ALPHABET)}
"""Row buckets 8 and 16, windows 64, 128, 256."""


@pytest.fixture(scope="module")
def weights(tiny_config):
    """Three versions of the tiny model, spread so that their distributions are not flat."""
    keys = jax.random.split(jax.random.key(3), 3)
    drawn = [llama.initialize(key, tiny_config) for key in keys]
    return [jax.device_get(jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, p)) for p in drawn]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


sampling = st.builds(
    dict,  # checking types draws random numbers, which a strategy must not do
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    top_k=st.sampled_from([None, None, 1, 5, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    stop_ids=st.sampled_from([frozenset(), frozenset({0}), frozenset({3, 17, 90})]),
    stop=st.sampled_from([(), (), ("a", "1+"), ("bc", "x")]),
)
requests = st.tuples(
    st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 66, 81, 128, 140, 200])),
    st.integers(0, 1),
    sampling,
    st.integers(0, 2**64 - 1),
)
arrivals = st.lists(
    st.tuples(requests, st.integers(0, 4), st.sampled_from([None] * 6 + [1, 2])),
    min_size=30,
    max_size=30,
)
"""Thirty requests, steps before the next one arrives, and sometimes a publication."""


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(arrivals)
def test_300_random_requests_equal_the_same_requests_alone(tiny_config, weights, arrivals):
    arrivals = [
        (Request(prompt(length, which), SamplingParams(**how), seed), steps, version)
        for (length, which, how, seed), steps, version in arrivals
    ]
    scheduler = Scheduler(tiny_config, weights[0], **SIZES)
    results = {}
    for i, (request, steps, version) in enumerate(arrivals):
        scheduler.submit(request, lambda result, i=i: results.__setitem__(i, result))
        for _ in range(steps):
            scheduler.step()
        if version is not None:
            scheduler.publish(weights[version], version)
    while scheduler.has_work:
        scheduler.step()
    for i, (request, _, _) in enumerate(arrivals):
        assert_same(results[i], alone(tiny_config, weights, request, results[i], **SIZES))


ROWS = {0: 8, 9: 32, 40: 128, 255: 256}
"""Neighbours, and the rows of a decode step that has room for them and one more."""
WINDOWS = {10: 64, 70: 128, 200: 256, 400: 512}
"""Length of the longest neighbour's prompt, and the window that covers it."""
SOME = [(9, 70), (40, 10), (255, 400)]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(SOME, id="some"),
        pytest.param(list(itertools.product(ROWS, WINDOWS)), id="all", marks=pytest.mark.slow),
    ],
)
def test_every_row_and_window_bucket_gives_the_same_bits(tiny_config, weights, pairs):
    """One request beside 0 to 255 others, in a small and in a large cache."""
    probe = Request(prompt(20), SamplingParams(max_tokens=4, top_p=0.9), seed=5)
    (expected,) = run(Scheduler(tiny_config, weights[0], slots=8, max_positions=64), [probe])
    scheduler = Scheduler(tiny_config, weights[0], slots=256, max_positions=512)
    for neighbours, longest in pairs:
        draw = SamplingParams(max_tokens=2)
        lengths = [longest, *[5] * neighbours][:neighbours]
        others = [Request(prompt(n, i), draw, seed=i) for i, n in enumerate(lengths)]
        scheduler.stats.shapes.clear()
        assert_same(run(scheduler, [*others, probe])[-1], expected)
        window = WINDOWS[longest] if neighbours else 64
        assert ("decode", ROWS[neighbours], window) in scheduler.stats.shapes


@pytest.mark.parametrize("vocab", [8192, pytest.param(49152, marks=pytest.mark.slow)])
def test_a_wider_model_is_invariant_too(vocab):
    """SmolLM2's width, where matrix products take other kernels; rows 8 and 64."""
    config = llama.LlamaConfig(vocab, 576, 1536, 2, 9, 3, 64, 128, tie_embeddings=True)
    params = llama.initialize(jax.random.key(0), config)
    draw = SamplingParams(max_tokens=3, top_k=50, top_p=0.95)
    few, many = (
        run(
            Scheduler(config, params, slots=64, max_positions=128),
            [Request([i + 1] * (9 + 10 * (i % 5)), draw, seed=i) for i in range(count)],
        )
        for count in (3, 40)
    )
    for one, other in zip(few, many[:3], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0},
    ],
)
def test_logprobs_are_the_trainers(tiny_config, weights, filters):
    """The full-support log-probability of each token, recomputed in one uncached forward pass."""
    asked = [
        Request(prompt(n, n), SamplingParams(max_tokens=20, **filters), seed=n)
        for n in (1, 2, 17, 30, 65, 66, 129, 170)
    ]
    completions = run(Scheduler(tiny_config, weights[0], **SIZES), asked)
    rows = np.zeros((len(asked), 192), np.int32)
    for row, request, c in zip(rows, asked, completions, strict=True):
        row[: len(request.tokens) + len(c.tokens)] = [*request.tokens, *c.tokens]
    logits = jax.jit(llama.full_logits, static_argnums=0)(tiny_config, weights[0], rows)
    expected = jax.nn.log_softmax(logits / (filters["temperature"] or 1.0))
    gaps = []
    for i, (request, c) in enumerate(zip(asked, completions, strict=True)):
        at = len(request.tokens) + np.arange(len(c.tokens))
        gaps.append(np.asarray(expected)[i, at - 1, c.tokens] - c.logprobs)
        assert (c.log_kept <= 0).all()
        if "top_p" in filters:
            assert (c.log_kept >= np.log(0.9) - 1e-5).all()
        else:
            assert (c.log_kept == 0).all()
        if not filters["temperature"]:
            np.testing.assert_array_equal(c.tokens, np.asarray(logits)[i, at - 1].argmax(-1))
    gaps = np.abs(np.concatenate(gaps))
    assert gaps.max() <= 1e-4
    assert gaps.mean() <= 1e-5


def test_a_group_shares_one_prefill_and_its_samples_differ(tiny_config, weights):
    scheduler = Scheduler(tiny_config, weights[0], **SIZES)
    draw = SamplingParams(max_tokens=12)
    group = [Request(prompt(100), draw, seed=seed) for seed in range(24)]  # more than slots
    first = run(scheduler, group)
    assert scheduler.stats.prefill_tokens == 99
    assert len({tuple(c.tokens) for c in first}) == 24
    again = run(scheduler, group)
    assert scheduler.stats.prefill_tokens == 99  # the weights are the same, so is the prompt
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)
    scheduler.publish(weights[1], 1)
    other = run(scheduler, group)
    assert scheduler.stats.prefill_tokens == 198
    assert {c.prefill_version for c in other} == {1}
    assert [tuple(c.tokens) for c in other] != [tuple(c.tokens) for c in first]


def test_stop_ids_and_limits(tiny_config, weights):
    """A stop token is part of the completion; id 0 counts; the context ends what nothing else."""
    scheduler = Scheduler(tiny_config, weights[0], slots=8, max_positions=64)
    free = Request(prompt(5), SamplingParams(max_tokens=20), seed=1)
    (whole,) = run(scheduler, [free])
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 20)
    stop = int(whole.tokens[6])
    first = int(np.flatnonzero(whole.tokens == stop)[0])
    cut = SamplingParams(max_tokens=20, stop_ids=frozenset({95, stop}))
    (stopped,) = run(scheduler, [Request(free.tokens, cut, 1)])
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.tokens, whole.tokens[: first + 1])
    np.testing.assert_array_equal(stopped.logprobs, whole.logprobs[: first + 1])

    zero = jax.tree.map(np.zeros_like, weights[0])  # all logits equal: greedy draws id 0
    scheduler.publish(zero, 1)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, stop_ids=frozenset({0}))
    (completion,) = run(scheduler, [Request([7, 8], greedy, 0)])
    assert (completion.finish_reason, completion.tokens.tolist()) == ("stop", [0])

    (full,) = run(scheduler, [Request(prompt(60), SamplingParams(max_tokens=20), 0)])
    assert (full.finish_reason, len(full.tokens)) == ("length", 4)


def test_refusals_name_the_numbers(tiny_config, weights):
    scheduler = Scheduler(tiny_config, weights[0], slots=8, max_positions=64)
    draw = SamplingParams(max_tokens=1)
    with pytest.raises(ConfigError, match=r"64 tokens.*max_positions = 64"):
        scheduler.submit(Request(prompt(64), draw, 0), print)
    with pytest.raises(ConfigError, match="no token"):
        Request([], draw, 0)
    with pytest.raises(ConfigError, match="outside"):
        scheduler.submit(Request([96], draw, 0), print)
    with pytest.raises(ConfigError, match="max_positions is 513"):
        Scheduler(tiny_config, weights[0], max_positions=513)
    with pytest.raises(ModelError, match="final_norm"):
        scheduler.publish({k: v for k, v in weights[0].items() if k != "final_norm"}, 1)
    for bad in (
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"max_tokens": 0},
        {"stop_ids": frozenset({-1})},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            SamplingParams(**{"max_tokens": 1, **bad})


def test_abort_frees_the_slot_wherever_the_request_is(tiny_config, weights, monkeypatch):
    monkeypatch.setattr(scheduling, "PREFILL_TOKENS", 64)
    sizes = {**SIZES, "slots": 9}  # rounded up to the same 16 rows
    scheduler = Scheduler(tiny_config, weights[0], **sizes)
    done = []
    long = Request(prompt(200), SamplingParams(max_tokens=10), 0)
    ids = [
        scheduler.submit(Request([2], SamplingParams(max_tokens=200), seed), done.append)
        for seed in range(8)
    ]
    ids += [scheduler.submit(long, done.append) for _ in range(2)]
    scheduler.step()
    scheduler.abort(ids[9])  # waiting
    scheduler.abort(ids[8])  # half its prompt is read
    assert [len(c.tokens) for c in done] == [0, 0]
    scheduler.step()
    for id in ids:  # drawing; a second time nothing happens
        scheduler.abort(id)
    assert [len(c.tokens) for c in done] == [0, 0, *[2] * 8]
    assert {c.finish_reason for c in done} == {"aborted"}
    assert not scheduler.has_work
    (after,) = run(scheduler, [long])
    (fresh,) = run(Scheduler(tiny_config, weights[0], **sizes), [long])
    assert_same(after, fresh)


def test_an_aborted_leader_leaves_the_group_whole(tiny_config, weights, monkeypatch):
    """The request whose slot a shared prompt is being read into goes; the others get it anew."""
    monkeypatch.setattr(scheduling, "PREFILL_TOKENS", 64)
    asked = [Request(prompt(200), SamplingParams(max_tokens=5), seed) for seed in range(3)]
    scheduler = Scheduler(tiny_config, weights[0], **SIZES)
    done = {}
    ids = [
        scheduler.submit(request, lambda c, i=i: done.__setitem__(i, c))
        for i, request in enumerate(asked)
    ]
    scheduler.step()
    scheduler.abort(ids[0])
    while scheduler.has_work:
        scheduler.step()
    assert done[0].finish_reason == "aborted"
    expected = run(Scheduler(tiny_config, weights[0], **SIZES), asked)
    for i in (1, 2):
        assert_same(done[i], expected[i])


def test_a_long_prompt_stalls_nobody_and_never_mixes_versions(tiny_config, weights, monkeypatch):
    """Others draw a token a step while it is read; a publication makes it start anew."""
    monkeypatch.setattr(scheduling, "PREFILL_TOKENS", 64)
    scheduler = Scheduler(tiny_config, weights[0], **SIZES)
    done = []
    scheduler.submit(Request([3], SamplingParams(max_tokens=50), 0), done.append)
    scheduler.submit(Request(prompt(200), SamplingParams(max_tokens=2), 1), done.append)
    for version in (1, 2):
        scheduler.step()
        scheduler.step()
        scheduler.publish(weights[version], version)
    assert scheduler.stats.generated_tokens == 4
    while scheduler.has_work:
        scheduler.step()
    long = done[0]
    assert long.prefill_version == 2
    assert_same(long, run(Scheduler(tiny_config, weights[2], version=2, **SIZES),
                          [Request(prompt(200), SamplingParams(max_tokens=2), 1)])[0])  # fmt: skip


def test_weights_that_are_not_finite_fail_their_requests_only(tiny_config, weights):
    scheduler = Scheduler(tiny_config, weights[0], slots=8, max_positions=64)
    asked = [Request(prompt(30), SamplingParams(max_tokens=5), seed) for seed in range(8)]
    expected = run(scheduler, asked)
    scheduler.publish(jax.tree.map(lambda x: x * np.nan, weights[0]), 1)
    assert all(isinstance(result, ModelError) for result in run(scheduler, asked))
    scheduler.publish(weights[0], 0)
    for one, other in zip(run(scheduler, asked), expected, strict=True):
        assert_same(one, other)  # nothing of it is left in the cache


def test_rows_follow_the_requests_that_are_left(tiny_config, weights):
    """Requests that last are moved down once they fit a smaller step; same bits."""
    asked = [
        Request(prompt(6, i), SamplingParams(max_tokens=40 if i % 8 == 7 else 2), seed=i)
        for i in range(64)
    ]
    scheduler = Scheduler(tiny_config, weights[0], slots=256, max_positions=64)
    completions = run(scheduler, asked)
    assert scheduler.stats.slot_steps <= 128 * 2 + 32 + 8 * 38  # without: 128 * 40
    for i in (7, 63):
        (single,) = run(Scheduler(tiny_config, weights[0], slots=8, max_positions=64), [asked[i]])
        assert_same(completions[i], single)
