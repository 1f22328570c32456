"""Chat templates: messages to text to ids, and which of those ids the assistant wrote.

The rendering is that of ``transformers`` (``utils/chat_template_utils.py``, version 5.24), so a
conversation has the same ids here, there and in every server built on it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32

from tunix.errors import DataError, nearest
from tunix.text.sandbox import (
    MARKED,
    MAX_CHARACTERS,
    TEMPLATE_ERRORS,
    LimitedRange,
    compile_template,
)
from tunix.text.tokenizer import Tokenizer
from tunix.types import Message

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""Roles a message may have; what a template does with each of them is the template's matter."""

_REASONING = ("reasoning_content", "thinking", "reasoning")

TrainedTurns = Literal["all", "last"]
"""Which of the assistant's turns are trained."""

Span = tuple[int, int]
"""Characters ``[start, end)`` of a rendered conversation."""


def render(
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """Render a conversation with the tokenizer's chat template.

    ``now`` is the time that a template which writes the date sees; None is that of the call.

    Raises ``DataError`` for a conversation that is malformed, has an unknown role, or that the
    template refuses, and where there is no template.
    """
    return _render(tokenizer, messages, add_generation_prompt, tools, now)[0]


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Render and encode a conversation.

    The template alone writes BOS, so it never doubles. ``now`` and errors as in ``render``.
    """
    return tokenizer.encode(_render(tokenizer, messages, add_generation_prompt, tools, now)[0])


def encode_training_chat(
    tokenizer: Tokenizer,
    messages: list[Message],
    stop_ids: Collection[int],
    tools: list[dict[str, Any]] | None = None,
    trained_turns: TrainedTurns = "all",
    now: datetime.datetime | None = None,
) -> tuple[Int32[np.ndarray, " length"], Bool[np.ndarray, " length"]]:
    """Encode a conversation once and mark the tokens that the assistant produced.

    Returns ``tokens`` and ``action_mask`` (True where the assistant wrote the token). Each of its
    turns (or only the last one) is marked from behind the role header up to and with its last token
    of ``stop_ids``; what the template writes behind that (a newline) is not. A turn's tool calls
    are the assistant's, the tools' answers are not. Turns are found by the template's
    ``{% generation %}`` blocks or, without any, by rendering the conversation up to each turn.
    ``now`` is the time that a template which writes the date sees; None is that of the call.

    Raises ``DataError``, besides the cases of ``render``, where no message is the assistant's,
    where the template leaves out tool calls or tools, and where a turn can't be located exactly:
    the template rewrites earlier messages or its header, a token spans header and answer, or no
    end-of-turn token follows (from such a row the policy could not learn to stop). There is no
    silent fallback to a mask of all or nothing.
    """
    text, spans = _render(tokenizer, messages, False, tools, now)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant message to train on")
    _check_tools(tokenizer, messages, tools)
    wanted = turns if trained_turns == "all" else turns[-1:]
    if not spans:
        spans = [_turn_span(tokenizer, messages, turn, text, tools, now) for turn in wanted]
    elif trained_turns == "last":
        before = _render(tokenizer, messages[: turns[-1]], True, tools, now)[0]
        spans = [span for span in spans if text.startswith(before) and span[1] > len(before)]
    if len(spans) < len(wanted):
        raise DataError(
            f"the chat template's {{% generation %}} blocks mark {len(spans)} of {len(wanted)} "
            "assistant messages that are to be trained"
        )
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        _mark(mask, ids, offsets, span, text, stop_ids)
    return np.array(ids, dtype=np.int32), mask


def _check_tools(
    tokenizer: Tokenizer, messages: list[Message], tools: list[dict[str, Any]] | None
) -> None:
    """Refuse what the template would leave out without a word, so that nothing is trained wrong."""
    source = tokenizer.chat_template or ""
    given = {"tools": bool(tools), "tool_calls": any(m.get("tool_calls") for m in messages)}
    for name, present in given.items():
        if present and re.search(rf"\b{name}\b", source) is None:
            raise DataError(f"the conversation has {name}, which the chat template does not write")


def _mark(
    mask: np.ndarray,
    ids: list[int],
    offsets: list[Span],
    span: Span,
    text: str,
    stop_ids: Collection[int],
) -> None:
    """Set the mask of one turn: from the span's first token to its last stop token."""
    start, end = span
    first = next((i for i, (_, stop) in enumerate(offsets) if stop > start), len(ids))
    if first < len(ids) and offsets[first][0] < start:
        low, high = offsets[first]
        raise DataError(
            f"the token {text[low:high]!r} holds both the template's header and the beginning of "
            f"the assistant's text {text[start : start + 20]!r}; remove leading white space from it"
        )
    behind = next((i for i in range(first, len(ids)) if offsets[i][0] >= end), len(ids))
    # A block that leaves its end-of-turn token outside is followed by it directly.
    limit = behind + 1 if behind < len(ids) and ids[behind] in stop_ids else behind
    last = next((i for i in reversed(range(first, limit)) if ids[i] in stop_ids), None)
    if last is None:
        raise DataError(
            f"no end-of-turn token (ids {sorted(stop_ids)}) follows the assistant's text "
            f"{text[start:end][-40:]!r}: the chat template writes none there, so nothing would "
            "teach the policy to stop"
        )
    mask[first : last + 1] = True


def _turn_span(
    tokenizer: Tokenizer,
    messages: list[Message],
    turn: int,
    text: str,
    tools: list[dict[str, Any]] | None,
    now: datetime.datetime | None,
) -> Span:
    """Locate an assistant message by rendering what comes before it, and that with it."""
    before = _render(tokenizer, messages[:turn], True, tools, now)[0]
    through = _render(tokenizer, messages[: turn + 1], False, tools, now)[0]
    if not (text.startswith(before) and text.startswith(through) and len(before) < len(through)):
        raise DataError(
            f"cannot locate the assistant's message {turn} in the rendered conversation: the chat "
            "template does not extend the prompt text from turn to turn (some drop earlier "
            "reasoning); train the last turn only (trained_turns: last), or use a template with "
            "{% generation %} blocks around the assistant's text"
        )
    return len(before), len(through)


def _render(
    tokenizer: Tokenizer,
    messages: list[Message],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
    now: datetime.datetime | None = None,
) -> tuple[str, list[Span]]:
    """Render, and return the spans of the template's ``{% generation %}`` blocks as well."""
    if tokenizer.chat_template is None:
        raise DataError("messages need a chat template, and this tokenizer has none")
    marked: list[tuple[int, str]] = []
    blocks: list[str] = []
    try:
        template = compile_template(tokenizer.chat_template)
        variables = {
            **tokenizer.special_tokens,
            "messages": [_clean_message(message) for message in messages],
            "tools": _plain(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": LimitedRange(),
            "strftime_now": (now or datetime.datetime.now()).strftime,
            MARKED: (blocks, marked),
        }
        size = 0
        for block in template.generate(variables):
            blocks.append(block)
            size += len(block)
            if size > MAX_CHARACTERS:
                raise OverflowError(f"it writes more than {MAX_CHARACTERS} characters")
    except DataError:
        raise
    except TEMPLATE_ERRORS as error:
        raise DataError(f"the chat template refused the conversation: {error}") from error
    text = "".join(blocks)
    if any(not text.startswith(part, start) for start, part in marked):
        raise DataError(
            "the chat template has a {% generation %} block inside a macro or set block"
        )
    return text, [(start, start + len(part)) for start, part in marked]


def _clean_message(message: Any) -> dict[str, Any]:
    """Check a message and bring it into the form that transformers hands to templates."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"a chat message is an object with a 'role', got {message!r}")
    role = message["role"]
    if role not in KNOWN_ROLES:
        known = ", ".join(KNOWN_ROLES)
        raise DataError(
            f"unknown chat role {role!r}{nearest(str(role), KNOWN_ROLES)} (known: {known})"
        )
    clean = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((clean[key] for key in _REASONING if key in clean), None)
    if reasoning is not None:
        clean = {"thinking": reasoning, **clean, "reasoning_content": reasoning}
    return clean


def _plain(value: Any) -> Any:
    """Rebuild a value of plain JSON types: a template is a stranger's code and sees no objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return f"<{type(value).__name__}>"
