"""Which adapter a run trains: a fresh one, the one it was given, or none."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp

from tunix.config import TrainingConfig
from tunix.errors import ConfigError
from tunix.models import llama, lora
from tunix.models.policy import Policy

DEFAULTS = TrainingConfig(model="")


def trained_adapter(config: TrainingConfig, policy: Policy) -> lora.Adapter | None:
    """Return the adapter to train, in at least float32; None where all parameters are trained.

    Raises:
        ConfigError: settings of an adapter without a rank or other than those of the policy's own
            adapter, or a pattern that matches no module.
    """
    own = policy.adapter
    if config.lora_rank == 0 and own is None:
        _refuse_without_rank(config)
        return None
    if own is not None:
        _refuse_another(config, own)
        return replace(own, dropout=config.lora_dropout)
    shapes = llama.parameter_shapes(policy.config)
    leaves = lora.matched(config.lora_targets)
    dtype = jnp.promote_types(policy.params["embedding"].dtype, jnp.float32)
    key = jax.random.key(config.seed)
    weights = lora.initialize(key, lora.adapter_shapes(shapes, leaves, config.lora_rank), dtype)
    return lora.Adapter(
        weights, config.lora_rank, config.lora_alpha, config.lora_rank_stabilized,
        config.lora_dropout,
    )  # fmt: skip


def _refuse_another(config: TrainingConfig, own: lora.Adapter) -> None:
    """The settings that are set must be those of the adapter that the policy has."""
    leaves = {*own.weights, *own.weights["layers"]} - {"layers"}
    modules = [name for leaf, name in lora.MODULES.items() if leaf in leaves]
    for field, same, has in (
        ("lora_rank", config.lora_rank == own.rank, f"rank {own.rank}"),
        ("lora_alpha", config.lora_alpha == own.alpha, own.alpha),
        (
            "lora_rank_stabilized",
            config.lora_rank_stabilized == own.rank_stabilized,
            own.rank_stabilized,
        ),
        ("lora_targets", set(lora.matched(config.lora_targets)) == leaves, ", ".join(modules)),
    ):
        value = getattr(config, field)
        if not same and value != getattr(DEFAULTS, field):
            raise ConfigError(
                f"{field}: {value!r}, but the adapter of {config.model} has {has}; leave {field} "
                "out to go on with it"
            )


def _refuse_without_rank(config: TrainingConfig) -> None:
    for field in fields(TrainingConfig):
        if not field.name.startswith("lora_"):
            continue
        value = getattr(config, field.name)
        if value != getattr(DEFAULTS, field.name):
            raise ConfigError(
                f"{field.name}: {value!r}, but no adapter is trained; set lora_rank as well"
            )
