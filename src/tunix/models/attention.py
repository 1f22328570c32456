"""Attention for packed training rows and for a key/value cache. Layout choices live here only.

Heads come first and the queries that share a key head are folded into rows, so keys and values
are never repeated; causal queries run in blocks that touch only the keys up to their own end.
"""

from __future__ import annotations

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
        scores = jnp.einsum("bkqd,bksd->bkqs", folded, key[:, :, :end])
        scores = scores.reshape(rows, kv, share, end - start, end)
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1)
        weights = weights.reshape(rows, kv, share * (end - start), end)
        context = jnp.einsum("bkqs,bksd->bkqd", weights, value[:, :, :end])
        blocks.append(context.reshape(rows, kv, share, end - start, width))
    return (
        jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)
    )


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
    """Attention of new tokens over the first ``window`` cached positions, up to their own."""
    rows, length, heads, width = query.shape
    keys, values = keys[:, :, :, :window], values[:, :, :window]
    if length > 1:  # a decode step's rows are the first slots, in order: no copy of the cache
        keys, values = keys[slots], values[slots]
    else:
        keys, values = keys[:rows], values[:rows]
    kv = keys.shape[1]
    query = (query * width**-0.5).reshape(rows, length, kv, heads // kv, width)
    scores = jnp.einsum("btkgd,bkds->bkgts", query, keys, preferred_element_type=query.dtype)
    visible = jnp.arange(window) <= positions[..., None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1)
    context = jnp.einsum("bkgts,bksd->btkgd", weights, values, preferred_element_type=query.dtype)
    return context.reshape(rows, length, heads, width)
