"""The only place where per-token values become a number.

The weight of each token is fixed, with its *global* denominator, for a whole optimizer update
before the update is cut into micro-batches. The loss is then a plain sum, so packing, padding,
order and micro-batching cannot change it.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""``token_mean``: each token the same. ``sequence_mean``: mean over sequences of their token
means. ``sequence_sum``: mean over sequences of their token sums over a constant."""


def token_weights(
    action_tokens: Int[np.ndarray, " sequences"], aggregate: Aggregate, constant: float
) -> Float[np.ndarray, " sequences"]:
    """Weight of each action token of each sequence of one optimizer update.

    With ``n_i`` action tokens in sequence i and ``N`` sequences that have any: ``1 / sum n``
    (token_mean), ``1 / (N n_i)`` (sequence_mean), ``1 / (N constant)`` (sequence_sum). A sequence
    is an episode, however many rows it became. Sequences without action tokens get 0.
    """
    counted = action_tokens > 0
    sequences = max(int(counted.sum()), 1)
    lengths = np.maximum(action_tokens, 1).astype(np.float64)
    if aggregate == "token_mean":
        weights = np.full(len(lengths), 1.0 / max(int(action_tokens.sum()), 1))
    elif aggregate == "sequence_mean":
        weights = 1.0 / (sequences * lengths)
    else:
        weights = np.full(len(lengths), 1.0 / (sequences * constant))
    return np.where(counted, weights, 0.0)


def weighted_sum(
    values: Float[Array, "*batch"], weights: Float[Array, "*batch"], mask: Bool[Array, "*batch"]
) -> Float[Array, ""]:
    """Sum of ``weights * values`` where ``mask``; what stands elsewhere is never touched."""
    return jnp.sum(jnp.where(mask, values, 0) * jnp.where(mask, weights, 0))
