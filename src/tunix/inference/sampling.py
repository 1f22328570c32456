"""Drawing one token a row: filters as a threshold, then a two-level inverse CDF.

Every filter keeps the tokens whose tempered logit is at or above some value, so a row's filters
together are one threshold, -inf without filters. The vocabulary is cut into strided blocks, token
``i`` in block ``i % blocks``, because summing over the major axis is the fast direction; one
uniform number picks the block by its mass and, with what is left of it, the token. Nothing is
sorted and no noise is drawn per vocabulary entry (measured: ``jax.random.categorical`` costs half
a decode step of a 135M model on CPU).

All sums are ``fixed_order`` ones, so a row's result does not depend on the number of rows. A
token whose share of the mass is below about 2**-23 is drawn at the resolution of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from tunix.models.attention import fixed_order_max, fixed_order_sum

BLOCK, SMALL_BLOCK, SMALL_VOCAB = 256, 16, 4096
"""Tokens per block of the vocabulary, and of one with at most ``SMALL_VOCAB`` entries."""


AnyArray = jax.Array | np.ndarray


class Draws(NamedTuple):
    """How each row is drawn; arrays, so that no value of theirs ever recompiles anything."""

    seeds: UInt32[AnyArray, "rows 2"]
    """High and low word of the request's seed."""
    positions: Int[AnyArray, " rows"]
    """Absolute position of the token to be drawn."""
    temperature: Float[AnyArray, " rows"]
    """0 means greedy."""
    top_k: Int[AnyArray, " rows"]
    """0 means no limit."""
    top_p: Float[AnyArray, " rows"]
    min_p: Float[AnyArray, " rows"]


class Sampled(NamedTuple):
    """What one step draws; see ``Completion`` for the meaning."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    log_kept: Float[Array, " rows"]


def sample(logits: Float[Array, "rows vocab"], draws: Draws) -> Sampled:
    """Draw one token a row with the random number of ``(seed, position)``, ignoring filters.

    Rows whose logits are not finite get some token in range and a log-probability of NaN.
    """
    return sample_at(logits, draws, _uniform(draws), filtered=False)


def sample_filtered(logits: Float[Array, "rows vocab"], draws: Draws) -> Sampled:
    """Draw like ``sample``, but obey filters and temperature 0.

    A program of its own, because what the compiler makes of the rest differs in the last bit
    where there are filters: a row is to be taken from the same one whatever its neighbours ask.
    """
    return sample_at(logits, draws, _uniform(draws), filtered=True)


def sample_at(
    logits: Float[Array, "rows vocab"],
    draws: Draws,
    uniform: Float[Array, " rows"],
    *,
    filtered: bool,
) -> Sampled:
    """Draw with given random numbers from [0, 1)."""
    rows, vocab = logits.shape
    greedy = jnp.asarray(draws.temperature) == 0
    temperature = jnp.where(greedy, 1, draws.temperature)
    scaled = _blocks(logits / temperature[:, None])
    peak = fixed_order_max(fixed_order_max(scaled, axis=1))

    def mass_above(threshold: Array) -> Array:
        weights = jnp.exp(scaled - peak[:, None, None])
        return fixed_order_sum(jnp.where(scaled >= threshold[:, None, None], weights, 0), axis=1)

    full = mass = fixed_order_sum(jnp.exp(scaled - peak[:, None, None]), axis=1)
    total = kept_total = fixed_order_sum(full)
    threshold = jnp.full_like(peak, -jnp.inf)
    if filtered:
        threshold = _threshold(scaled, mass_above, peak, draws)
        mass = mass_above(threshold)
        kept_total = fixed_order_sum(mass)

    target = uniform * kept_total
    block, before = _first_above(mass, target)
    row = jnp.arange(rows)
    inside = scaled[row, :, block]
    inside = jnp.where(inside >= threshold[:, None], jnp.exp(inside - peak[:, None]), 0)
    offset, _ = _first_above(inside, target - before)
    tokens = jnp.minimum(offset * full.shape[-1] + block, vocab - 1)
    log_kept = jnp.zeros_like(peak)
    if filtered:
        tokens = jnp.where(greedy, _first_at(scaled, peak), tokens)
        log_kept = jnp.where(greedy, 0, jnp.minimum(jnp.log(kept_total / total), 0))
    logprobs = logits[row, tokens] / temperature - peak - jnp.log(total)
    return Sampled(tokens.astype(jnp.int32), logprobs, log_kept)


def _uniform(draws: Draws) -> Float[Array, " rows"]:
    """One number from [0, 1) a row; its bits depend on seed and position alone."""

    def one(seed: AnyArray, position: AnyArray) -> Array:
        key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(one)(draws.seeds, draws.positions)


def _blocks(x: Float[Array, "rows vocab"]) -> Float[Array, "rows width blocks"]:
    """Cut the vocabulary into blocks; it is filled up with -inf, which has no mass."""
    rows, vocab = x.shape
    width = BLOCK if vocab > SMALL_VOCAB else SMALL_BLOCK
    if vocab % width:
        x = jnp.pad(x, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
    return x.reshape(rows, width, -1)


def _first_at(
    scaled: Float[Array, "rows width blocks"], peak: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """Lowest token id whose logit is the row's maximum; any id where there is none."""
    ids = jnp.arange(scaled[0].size, dtype=jnp.int32).reshape(scaled.shape[1:])
    none = scaled[0].size - 1
    return jnp.where(scaled == peak[:, None, None], ids, none).min(axis=1).min(axis=1)


