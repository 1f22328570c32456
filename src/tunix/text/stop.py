"""Where an answer ends: the stop set of ids, resolved once, and stop strings in the text.

With stop strings a completion ends with the first token after which its decoding, special tokens
left out, contains one of them. Its ids stay as they were drawn; its text is ``cut``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tunix.errors import DataError
from tunix.text import template
from tunix.text.detokenize import detokenizer
from tunix.text.tokenizer import Tokenizer

_ANSWER = "tunixanswer"  # a word no template contains


def stop_ids(
    tokenizer: Tokenizer | None,
    generation_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
) -> frozenset[int]:
    """Union of all ids that end a turn; an id of 0 counts like any other.

    They are ``eos_token_id`` (a number or a list) of ``generation_config.json`` and of
    ``config.json``, the tokenizer's EOS, and the token that the chat template writes behind an
    assistant's message.
    """
    found: set[int] = set()
    for config in (generation_config, model_config):
        stated = (config or {}).get("eos_token_id")
        if stated is not None:
            found.update(stated if isinstance(stated, list) else [stated])
    if tokenizer is not None:
        found.update(i for i in (tokenizer.eos_id, end_of_turn_id(tokenizer)) if i is not None)
    return frozenset(found)


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The added token that the chat template writes behind an assistant's message, if any."""
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = template.render(tokenizer, messages, add_generation_prompt=False)
    except DataError:
        return None  # a template for other conversations; the eos ids still count
    _, found, behind = text.rpartition(_ANSWER)
    added = tokenizer.added_tokens
    for token_id in tokenizer.encode(behind) if found else []:
        if token_id in added:
            return token_id
        if tokenizer.decode([token_id]).strip():
            return None  # ordinary text: this template has no end-of-turn token
    return None


def cut(text: str, stop: Sequence[str], include: bool = False) -> str:
    """Cut a text before the stop string that begins first, or behind it with ``include``."""
    found = [(at, at + len(s)) for s in stop if (at := text.find(s)) >= 0]
    if not found:
        return text
    start, end = min(found)
    return text[: end if include else start]


class StopSearch:
    """Looks for stop strings in one stream of tokens; work per token does not grow with it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._stream = detokenizer(tokenizer, skip_special_tokens=True)
        self._stop = stop
        self._reach = max(map(len, stop)) - 1
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Take the next id; return whether the text up to it contains a stop string."""
        text = self._tail + self._stream.push(token_id)
        self._tail = text[max(len(text) - self._reach, 0) :]
        text += self._stream.pending()
        return any(s in text for s in self._stop)


class AnswerStream:
    """The text of an answer as its tokens arrive, never a part of a character or stop string.

    Law: the pieces of ``push`` and ``flush``, joined, are the text of ``models.policy.answer_text``
    for all ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ):
        self._stream = detokenizer(tokenizer, skip_special_tokens=True)
        self._stop_ids, self._stop, self._include = stop_ids, stop, include_stop
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is now certain to stay."""
        if token_id in self._stop_ids:
            return ""
        self._held += self._stream.push(token_id)
        if any(s in self._held for s in self._stop):  # the last token; where to cut, flush knows
            return ""
        beginnings = (s[:size] for s in self._stop for size in range(1, len(s)))
        kept = max((len(b) for b in beginnings if self._held.endswith(b)), default=0)
        certain = self._held[: len(self._held) - kept]
        self._held = self._held[len(certain) :]
        return certain

    def flush(self) -> str:
        """Return what was held back, up to a stop string."""
        return cut(self._held + self._stream.flush(), self._stop, self._include)
