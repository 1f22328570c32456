"""The model that a run has trained so far, from its newest checkpoint or one that is named."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pydantic
import yaml

from tunix.config import TrainingConfig
from tunix.errors import RunError
from tunix.models import llama
from tunix.models.policy import Policy, is_saved, load_policy
from tunix.training.adapter import trained_adapter
from tunix.training.checkpoint import complete_steps, read_part

CHECKPOINTS = "checkpoints"


def find_run(source: str | Path) -> tuple[Path, int | None] | None:
    """Return run folder and step if ``source`` is a run folder or one of its checkpoints.

    The step is None where it is not named.
    """
    path = Path(source).expanduser().absolute()
    if (path / "config.yaml").is_file() and not is_saved(path):
        return path, None
    if path.name == CHECKPOINTS and (path.parent / "config.yaml").is_file():
        return path.parent, None
    if path.parent.name == CHECKPOINTS and path.name.isdecimal() and path.is_dir():
        return path.parent.parent, int(path.name)
    return None


def load_trained(folder: Path, step: int | None = None, dtype: str = "float32") -> Policy:
    """Load what a run has trained: all parameters, or its base with the adapter.

    Without ``step`` it is the newest checkpoint, or ``model/`` where no checkpoint is left. The
    base, tokenizer and sizes come from ``model/`` or, while the run has not ended, from the model
    that the run was started from.

    Raises:
        ModelError: the run's model is not there any more.
        RunError: no such folder or checkpoint, or one that does not fit the model.
    """
    config = _recorded_config(folder)
    saved, checkpoints = folder / "model", folder / CHECKPOINTS
    steps = complete_steps(checkpoints)
    if step is None and not steps and is_saved(saved):
        return load_policy(saved, dtype)
    of_step = "" if step is None else f" of step {step}"
    step = max(steps, default=-1) if step is None else step
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise RunError(f"{folder} has no complete checkpoint{of_step}; complete ones: {there}")
    policy = load_policy(saved if is_saved(saved) else config.model, dtype)
    policy = replace(policy, version=step)
    adapter = trained_adapter(config, policy)
    shapes = llama.parameter_shapes(policy.config)
    if adapter is None:
        policy = replace(policy, params={})  # let go before its successor comes
    else:
        shapes = jax.tree.map(lambda leaf: leaf.shape, adapter.weights)
    trained = read_part(checkpoints / str(step), "params")
    if shapes != jax.tree.map(lambda leaf: leaf.shape, trained):
        raise RunError(f"{checkpoints / str(step)} is of another model than {config.model}")
    if adapter is not None:
        weights = jax.tree.map(jnp.asarray, trained)
        return replace(policy, adapter=replace(adapter, weights=weights))
    return replace(policy, params=jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), trained))


def _recorded_config(folder: Path) -> TrainingConfig:
    """The part of a run's config that says what is trained."""
    path = folder / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(TrainingConfig)]
        return TrainingConfig(**{name: content[name] for name in names if name in content})
    except (OSError, TypeError, ValueError, yaml.YAMLError, pydantic.ValidationError) as error:
        raise RunError(f"{path} is not the config of a training run: {error}") from None
