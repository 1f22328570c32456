"""Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300).

For each task x, G completions y_1 ... y_G are sampled from the policy and judged. With the
rewards r_1 ... r_G of a group, every token of y_i gets the advantage

    A_i = (r_i - mean(r)) / (std(r) + δ)                                      (section 4.1.2)

and the loss to be minimised is the aggregate over all tokens t of

    -min(ρ_t A_i, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_i) + β KL_t              (eq. 3)
    ρ_t  = π(y_t | x, y_<t) / π_behaviour(y_t | x, y_<t)
    KL_t = π_ref / π - log(π_ref / π) - 1                                     (eq. 4, k3)

The paper averages over sequences of token means (``sequence_mean``) with ε_low = ε_high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from pydantic import Field
from pydantic.dataclasses import dataclass

from tunix.config import STRICT, NonNegativeFloat, PolicyGradientConfig
from tunix.datasets.batch import Batch
from tunix.environments.base import Environment
from tunix.losses.advantages import group_advantages
from tunix.losses.aggregate import Aggregate
from tunix.losses.policy_gradient import KLEstimator, clipped_surrogate, kl_estimate
from tunix.models.policy import Policy, load_policy
from tunix.rewards.verifiable import Reward
from tunix.training.learner import PolicyOutputs, Sums, masked_sums
from tunix.training.loop import Observer, Run
from tunix.training.on_policy import OnPolicyRun, task_source
from tunix.training.run_folder import RunFolder
from tunix.types import Task


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GRPOConfig(PolicyGradientConfig):
    """Group Relative Policy Optimization."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip of the ratio; epsilon_low."""
    clip_high: NonNegativeFloat = 0.2
    """Upper clip of the ratio; epsilon_high."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term; beta. At 0 no reference model is kept."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL term."""
    aggregate: Aggregate = "token_mean"
    """How per-token losses become one number; sequence_sum divides by max_completion_tokens."""
    normalize_advantages: bool = True
    """Divide by the group's deviation; off in Dr. GRPO."""
    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to the group's deviation; delta."""
    skip_equal_groups: bool = False
    """Leave groups of equal rewards out of the loss and its denominators."""


def advantages(
    rewards: Float[Array, "groups size"], valid: Bool[Array, "groups size"], config: GRPOConfig
) -> Float[Array, "groups size"]:
    """Advantage of each sample of each group; 0 where ``valid`` is False."""
    return group_advantages(rewards, valid, config.normalize_advantages, config.advantage_epsilon)


def loss(
    outputs: PolicyOutputs, batch: Batch, config: GRPOConfig
) -> tuple[Float[Array, "rows length"], Sums]:
    """Per-token loss of eq. 3 and what is logged; each array is ``[rows, length]``."""
    assert batch.behaviour_logprobs is not None and batch.advantages is not None
    values, clipped = clipped_surrogate(
        outputs.logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        config.clip_low,
        config.clip_high,
    )
    drift = kl_estimate(batch.behaviour_logprobs, outputs.logprobs, "k3")
    logged = {"entropy": outputs.entropy, "clip_fraction": clipped, "kl": drift}
    if config.kl_coefficient > 0:
        assert batch.reference_logprobs is not None
        kl = kl_estimate(outputs.logprobs, batch.reference_logprobs, config.kl_estimator)
        values = values + config.kl_coefficient * kl
        logged["kl_reference"] = kl
    return values, masked_sums(batch.action_mask, logged)


def train(
    config: GRPOConfig,
    *,
    policy: Policy | None = None,
    tasks: Sequence[Task] | None = None,
    reward: Reward | None = None,
    environment: Callable[[], Environment] | None = None,
    observers: Sequence[Observer] = (),
) -> Run:
    """The whole loop: collect → advantages → pack → update → publish → log.

    What is None comes from the config.

    Raises:
        ConfigError, DataError, ModelError: before anything is computed.
        RunError: the run cannot go on; its state is saved.
    """
    with (
        RunFolder.open(config.run_folder, "grpo", config, config.resume) as folder,
        OnPolicyRun.open(
            folder,
            config,
            task_source(config, tasks, reward, environment),
            policy or load_policy(config.model, config.dtype),
            partial(loss, config=config),
            observers,
            minimum_group=2,
            needs_reference=config.kl_coefficient > 0,
        ) as run,
    ):
        for step in run.steps():
            groups = run.collect(step)  # tasks_per_step groups of group_size episodes
            batches = []
            for part in np.array_split(np.arange(len(groups)), config.updates_per_step):
                some = [groups[i] for i in part]
                rewards = np.stack([group.rewards for group in some])  # [groups, size]
                valid = np.stack([group.valid for group in some])
                scores = np.asarray(advantages(jnp.asarray(rewards), jnp.asarray(valid), config))
                trained = run.trainable(some)
                if config.skip_equal_groups:
                    trained &= scores.any(axis=1, keepdims=True)
                batches.append(run.pack(some, scores, trained, config.aggregate))
            for _ in range(config.epochs_per_step):
                for batch in batches:
                    if batch is not None:
                        run.update(batch)
            run.finish(groups)
        return run.result()
