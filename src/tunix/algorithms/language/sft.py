"""Supervised fine-tuning: maximum likelihood of the assistant's tokens.

The loss of an update is the mean over all trained tokens t of all its rows of

    -log π(y_t | x, y_<t)

so every token counts the same, whatever row it stands in (token mean; Ouyang et al. 2022,
InstructGPT, arXiv 2203.02155, section 3.5). The end-of-turn token is trained like any other, prompt
and template tokens are not. ``perplexity`` is exp of that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Array, Float
from pydantic import Field
from pydantic.dataclasses import dataclass

from tunix.config import STRICT, NonNegativeInt, PositiveInt, TrainingConfig
from tunix.datasets.batch import Batch, pack, row_length
from tunix.datasets.batch import Sequence as PackedSequence
from tunix.datasets.chats import Columns, Example, RowEncoder, TooLong
from tunix.datasets.examples import Examples, describe, first_row, hold_out, survey_rows
from tunix.datasets.order import ShuffledOrder
from tunix.datasets.rows import ListedRows, Rows, open_rows
from tunix.environments.verifiable import BUILT_IN
from tunix.errors import ConfigError
from tunix.losses.aggregate import token_weights
from tunix.models.policy import Policy, load_policy
from tunix.text.template import TrainedTurns
from tunix.training.learner import PolicyOutputs, Sums
from tunix.training.loop import Observer, Run, TrainingRun
from tunix.training.run_folder import RunFolder

MOST_HELD_OUT = 256
"""Rows of ``data`` that are held out at most; also how many are evaluated at once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    data: list[str] | str | None = None
    """Files (.jsonl, .parquet), globs, or a built-in task: chats, or prompt and completion."""
    messages_field: str = Columns.messages
    """Column that holds a chat: a list of messages with role, content, perhaps tool_calls."""
    prompt_field: str = Columns.prompt
    """Column that holds a prompt, where a row has no chat."""
    completion_field: str = Columns.completion
    """Column that holds the completion of prompt_field."""
    tools_field: str = Columns.tools
    """Column that holds the tools a chat may call, as a list or its JSON; may be absent."""
    trained_turns: TrainedTurns = "all"
    """The assistant's turns of a chat that are trained: all, or the last only."""
    evaluation_data: list[str] | str | None = None
    """Files or globs of held-out rows; unset means a share of data."""
    evaluation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of data held out where evaluation_data is unset; at most 256 rows, 0 for none."""
    evaluation_interval: NonNegativeInt = 50
    """Steps between evaluations; 0 means only before the first and after the last step."""
    batch_size: PositiveInt = 32
    """Rows in an optimizer update."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    steps: PositiveInt | None = None
    """Optimizer updates; unset means as many as the epochs need."""
    max_tokens: PositiveInt = 1024
    """Longest row."""
    too_long: TooLong = "drop"
    """Rows over max_tokens: error, cut their end, or drop them; cuts and drops are counted."""


def loss(outputs: PolicyOutputs, batch: Batch) -> tuple[Float[Array, "rows length"], Sums]:
    """Negative log-likelihood of each token, ``[rows, length]``."""
    return -outputs.logprobs, {}


def train(
    config: SFTConfig,
    *,
    policy: Policy | None = None,
    data: Iterable[dict[str, Any]] | None = None,
    observers: Sequence[Observer] = (),
) -> Run:
    """The whole loop: take ``batch_size`` rows → pack → update → log.

    What is None comes from the config.

    Raises:
        ConfigError, DataError, ModelError: before anything is computed.
        RunError: the run cannot go on; its state is saved.
    """
    columns = columns_of(config)
    with RunFolder.open(config.run_folder, "sft", config, config.resume) as folder:
        rows = find_rows(config, data)
        policy = replace(policy or load_policy(config.model, config.dtype), now=folder.begun)
        encoder = RowEncoder(
            policy, config.max_tokens, config.too_long, columns, config.trained_turns
        )
        training, held_out, report = split(config, rows, encoder)
        whole = config.epochs * len(training)
        steps = config.steps or math.ceil(whole / config.batch_size)
        run = TrainingRun(
            folder=folder,
            config=config,
            policy=policy,
            loss=loss,
            total_steps=steps,
            total_updates=steps,
            temperature=1.0,
            score="loss",
            sign=-1,
            observers=observers,
            evaluation_interval=config.evaluation_interval,
        )
        if len(held_out):
            run.evaluate = lambda: (evaluate(run, held_out, config), [])
        with run:
            for line in report:
                run.tell(line)
            order = ShuffledOrder(len(training), config.seed)
            for step in run.steps():
                drawn = positions(config, step, whole)
                with run.spans("pack"):
                    batch = pack_examples([training[order[i][0]] for i in drawn], config)
                run.update(batch)
                real = int((batch.segment_ids > 0).sum())
                run.finish_step({"epoch": drawn.stop / len(training)}, real)
            return run.result()


