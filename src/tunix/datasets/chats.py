"""Supervised rows: chats, or prompt and completion, to token ids with the trained tokens marked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32

from tunix.datasets.jsonl import field_of
from tunix.errors import ConfigError, DataError, nearest
from tunix.models.policy import Policy, encode_task
from tunix.text.template import TrainedTurns, encode_training_chat
from tunix.text.tokenizer import Tokenizer
from tunix.types import Message, Task

TooLong = Literal["error", "cut", "drop"]
"""What happens to a row over the limit: refuse it, cut its end off, or leave it out; counted."""


@dataclass(frozen=True)
class Example:
    """One supervised row; True in ``action_mask`` marks the tokens that are trained."""

    tokens: Int32[np.ndarray, " length"]
    action_mask: Bool[np.ndarray, " length"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold a row's parts.

    Raises:
        ConfigError: two of them are the same.
    """

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    tools: str = "tools"

    def __post_init__(self) -> None:
        names = asdict(self)
        for column, count in Counter(names.values()).items():
            if count > 1:
                fields = ", ".join(f"{part}_field" for part in names if names[part] == column)
                raise ConfigError(f"{fields}: {column!r}; expected a column of its own for each")


@dataclass(frozen=True)
class RowEncoder:
    """Turns a row into token ids, the same at every call: rows are encoded whenever drawn."""

    policy: Policy
    max_tokens: int
    too_long: TooLong
    columns: Columns = Columns()
    trained_turns: TrainedTurns = "all"

    def encode(self, row: dict[str, Any], where: str) -> Example:
        """Encode a row of any length.

        A chat is rendered with the template and its assistant's turns trained, end-of-turn tokens
        included. Prompt and completion become a two-message chat where there is a template; without
        one the completion's ids follow the prompt's, and the tokenizer's EOS follows them.

        Raises:
            DataError: a row without these fields, with an unknown role or without an assistant's
                message, one that the template can't render; names ``where``.
        """
        try:
            example = self._encode(row, where)
        except DataError as error:
            text = str(error)
            raise DataError(text if text.startswith(where) else f"{where}: {text}") from None
        example.action_mask[:1] = False  # nothing stands before it from which it could follow
        if not example.action_mask.any():
            raise DataError(f"{where}: it holds no token to train on")
        return example

    def fit(self, example: Example, where: str) -> Example | None:
        """Bring an example within ``max_tokens``; None where it is dropped.

        Raises:
            DataError: it is too long, and that is an error.
        """
        length = len(example.tokens)
        if length <= self.max_tokens:
            return example
        if self.too_long == "error":
            raise DataError(
                f"{where}: {length} tokens, more than max_tokens ({self.max_tokens}); raise it, or "
                "set too_long to cut or drop"
            )
        short = Example(example.tokens[: self.max_tokens], example.action_mask[: self.max_tokens])
        return short if self.too_long == "cut" and short.action_mask.any() else None

    def _encode(self, row: dict[str, Any], where: str) -> Example:
        policy, tokenizer = self.policy, self.policy.tokenizer
        if tokenizer is None:
            raise DataError("the model has no tokenizer")
        chat, tools = self._chat(row, where), _tools(row.get(self.columns.tools))
        if tokenizer.chat_template is not None or row.get(self.columns.messages) is not None:
            marked = encode_training_chat(
                tokenizer, chat, policy.stop_ids, tools, self.trained_turns, policy.now
            )
            return Example(*marked)
        if tools:
            raise DataError("tools need a chat template, and this tokenizer has none")
        asked = encode_task(policy, Task(where, text=chat[0]["content"]))
        if not asked:
            raise DataError("the prompt is empty")
        answered = tokenizer.encode(chat[1]["content"])
        if tokenizer.eos_id is not None:
            answered.append(tokenizer.eos_id)
        tokens = np.array(asked + answered, np.int32)
        return Example(tokens, np.arange(len(tokens)) >= len(asked))

    def _chat(self, row: dict[str, Any], where: str) -> list[Message]:
        columns = self.columns
        if row.get(columns.messages) is not None:
            messages = row[columns.messages]
            if not isinstance(messages, list) or not messages:
                raise DataError(f"{columns.messages}: expected a list of chat messages")
            return messages
        if columns.prompt not in row and columns.completion not in row:
            names = (columns.messages, columns.prompt, columns.completion)
            near = next(filter(None, (nearest(name, row) for name in names)), "")
            raise DataError(
                f"no field {names[0]!r}, nor {names[1]!r} and {names[2]!r}; it has "
                f"{sorted(row)}{near}"
            )
        prompt = field_of(row, columns.prompt, where)
        completion = field_of(row, columns.completion, where)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError(f"{columns.prompt} and {columns.completion}: expected texts")
        return [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools are a list of descriptions, or the JSON text of one (all a Parquet column may hold)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"tools: not JSON ({error})") from None
    if value is not None and not (
        isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    ):
        raise DataError(f"tools: expected a list of tool descriptions, got {value!r:.80}")
    return value


def marked_text(tokenizer: Tokenizer, example: Example, most: int = 120) -> str:
    """Show an example in one line, trained tokens within ``[[`` and ``]]``.

    Of a stretch of more than ``most`` characters the middle is left out.
    """
    edges = np.flatnonzero(np.diff(example.action_mask)) + 1
    parts = []
    for ids, mask in zip(
        np.split(example.tokens, edges), np.split(example.action_mask, edges), strict=True
    ):
        text = tokenizer.decode(ids).replace("\n", "\\n")
        if len(text) > most:
            text = f"{text[: most // 2]} … {text[-most // 2 :]}"
        parts.append(f"[[{text}]]" if mask[0] else text)
    if len(parts) > 12:
        parts = [*parts[:6], " … ", *parts[-6:]]
    return "".join(parts)
