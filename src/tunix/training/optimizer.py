"""AdamW with a schedule, clipping by global norm, and decay that leaves norms alone."""

from __future__ import annotations

from typing import Any

import jax
import optax

from tunix.config import TrainingConfig


def learning_rate_schedule(config: TrainingConfig, updates: int) -> optax.Schedule:
    """Learning rate by number of optimizer updates done: linear warm-up, then the schedule.

    A linear or cosine schedule reaches ``final_learning_rate * learning_rate`` after ``updates``.
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_learning_rate
    rest = max(updates - config.warmup_steps, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_learning_rate)
    if config.warmup_steps == 0:
        return after
    warm = config.warmup_steps
    # the first update is not wasted: it has 1/warm of the peak, not 0
    rise = optax.linear_schedule(peak / warm, peak, max(warm - 1, 1))
    return optax.join_schedules([rise, after], [warm])


def decay_mask(params: Any) -> Any:
    """Return True for each leaf that weight decay applies to: everything but norms and biases."""

    def decays(path: Any, _: Any) -> bool:
        name = str(path[-1].key)
        return not (name.endswith("norm") or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: TrainingConfig, updates: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) after clipping to ``max_gradient_norm``."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(
            learning_rate_schedule(config, updates),
            b1=config.adam_beta1,
            b2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
