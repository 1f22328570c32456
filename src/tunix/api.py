"""One-call Python functions: a config (object, dictionary or YAML file) in, a finished run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix.algorithms.language import grpo as grpo_algorithm
from tunix.algorithms.language import sft as sft_algorithm
from tunix.cli.commands import fields_by_command
from tunix.config_parsing import load_config
from tunix.environments.base import Environment
from tunix.models.policy import load_policy
from tunix.report.console import console_observer
from tunix.rewards.verifiable import Reward
from tunix.training.loop import Run
from tunix.types import Task

__all__ = ["grpo", "load_policy", "sft"]


def sft(
    config: sft_algorithm.SFTConfig | Mapping[str, Any] | str | Path,
    *,
    data: Iterable[dict[str, Any]] | None = None,
) -> Run:
    """Fine-tune a model on examples and show its progress.

    ``data`` yields rows as dictionaries, with ``messages`` or with ``prompt`` and ``completion``;
    without it they come from the config.

    Raises:
        ConfigError, DataError, ModelError: before anything is computed.
        RunError: the run cannot go on; its state is saved.
    """
    settings = load_config(sft_algorithm.SFTConfig, config, elsewhere=fields_by_command)
    return sft_algorithm.train(settings, data=data, observers=[console_observer(settings.console)])


def grpo(
    config: grpo_algorithm.GRPOConfig | Mapping[str, Any] | str | Path,
    *,
    tasks: Sequence[Task] | None = None,
    reward: Reward | None = None,
    environment: Callable[[], Environment] | None = None,
) -> Run:
    """Improve a model by trial and reward (GRPO) and show its progress.

    ``tasks`` with a ``split`` other than ``train`` are held out; ``reward(task, episode)`` judges
    an episode; ``environment()`` makes the environment of an episode. What is None comes from the
    config.

    Raises:
        ConfigError, DataError, ModelError: before anything is computed.
        RunError: the run cannot go on; its state is saved.
    """
    settings = load_config(grpo_algorithm.GRPOConfig, config, elsewhere=fields_by_command)
    return grpo_algorithm.train(
        settings,
        tasks=tasks,
        reward=reward,
        environment=environment,
        observers=[console_observer(settings.console)],
    )
