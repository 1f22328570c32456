"""The tokens drawn follow the documented distribution, and none without mass is ever drawn."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.inference.replay import run
from tunix.inference import Request, SamplingParams
from tunix.inference.device import draw, draw_filtered
from tunix.inference.sampling import Draws, sample_at
from tunix.inference.scheduler import Scheduler
from tunix.models import llama

DRAWS = 20_480
draw_at = jax.jit(partial(sample_at, filtered=True))
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.1},
]


def exact(logits, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Twin in float64: full probabilities, and which tokens the filters keep."""
    full = np.exp(np.float64(logits) / temperature)
    full /= full.sum()
    order = np.argsort(-full, kind="stable")
    ranked = full[order]
    last = len(full) if top_k is None else min(top_k, len(full))
    kept = full >= ranked[last - 1]
    if top_p < 1:
        share = np.cumsum(ranked * kept[order]) / full[kept].sum()
        kept &= full >= ranked[np.argmax(share >= top_p)]
    return full, kept & (full >= min_p * full.max())


def draws(rows, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0) -> Draws:
    """The same sampling for every row; row i has seed i."""
    return Draws(
        seeds=np.stack([np.zeros(rows), np.arange(rows)], 1).astype(np.uint32),
        positions=np.full(rows, 3, np.int32),
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k or 0, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
    )


def assert_follows(tokens, full, kept):
    """Chi-square of the counts against the kept distribution; rare tokens are pooled."""
    expected = np.where(kept, full, 0) / full[kept].sum() * len(tokens)
    counts = np.bincount(tokens, minlength=len(full))
    assert not counts[~kept].any()
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(observed) > 1:
        assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize(
    ("vocab", "filters"), [*((96, f) for f in FILTERS), (4100, FILTERS[0]), (4100, FILTERS[-1])]
)
def test_frequencies_and_masses_are_exact(vocab, filters):
    logits = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32) * 2
    full, kept = exact(logits, **filters)
    rows = 256
    everywhere = jnp.broadcast_to(logits, (rows, vocab))
    many = partial(draw_filtered if filters else draw, everywhere)
    tokens = []
    for i in range(DRAWS // rows):
        how = draws(rows, **filters)
        tokens.append(many(how._replace(positions=how.positions + i)))
    drawn = np.concatenate([np.asarray(s.tokens) for s in tokens])
    assert_follows(drawn, full, kept)
    logprobs = np.concatenate([np.asarray(s.logprobs) for s in tokens])
    np.testing.assert_allclose(logprobs, np.log(full[drawn]), atol=1e-5)
    np.testing.assert_allclose(tokens[0].log_kept, np.log(full[kept].sum()), atol=1e-5)


@pytest.mark.parametrize("filters", [FILTERS[1], FILTERS[-1]])
def test_the_engine_draws_the_exact_distribution(tiny_config, filters):
    """All 20k requests through slots, a shared prefill, copies and decode steps."""
    params = jax.tree.map(lambda x: x * 3, llama.initialize(jax.random.key(0), tiny_config))
    prompt = [5, 17, 80]
    logits = llama.full_logits(tiny_config, params, jnp.asarray([prompt]))[0, -1]
    scheduler = Scheduler(tiny_config, params, slots=256, max_positions=64)
    how = SamplingParams(max_tokens=1, **filters)
    completions = run(scheduler, [Request(prompt, how, seed) for seed in range(DRAWS)])
    assert_follows(np.concatenate([c.tokens for c in completions]), *exact(logits, **filters))


def test_a_token_without_mass_is_never_drawn():
    """At both ends of the random number, with masses that underflow or are cut off."""
    high = np.float32(1 - 2**-24)
    rng = np.random.default_rng(0)
    for vocab in (96, 4100):
        logits = rng.standard_normal((8, vocab)).astype(np.float32)
        logits[:, ::2] = -1e9
        logits[:4, -(vocab // 3) :] = -1e9  # whole blocks at the end
        logits[4:, : vocab // 3] = -np.inf
        for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}):
            for u in (0.0, 0.5, high, 1.0):  # 1 cannot come up, but rounding may amount to it
                s = draw_at(logits, draws(8, **filters), np.full(8, u, np.float32))
                picked = logits[np.arange(8), np.asarray(s.tokens)]
                assert (picked > -1e8).all(), (vocab, filters, u)


def test_ties_are_kept_and_greedy_takes_the_lowest_id():
    logits = np.full((8, 96), -5, np.float32)
    logits[:, [90, 7, 33]] = 2.0
    for filters in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        uniform = jnp.linspace(0, 0.99, 8)
        s = draw_at(logits, draws(8, **filters), uniform)
        assert set(np.asarray(s.tokens).tolist()) == {7, 33, 90}
    s = draw_filtered(jnp.asarray(logits), draws(8, temperature=0.0))
    np.testing.assert_array_equal(s.tokens, 7)
    np.testing.assert_array_equal(s.log_kept, 0)


def test_neighbours_filters_leave_a_filtered_row_untouched():
    """Whatever search the others ask for; rows without filters are drawn by another program."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((16, 96)), jnp.float32)
    everything = draws(16, top_k=7, top_p=0.5, min_p=0.1)
    for filters in ({"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.0}):
        own = draws(16, **filters)
        mixed = Draws(
            *(np.concatenate([a[:8], b[8:]]) for a, b in zip(own, everything, strict=True))
        )
        for one, other in zip(
            draw_filtered(logits, own), draw_filtered(logits, mixed), strict=True
        ):
            np.testing.assert_array_equal(one[:8], other[:8])


def test_random_numbers_are_those_of_seed_and_position():
    """As ``jax.random`` gives them, all 64 bits of the seed counting."""
    logits = jnp.zeros((8, 96))
    how = draws(8)._replace(seeds=np.array([[i, 9] for i in range(8)], np.uint32))
    tokens = np.asarray(draw(logits, how).tokens)
    assert len(set(tokens.tolist())) > 1
    with jax.enable_x64(True):
        key = jax.random.key(np.uint64(5 << 32 | 9))
        expected = jax.random.uniform(jax.random.fold_in(key, 3), (), jnp.float32)
    other = draw_at(logits, how, np.full(8, expected, np.float32))
    assert tokens[5] == np.asarray(other.tokens)[5]
