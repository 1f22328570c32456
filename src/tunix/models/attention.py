"""Attention for packed training rows and for a key/value cache. Layout choices live here only.

Heads come first and the queries that share a key head are folded into rows, so keys and values
are never repeated; causal queries run in blocks that touch only the keys up to their own end.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 128
"""Queries per block: at 128 a 512-token row needs 62% of the full square of scores."""

MASKED = -1e30
"""Score of a key that may not be seen; finite, so a row with no visible key has no NaN."""


def packed_attention(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    segment_ids: Int[Array, "rows length"],
) -> Float[Array, "rows length heads head_dim"]:
    """Causal attention within segments: a token sees earlier tokens of the same segment id."""
    rows, length, heads, width = query.shape
    kv = key.shape[2]
    share = heads // kv
    query = (query * width**-0.5).reshape(rows, length, kv, share, width).transpose(0, 2, 3, 1, 4)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    index = jnp.arange(length)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        visible = (segment_ids[:, start:end, None] == segment_ids[:, None, :end]) & (
            index[start:end, None] >= index[:end]
        )
        folded = query[:, :, :, start:end].reshape(rows, kv, share * (end - start), width)
        context = _softmax_attention(folded, key[:, :, :end], value[:, :, :end], visible)
        blocks.append(context.reshape(rows, kv, share, end - start, width))
    return (
        jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)
    )


@jax.custom_vjp
def _softmax_attention(query, key, value, visible):
    """Scaled queries ``[rows, kv, share * block, d]`` over keys ``[rows, kv, s, d]``.

    The backward pass is written out (with P the weights and O the result: dV = Pᵀ dO,
    dS = P ∘ (dP - Σ dP ∘ P)); what autodiff makes of the softmax takes twice as long on a CPU.
    """
    return _softmax_attention_forward(query, key, value, visible)[0]


def _softmax_attention_forward(query, key, value, visible):
    scores = jnp.einsum("bkqd,bksd->bkqs", query, key)
    rows, kv, folded, seen = scores.shape
    shaped = scores.reshape(rows, kv, -1, visible.shape[1], seen)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], shaped, MASKED), axis=-1)
    weights = weights.reshape(rows, kv, folded, seen)
    return jnp.einsum("bkqs,bksd->bkqd", weights, value), (query, key, value, weights)


def _softmax_attention_backward(saved, gradient):
    query, key, value, weights = saved
    to_value = jnp.einsum("bkqs,bkqd->bksd", weights, gradient)
    to_weights = jnp.einsum("bkqd,bksd->bkqs", gradient, value)
    inner = jnp.sum(to_weights * weights, axis=-1, keepdims=True)
    to_scores = weights * (to_weights - inner)
    to_query = jnp.einsum("bkqs,bksd->bkqd", to_scores, key)
    to_key = jnp.einsum("bkqs,bkqd->bksd", to_scores, query)
    return to_query, to_key, to_value, None


_softmax_attention.defvjp(_softmax_attention_forward, _softmax_attention_backward)


def fixed_order_sum(x: Float[Array, "*shape"], axis: int = -1) -> Float[Array, "*rest"]:
    """Sum over an axis in one order whatever the size of the others, by halving.

    Appended zeros do not change the result either: 64 numbers sum to the same bits as the same
    64 followed by any number of zeros. ``jnp.sum`` promises neither (on CPU its order changes at
    4096 elements).
    """
    return _halve(x, axis, jnp.add, 0.0)


def fixed_order_max(x: Float[Array, "*shape"], axis: int = -1) -> Float[Array, "*rest"]:
    """Maximum over an axis, by halving.

    ``jnp.max`` has the same value, but from 4096 elements on XLA on CPU draws what follows it
    into the same kernel (an optimization barrier does not hinder it), where ``exp`` is another
    ``exp``; without a reduction every shape uses the same one.
    """
    return _halve(x, axis, jnp.maximum, -jnp.inf)


def _halve(x: Array, axis: int, combine: Callable[[Array, Array], Array], neutral: float) -> Array:
    axis = axis % x.ndim
    length = x.shape[axis]
    full = 1 << (length - 1).bit_length()
    if full > length:
        padding = [(0, full - length if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=neutral)
    while full > 1:
        full //= 2
        first, second = jnp.split(x, 2, axis)
        x = combine(first, second)
    return x.squeeze(axis)


def write_cache(
    keys: Float[Array, "slots kv_heads head_dim positions"],
    values: Float[Array, "slots kv_heads positions head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    slots: Int[Array, " rows"],
    positions: Int[Array, "rows length"],
) -> tuple[Array, Array]:
    """Store new keys and values at their slots and positions; those outside are dropped."""
    rows = slots[:, None]
    keys = keys.at[rows, :, :, positions].set(key.astype(keys.dtype), mode="drop")
    values = values.at[rows, :, positions].set(value.astype(values.dtype), mode="drop")
    return keys, values


def cached_attention(
    query: Float[Array, "rows length heads head_dim"],
    keys: Float[Array, "slots kv_heads head_dim positions"],
    values: Float[Array, "slots kv_heads positions head_dim"],
    slots: Int[Array, " rows"],
    positions: Int[Array, "rows length"],
    window: int,
) -> Float[Array, "rows length heads head_dim"]:
    """Attention of new tokens over the first ``window`` cached positions, up to their own.

    The result has the same bits for every ``window`` that covers the positions and for every
    number of rows. Cached values beyond a row's position must be finite: they are weighed by 0.
    """
    rows, length, heads, width = query.shape
    keys, values = keys[:, :, :, :window], values[:, :, :window]
    if length > 1:  # a decode step's rows are the first slots, in order: no copy of the cache
        keys, values = keys[slots], values[slots]
    else:
        keys, values = keys[:rows], values[:rows]
    kv = keys.shape[1]
    query = (query * width**-0.5).reshape(rows, length, kv, heads // kv, width)
    folded = query.transpose(0, 2, 3, 1, 4).reshape(rows, kv, -1, width).astype(keys.dtype)
    scores = jnp.einsum("bkqd,bkds->bkqs", folded, keys)
    visible = jnp.arange(window) <= positions[..., None]
    visible = jnp.broadcast_to(visible[:, None, None], (rows, kv, heads // kv, length, window))
    scores = jnp.where(visible.reshape(scores.shape), scores, MASKED)
    weights = jnp.exp(scores - fixed_order_max(scores)[..., None])
    total = fixed_order_sum(weights)[..., None]
    context = (jnp.einsum("bkqs,bksd->bkqd", weights, values) / total).astype(query.dtype)
    context = context.reshape(rows, kv, heads // kv, length, width)
    return context.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)
