"""``tunix generate``: let a model answer a prompt, or each row of a JSONL file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from tunix.config import STRICT, NonNegativeInt, PositiveInt, SamplingConfig
from tunix.datasets import tasks as task_files
from tunix.errors import ConfigError, DataError, RunError
from tunix.inference.engine import Engine
from tunix.inference.request import Completion, Request, sampling_params
from tunix.models.policy import Policy, answer_text, encode_task, load_policy
from tunix.rollout.episode import request_seed
from tunix.types import Task

SMALLEST_BATCH = 8
"""Fewer slots save nothing: the engine never runs fewer rows."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateConfig(SamplingConfig):
    """Let a model answer prompts."""

    model: str
    """Hugging Face folder, .gguf file, or package:NAME of an installed package that ships one."""
    prompt: str | None = None
    """The prompt, as one user message; its answers are printed as plain text."""
    input: str | None = None
    """JSONL file of prompts instead; each answer is one JSON line."""
    prompt_field: str = "prompt"
    """Column of input that holds the prompt: a text or a list of chat messages."""
    system: str | None = None
    """System message put before each prompt."""
    samples: PositiveInt = 1
    """Answers to each prompt."""
    output: str | None = None
    """File that the answers go to; unset means standard output."""
    seed: NonNegativeInt = 0
    """Fixes the answers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and computation."""


def run(config: GenerateConfig) -> None:
    """Answer the prompts of ``config`` and write the answers in their order.

    Raises:
        ConfigError, DataError, ModelError: neither or both of prompt and input, a prompt that is
            too long, a file that cannot be read.
        RunError: the output cannot be written.
    """
    asked = prompts(config)
    policy = load_policy(config.model, config.dtype)
    with writer(config.output) as write:
        for (task, sample), done in zip(
            ((task, i) for task in asked for i in range(config.samples)),
            answers(policy, asked, config),
            strict=True,
        ):
            text = answer_text(policy, [int(t) for t in done.tokens])
            write(text if config.input is None else _row(task, sample, text, done))


def prompts(config: GenerateConfig) -> list[Task]:
    """Return the prompts that ``config`` names.

    Raises:
        ConfigError: neither or both of ``prompt`` and ``input``.
        DataError: the file cannot be used.
    """
    if (config.prompt is None) == (config.input is None):
        raise ConfigError("prompt, input: expected exactly one of the two")
    if config.input is not None:
        return task_files.tasks(config.input, prompt=config.prompt_field, system=config.system)
    messages = task_files.as_messages(config.prompt, config.system, "prompt")
    return [Task(id="prompt", messages=messages)]


def answers(policy: Policy, asked: list[Task], config: GenerateConfig) -> list[Completion]:
    """Generate ``samples`` completions of each task, in order.

    Raises:
        DataError: a prompt is empty or longer than ``max_prompt_tokens``.
    """
    sampling = sampling_params(config, policy.stop_ids)
    requests = []
    for task in asked:
        tokens = encode_task(policy, task)
        if not 0 < len(tokens) <= config.max_prompt_tokens:
            raise DataError(
                f"{task.id}: the prompt has {len(tokens)} tokens; expected between 1 and "
                f"max_prompt_tokens ({config.max_prompt_tokens})"
            )
        for sample in range(config.samples):
            seed = request_seed(config.seed, task.id, 0, sample, 0)
            requests.append(Request(tokens, sampling, seed, adapter=len(policy.adapters)))
    longest = max(len(request.tokens) for request in requests) + config.max_completion_tokens
    slots = min(config.slots, max(SMALLEST_BATCH, len(requests)))
    with Engine(
        policy.config,
        policy.params,
        adapters=policy.adapters,
        slots=slots,
        max_positions=longest,
    ) as engine:
        return engine.generate_sync(requests)


@contextlib.contextmanager
def writer(path: str | None) -> Iterator[Any]:
    """Yield a function that writes one line to a file, or to standard output.

    Raises:
        RunError: the file cannot be written.
    """
    if path is None:
        yield lambda text: print(text, file=sys.stdout, flush=True)
        return
    try:
        with open(Path(path).expanduser(), "w", encoding="utf-8") as file:
            yield lambda text: file.write(text + "\n")
    except OSError as error:
        raise RunError(f"output: {path} cannot be written: {error.strerror or error}") from None


def _row(task: Task, sample: int, text: str, done: Completion) -> str:
    row = {
        "id": task.id,
        "sample": sample,
        "text": text,
        "finish_reason": done.finish_reason,
        "completion_tokens": len(done.tokens),
    }
    return json.dumps(row, ensure_ascii=False)
