"""What is trained of chats with tools, of the last turn only, and by templates that misbehave."""

import datetime
import string

import numpy as np
import pytest

from tunix.errors import DataError
from tunix.text.template import encode_training_chat, render
from tunix.text.tokenizer import Tokenizer

END = 2
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ '<|' + m.role + '|>' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ eos_token }}\n\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = [
    {"role": "system", "content": "use tools"},
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "it is 3"},
]
DROPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|{{ m.role }}|>{% if m.reasoning_content and loop.index0 > ns.last %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REASONED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "r"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "s"},
]


def tokenizer_of(template):
    return Tokenizer.characters(string.printable, chat_template=template)


def trained(template, chat, *more):
    """The trained runs as texts."""
    tokenizer = tokenizer_of(template)
    tokens, mask = encode_training_chat(tokenizer, chat, {END}, *more)
    edges = np.flatnonzero(np.diff(mask)) + 1
    runs = zip(np.split(tokens, edges), np.split(mask, edges), strict=True)
    return [tokenizer.decode(ids) for ids, marks in runs if marks[0]]


def test_calls_are_trained_and_what_tools_say_is_not():
    """Both assistant turns with their ends; not the tool's 3, nor the lines after an end."""
    call = '{"name": "add", "arguments": {"a": 1}}<|end|>'
    assert trained(TOOLS_TEMPLATE, CHAT, TOOLS) == [call, "it is 3<|end|>"]
    assert trained(TOOLS_TEMPLATE, CHAT, TOOLS, "last") == ["it is 3<|end|>"]


def test_tools_of_the_row_are_in_its_prompt():
    tokenizer = tokenizer_of(TOOLS_TEMPLATE)
    tokens, _ = encode_training_chat(tokenizer, CHAT, {END}, TOOLS)
    text = tokenizer.decode(tokens)
    assert text == render(tokenizer, CHAT, add_generation_prompt=False, tools=TOOLS)
    assert text.startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("chat", "tools", "name"), [(CHAT[:2] + CHAT[4:], TOOLS, "tools"), (CHAT, None, "tool_calls")]
)
def test_what_the_template_leaves_out_is_refused(chat, tools, name):
    """Else an answer of nothing would be trained in the place of the call."""
    plain = TOOLS_TEMPLATE.replace("tool_calls", "nothing").replace("tools", "nothing")
    with pytest.raises(DataError, match=f"has {name}, which the chat template does not write"):
        trained(plain, chat, tools)


def test_dropped_reasoning_allows_the_last_turn_only():
    with pytest.raises(DataError, match=r"drop earlier reasoning.*trained_turns: last"):
        trained(DROPS_REASONING, REASONED)
    assert trained(DROPS_REASONING, REASONED, None, "last") == ["(s)d<|end|>"]


BLOCK = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
BLOCKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}BLOCK"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_of_marked_turns_the_last_can_be_trained_alone():
    template = BLOCKS.replace("BLOCK", BLOCK)
    assert trained(template, REASONED) == ["b<|end|>", "d<|end|>"]
    assert trained(template, REASONED, None, "last") == ["d<|end|>"]


def test_a_turn_without_its_block_is_not_passed_over():
    some = "{% if loop.last %}" + BLOCK + "{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    with pytest.raises(DataError, match="mark 1 of 2 assistant messages"):
        trained(BLOCKS.replace("BLOCK", some), REASONED)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "loops run over more than 1000000 items",
        ),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 16777216 characters"),
        ("{{ 'x' * 10**10 }}", r"result of \* is too large"),
        ("{{ 9**9999 }}", r"result of \*\* is too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ lipsum(n=9999999) }}", "lipsum"),
    ],
)
def test_a_template_without_end_is_refused(template, message):
    with pytest.raises(DataError, match=f"the chat template refused the conversation: .*{message}"):
        trained(template, CHAT)


def test_ordinary_arithmetic_is_left_alone():
    text = render(
        tokenizer_of("{{ '-' * 3 }}{{ 2**5 }}{{ 9000 * 9000 }}{{ range(3) | list }}"),
        CHAT,
        add_generation_prompt=False,
    )
    assert text == "---3281000000[0, 1, 2]"


def test_a_template_sees_the_given_time():
    dated = "{{ strftime_now('%Y-%m-%d') }}" + BLOCKS.replace("BLOCK", BLOCK)
    tokenizer = tokenizer_of(dated)
    now = datetime.datetime(2001, 2, 3)
    tokens, _ = encode_training_chat(tokenizer, REASONED, {END}, now=now)
    assert tokenizer.decode(tokens).startswith("2001-02-03")
