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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Array, Float
from pydantic import Field
from pydantic.dataclasses import dataclass

from tunix.config import STRICT, NonNegativeInt, PositiveInt, TrainingConfig
from tunix.datasets.batch import Batch, pack, row_length
from tunix.datasets.batch import Sequence as PackedSequence
from tunix.datasets.chats import Example, TooLong, encode_rows
from tunix.datasets.jsonl import read_jsonl
from tunix.datasets.order import ShuffledOrder
from tunix.environments.verifiable import BUILT_IN
from tunix.errors import ConfigError
from tunix.losses.aggregate import token_weights
from tunix.models.policy import Policy, load_policy
from tunix.training.learner import PolicyOutputs, Sums
from tunix.training.loop import Observer, Run, TrainingRun
from tunix.training.run_folder import RunFolder

Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    data: str | None = None
    """JSONL file of chats (messages) or of prompt and completion, or a built-in task's name."""
    evaluation_data: str | None = None
    """JSONL file of held-out rows; unset means a share of data."""
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
    """What happens to a row over max_tokens; error, cut its end, or drop. Both are counted."""


def loss(outputs: PolicyOutputs, batch: Batch) -> tuple[Float[Array, "rows length"], Sums]:
    """Negative log-likelihood of each token, ``[rows, length]``."""
    return -outputs.logprobs, {}


def train(
    config: SFTConfig,
    *,
    policy: Policy | None = None,
    data: Rows | None = None,
    observers: Sequence[Observer] = (),
) -> Run:
    """The whole loop: take ``batch_size`` rows → pack → update → log.

    What is None comes from the config.

    Raises:
        ConfigError, DataError, ModelError: before anything is computed.
        RunError: the run cannot go on; its state is saved.
    """
    with RunFolder.open(config.run_folder, "sft", config, config.resume) as folder:
        rows = named_rows(config, data)
        policy = policy or load_policy(config.model, config.dtype)
        encoded = encode_rows(policy, rows, config.max_tokens, config.too_long)
        training, held_out = hold_out(config, policy, encoded.examples)
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
        run.evaluate = (lambda: (evaluate(run, held_out, config), [])) if held_out else None
        with run:
            if encoded.cut or encoded.dropped:
                over = f"{encoded.cut} cut, {encoded.dropped} dropped"
                run.tell(f"rows over {config.max_tokens} tokens: {over}")
            order = ShuffledOrder(len(training), config.seed)
            for step in run.steps():
                start, end = step * config.batch_size, (step + 1) * config.batch_size
                if config.steps is None:
                    end = min(end, whole)  # the last batch may be short: no row comes twice
                with run.spans("pack"):
                    batch = pack_examples(
                        [training[order[i][0]] for i in range(start, end)], config
                    )
                run.update(batch)
                real = int((batch.segment_ids > 0).sum())
                run.finish_step({"epoch": end / len(training)}, real)
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


def evaluate(run: TrainingRun, held_out: Sequence[Example], config: SFTConfig) -> dict[str, float]:
    """Loss (nats a trained token) and perplexity over held-out rows."""
    batch = pack_examples(held_out, config)
    logprobs = run.learner.logprobs(batch)
    mean = -float(logprobs[batch.action_mask].astype(np.float64).mean())
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "rows": float(len(held_out))}


def named_rows(config: SFTConfig, data: Rows | None) -> list[tuple[str, dict[str, Any]]]:
    """Read the rows, each with the place that an error about it names."""
    if data is not None:
        return [(f"row {i}", row) for i, row in enumerate(data)]
    if config.data is None:
        raise ConfigError("data: not set; expected a JSONL file or the name of a built-in task")
    if config.data in BUILT_IN and not Path(config.data).exists():
        made = BUILT_IN[config.data].demonstrations(20_000, config.seed)
        return [(f"{config.data} {i}", row) for i, row in enumerate(made)]
    return [(f"{config.data}:{line}", row) for line, row in read_jsonl(config.data)]


def hold_out(
    config: SFTConfig, policy: Policy, examples: list[Example]
) -> tuple[list[Example], list[Example]]:
    """Split off held-out rows, or read them from ``evaluation_data``.

    Rows with equal tokens stay on one side, so nothing evaluated was trained on.
    """
    if config.evaluation_data is not None:
        rows = [(f"{config.evaluation_data}:{n}", r) for n, r in read_jsonl(config.evaluation_data)]
        return examples, encode_rows(policy, rows, config.max_tokens, config.too_long).examples
    room = min(256, int(config.evaluation_fraction * len(examples)))
    shuffled = np.random.default_rng(config.seed).permutation(len(examples))
    keys = [e.tokens.tobytes() for e in examples]
    chosen = {keys[i] for i in shuffled[:room]}
    training = [e for e, key in zip(examples, keys, strict=True) if key not in chosen]
    if not training:
        return examples, []
    return training, [examples[i] for i in shuffled[:room]]