def pack_examples(examples: Sequence[Example], config: SFTConfig) -> Batch:
    """Pack the rows of one update, each trained token with the same weight."""
    counts = np.array([int(e.action_mask.sum()) for e in examples])
    weights = token_weights(counts, "token_mean", 1.0)
    sequences = [
        PackedSequence(e.tokens, e.action_mask, np.full(len(e.tokens), weight))
        for e, weight in zip(examples, weights, strict=True)
    ]
    longest = max(len(e.tokens) for e in examples)
    return pack(sequences, row_length(longest, config.micro_batch_tokens))


def positions(config: SFTConfig, step: int, whole: int) -> range:
    """Return the places in the order that a step draws; ``whole`` of them are all epochs.

    Without ``steps`` the last batch may be short: no row is lost and none comes once too often.
    With ``steps`` the order goes on into further passes, so every batch is full.
    """
    start, end = step * config.batch_size, (step + 1) * config.batch_size
    return range(start, min(end, whole) if config.steps is None else end)


def evaluate(run: TrainingRun, held_out: Examples, config: SFTConfig) -> dict[str, float]:
    """Loss (nats a trained token) and perplexity over held-out rows."""
    total, count = 0.0, 0
    for start in range(0, len(held_out), MOST_HELD_OUT):
        part = range(start, min(start + MOST_HELD_OUT, len(held_out)))
        batch = pack_examples([held_out[i] for i in part], config)
        logprobs = run.learner.logprobs(batch)[batch.action_mask]
        total, count = total + float(logprobs.astype(np.float64).sum()), count + len(logprobs)
    mean = -total / count
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "rows": float(len(held_out))}


def columns_of(config: SFTConfig) -> Columns:
    """Return the columns a row's parts are read from.

    Raises:
        ConfigError: one column for two parts.
    """
    return Columns(
        messages=config.messages_field,
        prompt=config.prompt_field,
        completion=config.completion_field,
        tools=config.tools_field,
    )


def find_rows(config: SFTConfig, data: Iterable[dict[str, Any]] | None) -> Rows:
    """Open the rows to train on: those given, a built-in task's, or those of files."""
    if data is not None:
        return ListedRows(list(data), "row")
    name = config.data
    if name is None:
        raise ConfigError("data: not set; expected files or the name of a built-in task")
    if isinstance(name, str) and name in BUILT_IN and not Path(name).exists():
        if columns_of(config) != Columns():
            raise ConfigError(f"data: the built-in {name!r} has fixed columns; map none")
        return ListedRows(BUILT_IN[name].demonstrations(20_000, config.seed), name)
    return open_rows(name)


def split(
    config: SFTConfig, rows: Rows, encoder: RowEncoder
) -> tuple[Examples, Examples, list[str]]:
    """Survey the rows; return those to train on, those held out, and lines that describe them.

    Held-out rows come from ``evaluation_data``, or else are a random share of ``rows``.
    """
    survey = survey_rows(rows, encoder)
    report = [f"data: {describe(survey, encoder)}"]
    if config.evaluation_data is not None:
        training = Examples(rows, encoder, survey, np.flatnonzero(survey.trained))
        others = open_rows(config.evaluation_data)
        found = survey_rows(others, encoder)
        held_out = Examples(others, encoder, found, np.flatnonzero(found.trained))
        report.append(f"held-out data: {describe(found, encoder)}")
    else:
        chosen = hold_out(survey, config.evaluation_fraction, MOST_HELD_OUT, config.seed)
        training, held_out = (Examples(rows, encoder, survey, indices) for indices in chosen)
        copies = int((survey.trained > 0).sum()) - len(training) - len(held_out)
        left_out = f"; copies of them left out: {copies}" if copies else ""
        report.append(f"held out: {len(held_out)} rows{left_out}")
    report.append(f"first row, [[trained]]: {first_row(training)}")
    return training, held_out, report
