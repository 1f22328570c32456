"""``tunix generate``: let a model answer a prompt, or each row of a JSONL file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from tunix.cli.resumable import COMPLETIONS, rows_done
from tunix.config import STRICT, BatchSamplingConfig, NonNegativeInt, PositiveInt
from tunix.datasets.jsonl import field_of
from tunix.datasets.rows import open_rows
from tunix.datasets.tasks import as_messages
from tunix.errors import ConfigError, DataError, RunError
from tunix.inference.engine import Engine
from tunix.inference.request import Completion, Request, derived_seed, sampling_params
from tunix.models.policy import Policy, answer_text, encode_task, load_policy
from tunix.types import Message, Task

SMALLEST_BATCH = 8
"""Fewer slots save nothing: the engine never runs fewer rows."""

AHEAD = 4
"""Rows under way for each slot: answers are written in order, so short ones wait for long ones."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateConfig(BatchSamplingConfig):
    """Let a model answer prompts."""

    model: str
    """Hugging Face folder, PEFT adapter folder, .gguf file, or package:NAME that ships one."""
    prompt: str | None = None
    """The prompt, as one user message; its answers are printed as plain text."""
    input: str | None = None
    """JSONL or Parquet file of prompts, or a glob; rows come back with answers in `completions`."""
    prompt_field: str = "prompt"
    """Column of input that holds the prompt, a text or a list of chat messages; else `messages`."""
    system: str | None = None
    """System message put before each prompt."""
    samples: PositiveInt = 1
    """Answers to each prompt."""
    output: str | None = None
    """File for the answers; one made from input is gone on with where it ends. Unset: printed."""
    seed: NonNegativeInt = 0
    """Fixes the answers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and computation."""


class Prompt(NamedTuple):
    """A prompt: where it stands, its row as it was read, and the messages it means."""

    where: str
    row: dict[str, Any]
    messages: list[Message]


def run(config: GenerateConfig) -> None:
    """Answer the prompts of ``config`` and write the answers in their order.

    Raises:
        ConfigError, DataError, ModelError: before anything is generated: neither or both of prompt
            and input, a row without prompt or with one that is too long, a file that cannot be
            read, an output that was made otherwise.
        RunError: the output cannot be written.
    """
    asked = prompts(config)
    policy = load_policy(config.model, config.dtype)
    longest = max(len(encode(policy, prompt, config)) for prompt in asked)
    resumable = config.input is not None and config.output is not None
    with writer(config.output, append=resumable) as write:
        done = 0
        if resumable:
            done = rows_done(Path(str(config.output)).expanduser(), config, policy, asked)
        if done:
            print(f"{config.output}: {done} of {len(asked)} rows are there", file=sys.stderr)
        if done == len(asked):
            return
        sequences = (len(asked) - done) * config.samples
        longest += config.max_completion_tokens
        with open_engine(policy, config.slots, sequences, longest) as engine:
            asyncio.run(_answer(engine, policy, asked, done, config, write))


def prompts(config: GenerateConfig) -> list[Prompt]:
    """Return the prompts that ``config`` names.

    Raises:
        ConfigError: neither or both of ``prompt`` and ``input``.
        DataError: the file cannot be used; names file and line.
    """
    if (config.prompt is None) == (config.input is None):
        raise ConfigError("prompt, input: expected exactly one of the two")
    if config.input is None:
        return [Prompt("prompt", {}, as_messages(config.prompt, config.system, "prompt"))]
    found = []
    rows = open_rows(config.input)
    for i in range(len(rows)):
        row, where, name = rows[i], rows.where(i), config.prompt_field
        if name not in row and "messages" in row:
            name = "messages"
        if COMPLETIONS in row:
            raise DataError(f"{where}: field {COMPLETIONS!r} is where the answers go; rename it")
        value = field_of(row, name, where)
        messages = as_messages(value, config.system, f"{where}: field {name!r}")
        found.append(Prompt(where, row, messages))
    return found


def encode(policy: Policy, prompt: Prompt, config: GenerateConfig) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        DataError: it cannot be rendered, is empty, or too long for ``config`` or the model.
    """
    tokens = encode_task(policy, Task(prompt.where, messages=prompt.messages))
    context, answer = policy.config.max_positions, config.max_completion_tokens
    limit, room = config.max_prompt_tokens, context - answer
    if not 0 < len(tokens) <= min(limit, room):
        most = f"max_prompt_tokens ({limit})"
        if room < limit:
            most = f"{room}: the model's context ({context}) less max_completion_tokens ({answer})"
        raise DataError(
            f"{prompt.where}: the prompt has {len(tokens)} tokens; expected between 1 and {most}"
        )
    return tokens


def open_engine(policy: Policy, slots: int, sequences: int, longest: int) -> Engine:
    """Make an engine for ``sequences`` in all, of at most ``longest`` tokens each."""
    return Engine(
        policy.config,
        policy.params,
        adapters=policy.adapters,
        slots=min(slots, max(SMALLEST_BATCH, sequences)),
        max_positions=longest,
        tokenizer=policy.tokenizer,
    )


@contextlib.contextmanager
def writer(path: str | None, append: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes one line, at once, to a file or to standard output.

    Raises:
        RunError: the file cannot be written.
    """
    if path is None:
        yield lambda text: print(text, flush=True)
        return
    try:
        with open(Path(path).expanduser(), "a" if append else "w", encoding="utf-8") as file:
            yield lambda text: print(text, file=file, flush=True)
    except OSError as error:
        raise RunError(f"output: {path} cannot be written: {error.strerror or error}") from None


async def _answer(
    engine: Engine,
    policy: Policy,
    asked: Sequence[Prompt],
    done: int,
    config: GenerateConfig,
    write: Callable[[str], None],
) -> None:
    """Answer the prompts from number ``done`` on; write each as soon as those before it are."""
    sampling = sampling_params(config, policy.stop_ids)

    async def answer(number: int) -> list[Completion]:
        tokens = encode(policy, asked[number], config)
        request = Request(
            tokens, sampling, derived_seed(config.seed, number), adapter=engine.adapters
        )
        return await asyncio.gather(*map(engine.generate, request.samples(config.samples)))

    async def finish(number: int, completions: asyncio.Task[list[Completion]]) -> None:
        rows = [
            {
                "text": answer_text(policy, c.tokens, sampling.stop, sampling.include_stop),
                "finish_reason": c.finish_reason,
                "completion_tokens": len(c.tokens),
            }
            for c in await completions
        ]
        if config.input is None:
            write("\n".join(str(row["text"]) for row in rows))
        else:
            write(json.dumps(asked[number].row | {COMPLETIONS: rows}, ensure_ascii=False))

    running: deque[tuple[int, asyncio.Task[list[Completion]]]] = deque()
    for number in range(done, len(asked)):
        running.append((number, asyncio.create_task(answer(number))))
        if len(running) >= AHEAD * config.slots:
            await finish(*running.popleft())
    while running:
        await finish(*running.popleft())
