"""Rendered text and ids are those of ``transformers`` (golden); masks mark the assistant only."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden.conversations import CONVERSATIONS, TEMPLATES, TOOLS
from tunix.errors import DataError
from tunix.text.stop import stop_ids
from tunix.text.template import encode_chat, encode_training_chat, render
from tunix.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "chats.json").read_text("utf-8"))


@pytest.fixture(params=list(TEMPLATES))
def templated(request, smollm2_tokenizer):
    own = smollm2_tokenizer.chat_template
    smollm2_tokenizer.chat_template = TEMPLATES[request.param] or own
    yield request.param, smollm2_tokenizer
    smollm2_tokenizer.chat_template = own


def test_rendered_chats_equal_transformers(templated):
    name, tokenizer = templated
    for i, chat in enumerate(CONVERSATIONS):
        entry = GOLDEN[f"{name}/{i}"]
        tools = TOOLS if entry["tools"] else None
        for prompt in (True, False):
            golden = entry[f"prompt_{prompt}".lower()]
            options = {"add_generation_prompt": prompt, "tools": tools}
            assert render(tokenizer, chat, **options) == golden["text"]
            assert encode_chat(tokenizer, chat, **options) == golden["ids"]


def test_masks_mark_each_answer_with_its_end(templated):
    """Without markers: the marked runs decode to the assistant's contents, each with its end."""
    name, tokenizer = templated
    stops = stop_ids(tokenizer)
    for i, chat in enumerate(CONVERSATIONS):
        answers = [m["content"] for m in chat if m["role"] == "assistant" and "tool_calls" not in m]
        if not answers or len(answers) < sum(m["role"] == "assistant" for m in chat):
            continue
        tokens, mask = encode_training_chat(tokenizer, chat, stops)
        golden = GOLDEN[f"{name}/{i}"]
        assert golden["tools"] or tokens.tolist() == golden["prompt_false"]["ids"]
        assert tokens.dtype == np.int32
        if "mask" in golden:
            assert mask.astype(int).tolist() == golden["mask"]
        trim = str.strip if name == "llama3_style" else str
        expected = "".join(trim(answer) + "<|im_end|>" for answer in answers)
        assert tokenizer.decode(tokens[mask]) == expected


def test_tool_calls_are_the_assistants(smollm2_tokenizer):
    tokenizer = smollm2_tokenizer
    own, tokenizer.chat_template = tokenizer.chat_template, TEMPLATES["llama3_style"]
    tokens, mask = encode_training_chat(tokenizer, CONVERSATIONS[29], stop_ids(tokenizer))
    tokenizer.chat_template = own
    assert tokenizer.decode(tokens[mask]) == (
        '{"name": "wetter", "arguments": {"city": "Köln"}}<|im_end|>21 °C<|im_end|>'
    )


# small templates on a character tokenizer, whose ids are easy to read

CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "c"},
]


def characters(template=None):
    tokenizer = Tokenizer.characters("abc:\n")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def marked(tokenizer, chat=CHAT, stops=frozenset({2})):
    tokens, mask = encode_training_chat(tokenizer, chat, stops)
    return tokenizer.decode(tokens[mask])


def turns(assistant, other="{{ m.content }}{{ eos_token }}"):
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% else %}"
        + other
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )


@pytest.mark.parametrize(
    "assistant",
    [
        ":{{ m.content }}{{ eos_token }}\n\n",
        ":{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n\n",
        ":{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n\n",
        ":{% generation %}{{ m.content }}{{ eos_token }}\n\n{% endgeneration %}",
        ":{%- generation -%}{{ m.content + eos_token }}{%- endgeneration -%}\n\n",
    ],
)
def test_the_end_is_marked_and_what_follows_is_not(assistant):
    """Wherever the marker stands: content and end-of-turn, not the header, not the newline."""
    assert marked(characters(turns(assistant))) == "bc<|end|>c<|end|>"


def test_pad_and_eos_of_one_id_does_not_matter():
    tokenizer = characters()
    tokenizer.special_tokens["pad_token"] = "<|end|>"
    tokens, mask = encode_training_chat(tokenizer, CHAT, stop_ids(tokenizer))
    assert tokens[mask].tolist() == [8, 9, 2, 9, 2]
    assert (tokens == 2).sum() == 4  # the user's turns end with it too, unmarked


def test_stop_id_0_is_an_end():
    tokenizer = characters(turns(":{{ m.content }}<|pad|>"))
    assert stop_ids(tokenizer) == {0, 2}
    assert marked(tokenizer, stops=stop_ids(tokenizer)) == "bc<|pad|>c<|pad|>"


def test_no_end_of_turn_is_refused():
    with pytest.raises(DataError, match=r"no end-of-turn token.*'bc'"):
        marked(characters(turns(":{{ m.content }}")))


def test_a_template_that_rewrites_earlier_turns_is_refused():
    """As reasoning templates do: the last turn is written in another way."""
    rewriting = turns(":{{ m.content if loop.last else 'a' }}{{ eos_token }}")
    with pytest.raises(DataError, match="cannot locate the assistant's message 1"):
        marked(characters(rewriting))


def test_a_header_unlike_the_generation_prompt_is_refused():
    with pytest.raises(DataError, match="cannot locate"):
        marked(characters(turns("c:{{ m.content }}{{ eos_token }}")))


def test_a_token_across_header_and_answer_is_refused(smollm2_tokenizer):
    """The header's newline and the answer's become one token, of which half is the policy's."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nb"}]
    with pytest.raises(DataError, match="both the template's header and the beginning"):
        encode_training_chat(smollm2_tokenizer, chat, {2})


def test_leading_space_of_an_answer_is_its_own(smollm2_tokenizer):
    """Offsets are not trimmed: ' b' counts from its space on."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b c"}]
    tokens, mask = encode_training_chat(smollm2_tokenizer, chat, {2})
    assert smollm2_tokenizer.decode(tokens[mask]) == " b c<|im_end|>"


def test_marker_in_a_set_block_is_refused():
    hidden = turns(
        "{% set t %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}:{{ t }}"
    )
    with pytest.raises(DataError, match="inside a macro or set block"):
        marked(characters(hidden + "aaaa"))


def test_nothing_to_train_on_is_refused():
    with pytest.raises(DataError, match="no assistant message"):
        marked(characters(), CHAT[:1])


# bad input


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "asistant", "content": "a"}, r"'asistant'; did you mean 'assistant'.*developer"),
        ({"role": "human", "content": "a"}, r"unknown chat role 'human'.*known: system"),
        ({"content": "a"}, "an object with a 'role'"),
        ({"role": "user"}, "refused the conversation"),
    ],
)
def test_bad_messages_are_named(message, match):
    with pytest.raises(DataError, match=match):
        render(characters(), [message], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        (None, "need a chat template"),
    ],
)
def test_templates_that_refuse(template, match):
    tokenizer = characters()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=match):
        render(tokenizer, CHAT, add_generation_prompt=True)


def test_what_templates_can_use():
    template = (
        "{{ strftime_now('%Y') | length }}{{ {'b': '<ä>', 'a': 1} | tojson }}"
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}"
        "{% set ns = namespace(k=1) %}{% set ns.k = 2 %}{{ ns.k }}{{ dict(a=1) }}"
        "{{ messages[1].reasoning_content }}{{ messages[0].name is defined }}"
        "{{ mask_token is defined }}"
    )
    tokenizer = characters(template)
    chat = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "reasoning": "r"},
    ]
    text = render(tokenizer, chat, add_generation_prompt=False)
    assert text == "4" + '{"b": "<ä>", "a": 1}' + "x2{'a': 1}rFalseFalse"
