"""What the engine does on the device, each one compiled program per shape.

The cache is donated to each of them: the caller goes on with the returned one. Rows that must
leave no trace carry a position outside the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix.errors import ModelError
from tunix.inference.sampling import Draws, sample, sample_filtered
from tunix.models import llama, lora
from tunix.models.llama import Cache, LlamaConfig, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """What the engine generates with, in generation form: a base, and adapters apart from it."""

    base: Params
    adapters: tuple[lora.Adapter, ...] = ()


@partial(jax.jit, static_argnames=("config", "window"), donate_argnames=("cache",))
def decode(
    config: LlamaConfig,
    weights: Weights,
    cache: Cache,
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    adapters: Int[Array, " rows"],
    window: int,
) -> tuple[Cache, Float[Array, "rows vocab"]]:
    """Feed one token to each of the first ``rows`` slots; return the logits of the next one.

    ``tokens`` stand at ``positions``; at least 8 rows, fewer would change the arithmetic.
    ``adapters`` say which adapter each row uses, 0 for none.
    """
    slots = jnp.arange(tokens.shape[0])
    hidden, cache = llama.cached_hidden_states(
        config,
        weights.base,
        tokens[:, None],
        positions[:, None],
        slots,
        cache,
        window,
        weights.adapters,
        adapters,
    )
    return cache, llama.logits(weights.base, hidden[:, 0], weights.adapters, adapters)


draw = jax.jit(sample)
"""``sampling.sample``: a program of its own, compiled per number of rows and not per window."""

draw_filtered = jax.jit(sample_filtered)
"""``sampling.sample_filtered``, run beside ``draw`` in steps in which some row needs it."""


@partial(jax.jit, static_argnames=("config", "window"), donate_argnames=("cache",))
def prefill(
    config: LlamaConfig,
    weights: Weights,
    cache: Cache,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    slots: Int[Array, " rows"],
    adapters: Int[Array, " rows"],
    window: int,
) -> Cache:
    """Write the keys and values of a chunk of prompt for each of some slots."""
    _, cache = llama.cached_hidden_states(
        config,
        weights.base,
        tokens,
        positions,
        slots,
        cache,
        window,
        weights.adapters,
        adapters,
    )
    return cache


@partial(jax.jit, static_argnames=("window",), donate_argnames=("cache",))
def copy(
    cache: Cache, sources: Int[Array, " pairs"], targets: Int[Array, " pairs"], window: int
) -> Cache:
    """Copy the first ``window`` positions of slots to other slots; targets outside are dropped.

    All sources are read before any target is written.
    """
    return [
        (
            keys.at[targets, :, :, :window].set(keys[sources, :, :, :window], mode="drop"),
            values.at[targets, :, :window].set(values[sources, :, :window], mode="drop"),
        )
        for keys, values in cache
    ]


@partial(jax.jit, donate_argnames=("cache",))
def clear(cache: Cache, slot: Int[Array, ""]) -> Cache:
    """Fill a slot with zeros: what is masked is weighed by 0, and 0 times NaN is NaN."""
    return [(keys.at[slot].set(0), values.at[slot].set(0)) for keys, values in cache]


def warm_up(
    config: LlamaConfig,
    weights: Weights,
    cache: Cache,
    draws: Draws,
    *,
    decode_rows: Sequence[int],
    prefills: Sequence[tuple[int, int]],
    windows: Sequence[int],
) -> Cache:
    """Compile the programs above for these rows, ``(rows, length)`` of prefills, and windows.

    All rows stand outside the cache, so it comes back as it was.
    """
    slots, _, capacity = cache[0][1].shape[:3]
    for window in windows:
        for rows in decode_rows:
            nothing, outside = np.zeros(rows, np.int32), np.full(rows, capacity, np.int32)
            cache, logits = decode(config, weights, cache, nothing, outside, nothing, window)
            cache = copy(cache, nothing, slots + np.arange(rows, dtype=np.int32), window)
            for program in (draw, draw_filtered):
                program(logits, jax.tree.map(lambda x, rows=rows: x[:rows], draws))
        for rows, length in prefills:
            nothing, base = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
            targets = slots + np.arange(rows, dtype=np.int32)
            outside = np.full((rows, length), capacity, np.int32)
            cache = prefill(config, weights, cache, nothing, outside, targets, base, window)
    return cache


_unstack = jax.jit(llama.unstack)
_unstack_adapter = jax.jit(lora.unstack, static_argnames=("num_layers",))


def take_over(config: LlamaConfig, params: Any) -> Params:
    """Make the engine's own copy, in generation form, of parameters in training form.

    The caller may donate or delete its buffers as soon as this returns. Raises ``ModelError``
    where a tensor is missing, unknown or of another shape than ``config`` says.
    """
    _check(params, llama.parameter_shapes(config), "")
    return jax.block_until_ready(_unstack(params))


def take_over_adapter(config: LlamaConfig, adapter: lora.Adapter) -> lora.Adapter:
    """Like ``take_over`` for an adapter: ``ModelError`` where it does not fit the base."""
    leaves = [*adapter.weights["layers"], *(n for n in adapter.weights if n != "layers")]
    shapes = lora.adapter_shapes(llama.parameter_shapes(config), leaves, adapter.rank)
    _check(adapter.weights, shapes, "")
    return jax.block_until_ready(_unstack_adapter(adapter, config.num_layers))


@jax.jit
def differ(one: Any, other: Any) -> Bool[Array, ""]:
    """Whether any number of two trees of equal structure differs."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.any(jnp.stack([jnp.any(a != b) for a, b in pairs]))


def _check(params: Any, shapes: Any, path: str) -> None:
    if isinstance(shapes, dict):
        if set(params) != set(shapes):
            names = sorted(set(params) ^ set(shapes))
            raise ModelError(f"parameters {path or '/'}: missing or unknown tensors {names}")
        for name, inner in shapes.items():
            _check(params[name], inner, f"{path}/{name}")
    elif tuple(params.shape) != shapes:
        raise ModelError(f"parameter {path} has shape {tuple(params.shape)}, expected {shapes}")