def _first_above(
    mass: Float[Array, "rows length"], target: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Return the first index where the running sum exceeds ``target``, and the sum before it.

    Only indices with mass count; where rounding leaves none above the target, the last one with
    mass is taken. So a token without mass is never drawn.
    """
    length = mass.shape[-1]
    highest = jax.lax.Precision.HIGHEST  # accelerators would round the mass to 8 or 10 bits
    triangle = jnp.tri(length, dtype=mass.dtype)
    running = jnp.einsum("rj,ij->ri", mass, triangle, precision=highest)
    some = mass > 0
    above = some & (running > target[:, None])
    last = length - 1 - jnp.argmax(some[:, ::-1], axis=-1)
    index = jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)
    rows = jnp.arange(mass.shape[0])
    before = jnp.where(index > 0, running[rows, jnp.maximum(index - 1, 0)], 0)
    return index, before


def _threshold(
    scaled: Float[Array, "rows width blocks"],
    mass_above: Callable[[Array], Array],
    peak: Float[Array, " rows"],
    draws: Draws,
) -> Float[Array, " rows"]:
    """Lowest tempered logit that a row's filters keep; -inf for a row without filters.

    ``mass_above(threshold)`` is the mass of each block at or above a threshold. A search runs
    only in steps in which some row asks for it.
    """
    by_k, by_p = draws.top_k > 0, draws.top_p < 1
    lowest = jnp.full_like(peak, -jnp.inf)

    def top_k() -> Array:
        def enough(threshold: Array) -> Array:
            return (scaled >= threshold[:, None, None]).sum((1, 2)) >= draws.top_k

        return jnp.where(by_k, _bisect(lowest, peak, enough), lowest)

    def top_p() -> Array:
        def mass(threshold: Array) -> Array:
            return fixed_order_sum(mass_above(threshold))

        aim = jnp.asarray(draws.top_p) * mass(least)
        return jnp.where(by_p, _bisect(least, peak, lambda t: mass(t) >= aim), least)

    least = jax.lax.cond(by_k.any(), top_k, lambda: lowest)
    least = jax.lax.cond(by_p.any(), top_p, lambda: least)
    return jnp.maximum(least, peak + jnp.log(draws.min_p))  # log 0 is -inf: no effect


def _bisect(
    low: Float[Array, " rows"],
    high: Float[Array, " rows"],
    enough: Callable[[Array], Array],
) -> Float[Array, " rows"]:
    """Find each row's highest float from ``low`` to ``high`` for which ``enough`` still holds.

    ``enough(low)`` holds. Floats are halved by their bits, as integers in the same order, so 32
    rounds find the exact one.
    """

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2 + (high - low) % 2
        good = enough(_unordered(middle))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return _unordered(jax.lax.fori_loop(0, 32, halve, (_ordered(low), _ordered(high)))[0])


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Map floats to unsigned integers in the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unordered(x: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Invert ``_ordered``."""
    bits = jnp.where(x >> 31 == 1, x & jnp.uint32((1 << 31) - 1), ~x)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
