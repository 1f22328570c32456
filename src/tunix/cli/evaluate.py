"""``tunix eval``: measure a model on tasks, with the evaluator that training uses."""

from __future__ import annotations

import json
from typing import Literal

from pydantic.dataclasses import dataclass

from tunix.cli.generate import open_engine, writer
from tunix.config import (
    STRICT,
    BatchSamplingConfig,
    JudgeConfig,
    NonNegativeInt,
    PolicyGradientConfig,
    PositiveInt,
)
from tunix.datasets import tasks as task_files
from tunix.inference.engine import Engine
from tunix.inference.request import check_context, sampling_params
from tunix.metrics.sinks import plain
from tunix.models.policy import Policy, load_policy
from tunix.profiling.spans import Spans
from tunix.report.layout import evaluation_text
from tunix.rollout.collector import Collector
from tunix.rollout.episode import EpisodeRunner, task_prompt
from tunix.training.evaluation import Evaluator
from tunix.training.on_policy import TaskSource, task_source


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateConfig(BatchSamplingConfig, JudgeConfig):
    """Measure a model on tasks."""

    model: str
    """Hugging Face folder, PEFT adapter folder, .gguf file, or package:NAME that ships one."""
    tasks: list[str] | str
    """Files of tasks (.jsonl, .parquet), globs, or a built-in task, whose held-out ones count."""
    max_tasks: PositiveInt = 256
    """Most tasks that are played, from the first on."""
    output: str | None = None
    """JSONL file for what was asked, answered and given; unset means none."""
    as_json: bool = False
    """Print the metrics as one JSON object."""
    seed: NonNegativeInt = 0
    """Fixes the answers; a training run evaluates with its own seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and computation."""


def run(config: EvaluateConfig) -> dict[str, float]:
    """Play each task once, print the result, and return the metrics of ``Evaluator``.

    Raises:
        ConfigError, DataError, ModelError: before anything is generated.
        RunError: the output cannot be written.
    """
    source = held_out_source(config)
    policy = load_policy(config.model, config.dtype)
    check_context(config, policy.config.max_positions)
    longest = config.max_prompt_tokens + config.max_completion_tokens
    with open_engine(policy, config.slots, len(source.held_out), longest) as engine:
        metrics, samples = make_evaluator(config, policy, engine, source).evaluate()
    if config.output is not None:
        with writer(config.output) as write:
            for sample in samples:
                write(json.dumps(plain(sample), ensure_ascii=False))
    print(json.dumps(plain(metrics)) if config.as_json else evaluation_text(metrics))
    return metrics


def held_out_source(config: EvaluateConfig) -> TaskSource:
    """Return the tasks and who judges them, found as a training run finds them.

    Raises:
        ConfigError, DataError: nothing judges the answers, or the tasks cannot be read.
    """
    is_file = task_files.names_files(config.tasks)
    training = PolicyGradientConfig(
        model=config.model,
        tasks=config.tasks,
        evaluation_tasks=config.tasks if is_file else None,
        evaluation_size=config.max_tasks,
        prompt_field=config.prompt_field,
        answer_field=config.answer_field,
        system=config.system,
        reward=config.reward,
        environment=config.environment,
    )
    return task_source(training, None, None, None)


def make_evaluator(
    config: EvaluateConfig, policy: Policy, engine: Engine, source: TaskSource
) -> Evaluator:
    """Put the evaluator together; checks every prompt.

    Raises:
        DataError: a prompt is too long or cannot be rendered.
    """
    runner = EpisodeRunner(
        policy,
        engine,
        source.make_environment,
        config.max_prompt_tokens,
        config.max_prompt_tokens + config.max_completion_tokens,
        config.episode_timeout,
        Spans(),
    )
    for task in source.held_out:
        task_prompt(policy, task, config.max_prompt_tokens)
    sampling = sampling_params(config, policy.stop_ids)
    collector = Collector(
        runner,
        source.rewards,
        sampling,
        1,
        config.seed,
        config.episode_retries,
        config.reward_timeout,
    )
    return Evaluator(collector, source.held_out, config.success_reward)
