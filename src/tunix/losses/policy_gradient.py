"""Policy-gradient losses as per-token values; ``losses.aggregate`` turns them into a number."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

KLEstimator = Literal["k1", "k2", "k3"]


def clipped_surrogate(
    logprobs: Float[Array, "*batch"],
    proximal_logprobs: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*batch"], Bool[Array, "*batch"]]:
    """PPO's clipped surrogate, negated to be minimised, and where the clip took the gradient away.

    ``-min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A)`` with ``ρ = exp(logprobs - proximal_logprobs)``
    (Schulman et al. 2017, arXiv 1707.06347, eq. 7; separate bounds: Yu et al. 2025, DAPO,
    arXiv 2503.14476, eq. 10).
    """
    ratio = jnp.exp(logprobs - proximal_logprobs)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
    return -surrogate, clipped * advantages < ratio * advantages


def kl_estimate(
    logprobs: Float[Array, "*batch"],
    reference_logprobs: Float[Array, "*batch"],
    estimator: KLEstimator,
) -> Float[Array, "*batch"]:
    """Per-token estimate of ``KL(policy || reference)`` from a token drawn from the policy.

    With ``d = log π_ref - log π`` (Schulman 2020, "Approximating KL divergence"): k1 ``-d``,
    unbiased; k2 ``d² / 2``, biased, the one whose gradient is the gradient of the KL where the
    sample is on-policy; k3 ``exp(d) - 1 - d``, unbiased and never negative (GRPO, eq. 4).
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    return jnp.expm1(difference) - difference
