"""Advantages from the rewards of a group. Masked by selection, defined for zero and one items."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_advantages(
    rewards: Float[Array, "groups size"],
    valid: Bool[Array, "groups size"],
    normalize: bool,
    epsilon: float,
) -> Float[Array, "groups size"]:
    """Reward minus the group's mean, divided by the group's deviation where ``normalize``.

    ``A_i = (r_i - mean r) / (std r + epsilon)`` with the population deviation over the valid
    samples (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); without the division it is the
    advantage of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). 0 for invalid samples, for groups of
    one and for groups of equal rewards.
    """
    count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    known = jnp.where(valid, rewards, 0)
    mean = known.sum(axis=1, keepdims=True) / count
    centred = jnp.where(valid, known - mean, 0)
    # equal rewards must give exactly 0: the mean of equal numbers can be off by a rounding error
    largest = jnp.where(valid, rewards, -jnp.inf).max(axis=1, keepdims=True)
    smallest = jnp.where(valid, rewards, jnp.inf).min(axis=1, keepdims=True)
    centred = jnp.where(largest > smallest, centred, 0)
    if not normalize:
        return centred
    deviation = jnp.sqrt((centred * centred).sum(axis=1, keepdims=True) / count)
    return centred / jnp.where(deviation > 0, deviation + epsilon, 1)
