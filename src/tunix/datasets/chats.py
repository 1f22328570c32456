"""Supervised rows: chats, or prompt and completion, to token ids with the trained tokens marked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32

from tunix.datasets.jsonl import field_of
from tunix.errors import DataError
from tunix.models.policy import Policy, encode_task
from tunix.text.template import encode_training_chat
from tunix.types import Task

TooLong = Literal["error", "cut", "drop"]
"""What happens to a row over the limit: refuse it, cut its end off, or leave it out; counted."""


@dataclass(frozen=True)
class Example:
    """One supervised row; True in ``action_mask`` marks the tokens that are trained."""

    tokens: Int32[np.ndarray, " length"]
    action_mask: Bool[np.ndarray, " length"]


@dataclass(frozen=True)
class EncodedRows:
    """The rows that can be trained on, and how many were cut or dropped."""

    examples: list[Example]
    cut: int
    dropped: int


def encode_rows(
    policy: Policy, rows: Iterable[tuple[str, dict[str, Any]]], max_tokens: int, too_long: TooLong
) -> EncodedRows:
    """Encode ``(where, row)`` pairs; a row has ``messages``, or ``prompt`` and ``completion``.

    Raises:
        DataError: a row without these fields or with an unknown role, a chat without an assistant
            message, a row over ``max_tokens`` where that is an error, or no row left; names where.
    """
    examples: list[Example] = []
    cut = dropped = 0
    for where, row in rows:
        try:
            example = encode_row(policy, row, where)
        except DataError as error:
            text = str(error)
            raise DataError(text if text.startswith(where) else f"{where}: {text}") from None
        if len(example.tokens) > max_tokens:
            if too_long == "error":
                raise DataError(
                    f"{where}: {len(example.tokens)} tokens, more than max_tokens ({max_tokens}); "
                    "raise it, or set too_long to cut or drop"
                )
            short = Example(example.tokens[:max_tokens], example.action_mask[:max_tokens])
            if too_long == "drop" or not short.action_mask.any():
                dropped += 1
                continue
            cut += 1
            example = short
        examples.append(example)
    if not examples:
        raise DataError(f"the dataset is empty: no row to train on ({dropped} dropped as too long)")
    return EncodedRows(examples, cut, dropped)


def encode_row(policy: Policy, row: dict[str, Any], where: str) -> Example:
    """Encode one row.

    A chat is rendered with the template and every assistant turn trained, end-of-turn token
    included. Prompt and completion become a two-message chat where there is a template; without
    one the completion's ids follow the prompt's, and the tokenizer's EOS follows them.
    """
    tokenizer = policy.tokenizer
    if tokenizer is None:
        raise DataError(f"{where}: the model has no tokenizer")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: messages: expected a list of chat messages")
        return Example(*encode_training_chat(tokenizer, messages, policy.stop_ids))
    prompt = field_of(row, "prompt", where)
    completion = field_of(row, "completion", where)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise DataError(f"{where}: prompt and completion: expected texts")
    if tokenizer.chat_template is not None:
        chat = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        return Example(*encode_training_chat(tokenizer, chat, policy.stop_ids))
    asked = encode_task(policy, Task(where, text=prompt))
    if not asked:
        raise DataError(f"{where}: the prompt is empty")
    answered = tokenizer.encode(completion)
    if tokenizer.eos_id is not None:
        answered.append(tokenizer.eos_id)
    tokens = np.array(asked + answered, np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(asked))
