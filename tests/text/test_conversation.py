"""A chat's ids: extended where the template extends the text, rendered anew where it does not."""

import pytest

from tunix.errors import DataError
from tunix.text import template
from tunix.text.conversation import Conversation
from tunix.text.tokenizer import CHARACTER_TEMPLATE, Tokenizer

NEWLINE = CHARACTER_TEMPLATE.replace("+ eos_token }}", "+ eos_token + '?' }}")
"""Writes something behind the end of turn, as ChatML does."""


def rendered(tokenizer, messages):
    return template.encode_chat(tokenizer, messages, add_generation_prompt=True)


def test_what_the_policy_wrote_stays_as_it_was():
    """The special token in the answer is no part of its text; encoding the text would lose it."""
    tokenizer = Tokenizer.characters("abxy?", chat_template=NEWLINE)
    end, odd = tokenizer.eos_id, tokenizer.pad_id
    chat = Conversation(tokenizer, {end}, system="x")
    first = chat.ask("a")
    system = {"role": "system", "content": "x"}
    assert first == rendered(tokenizer, [system, {"role": "user", "content": "a"}])
    assert chat.ask("a") == first  # nothing is kept before it is answered
    wrote = [tokenizer.token_id("b"), odd, end]
    chat.answer(wrote, "b")
    second = chat.ask("y")
    user = [tokenizer.token_id("<|user|>"), tokenizer.token_id("y"), end, tokenizer.token_id("?")]
    separator = [tokenizer.token_id("?")]
    assert second == [*first, *wrote, *separator, *user, tokenizer.token_id("<|assistant|>")]


def test_an_answer_without_its_end_gets_it_from_the_template():
    tokenizer = Tokenizer.characters("ab", chat_template=CHARACTER_TEMPLATE)
    chat = Conversation(tokenizer, {tokenizer.eos_id})
    first = chat.ask("a")
    chat.answer([tokenizer.token_id("b")], "b")  # the limit came first
    assert chat.ask("b")[: len(first) + 2] == [*first, tokenizer.token_id("b"), tokenizer.eos_id]
    chat.answer([], "")  # aborted at once
    assert chat.ask("a") == rendered(tokenizer, [*chat.messages, {"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("form", "wrote", "text"),
    [
        (CHARACTER_TEMPLATE, "abx", "a"),  # cut before the stop string "bx"
        (CHARACTER_TEMPLATE.replace("['content']", "['content'] | trim"), " ab", " ab"),
    ],
)
def test_rendered_anew_where_the_text_is_not_extended(form, wrote, text):
    tokenizer = Tokenizer.characters("abx ", chat_template=form)
    chat = Conversation(tokenizer, {tokenizer.eos_id})
    chat.ask("a")
    chat.answer(tokenizer.encode(wrote), text)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "b"},
    ]
    assert chat.ask("b") == rendered(tokenizer, messages)


def test_no_template_is_said_at_once():
    with pytest.raises(DataError, match="chat template"):
        Conversation(Tokenizer.characters("ab", chat_template=None), {2})
