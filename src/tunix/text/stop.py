"""The stop set: every id at which a policy's turn ends, resolved once and used everywhere."""

from __future__ import annotations

from typing import Any

from tunix.errors import DataError
from tunix.text import template
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
