"""Supervised rows: what is trained of them, what a first pass keeps, and rows that are refused."""

import json
import tracemalloc

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies import tiny_policy
from tunix.algorithms.language.sft import SFTConfig, pack_examples
from tunix.datasets.chats import Columns, Example, RowEncoder, marked_text
from tunix.datasets.examples import Examples, Survey, describe, first_row, hold_out, survey_rows
from tunix.datasets.rows import ListedRows, open_rows
from tunix.errors import ConfigError, DataError
from tunix.models.policy import Policy
from tunix.text.tokenizer import Tokenizer

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "ef"},
    {"role": "user", "content": "g"},
    {"role": "assistant", "content": "h"},
]


def encoder(most=64, too_long="error", policy=None, **more):
    return RowEncoder(policy or tiny_policy(), most, too_long, **more)


def survey_of(rows, using):
    listed = ListedRows(rows, "row")
    return listed, survey_rows(listed, using)


def row(size):
    """<bos><user>1=<end><assistant> are 6 tokens, 1...1<end> size + 1, all but 6 trained."""
    return {"prompt": "1=", "completion": "1" * size}


# what is trained


def config(**more):
    return SFTConfig(model="none", **more)


@pytest.mark.parametrize("micro_batch_tokens", [32, 4096])
def test_packed_or_not_the_assistants_turns_alone_are_trained(micro_batch_tokens):
    """Chats of three and two turns, 12 trained tokens in all, pad and end of one id.

    A user's turn ends with that id too, and is not trained for that; the pads are not either.
    """
    policy = tiny_policy()
    policy.tokenizer.special_tokens["pad_token"] = "<|end|>"
    using = encoder(policy=policy)
    examples = [using.encode({"messages": chat}, "row") for chat in (CHAT, CHAT[:4])]
    batch = pack_examples(examples, config(micro_batch_tokens=micro_batch_tokens))
    wanted = ["c<|end|>ef<|end|>h<|end|>", "c<|end|>ef<|end|>"]
    found = [
        policy.tokenizer.decode(tokens[mask & (ids == segment)])
        for tokens, mask, ids in zip(
            batch.tokens, batch.action_mask, batch.segment_ids, strict=True
        )
        for segment in range(1, int(ids.max()) + 1)
    ]
    assert found == wanted
    np.testing.assert_allclose(batch.weights[batch.action_mask], np.full(12, 1 / 12))
    ends = batch.tokens == policy.tokenizer.eos_id
    assert (ends & (batch.segment_ids > 0)).sum() == 10
    assert (ends & batch.action_mask).sum() == 5


def test_the_last_turn_alone_can_be_trained():
    policy = tiny_policy()
    one = encoder(policy=policy, trained_turns="last").encode({"messages": CHAT}, "row")
    assert policy.tokenizer.decode(one.tokens[one.action_mask]) == "h<|end|>"


@pytest.mark.parametrize("first", ["<s>", "</s>"])
def test_bos_and_eos_of_id_0_are_ids_like_others(first):
    """Without a template: <s> a b | c </s>, the last two trained, whichever of them is 0."""
    names = sorted(["<s>", "</s>"], key=lambda name: name != first)
    vocab = {name: i for i, name in enumerate([*names, "a", "b", "c"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(backend, special_tokens=special, config={"add_bos_token": True})
    tiny = tiny_policy()
    policy = Policy(tiny.config, tiny.params, tokenizer, frozenset({vocab["</s>"]}))
    one = encoder(policy=policy).encode({"prompt": "ab", "completion": "c"}, "row")
    assert one.tokens.tolist() == [vocab[t] for t in ("<s>", "a", "b", "c", "</s>")]
    assert one.action_mask.tolist() == [False, False, False, True, True]


def test_columns_are_mapped():
    columns = Columns(messages="chat", prompt="q", completion="a")
    using, plain = encoder(columns=columns), encoder()
    one = using.encode({"q": "1=", "a": "1", "prompt": 3}, "row")
    assert one.tokens.tolist() == plain.encode(row(1), "row").tokens.tolist()
    chat = using.encode({"chat": CHAT, "q": None}, "row")
    assert chat.tokens.tolist() == plain.encode({"messages": CHAT}, "row").tokens.tolist()


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_rows_tools_stand_in_its_prompt(tools):
    policy = tiny_policy()
    policy.tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        + policy.tokenizer.chat_template
    )
    one = encoder(policy=policy, columns=Columns(tools="functions")).encode(
        {"messages": CHAT, "functions": tools}, "row"
    )
    assert policy.tokenizer.decode(one.tokens).startswith("add<|bos|>")


# refused


def test_a_column_for_two_parts_is_refused():
    with pytest.raises(ConfigError, match="prompt_field, completion_field: 'text'; expected a col"):
        Columns(prompt="text", completion="text")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"mesages": []}, r"no field 'messages', nor 'prompt' and 'completion'; it has \['mesages'"
         r"\]; did you mean 'mesages'"),
        ({"messages": CHAT, "tools": "{"}, "tools: not JSON"),
        ({"messages": CHAT, "tools": [1]}, "tools: expected a list of tool descriptions"),
        ({"messages": CHAT, "tools": TOOLS}, "has tools, which the chat template does not write"),
        ({"messages": [{"role": "user", "content": [1]}, *CHAT]}, "template refused"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "template refused"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, bad, message):
    """By file and line, at the first pass."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row(1)) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError, match=f"^{path}:3: .*{message}"):
        survey_rows(open_rows(path), encoder())


def test_a_mapped_column_that_no_row_has_is_refused():
    using = encoder(columns=Columns(tools="tolls"))
    with pytest.raises(DataError, match=r"tools_field: no row has a column 'tolls'.*mean 'tools'"):
        survey_of([row(1) | {"tools": None}], using)


def test_nothing_to_train_in_a_row_is_refused():
    policy = tiny_policy()
    policy.tokenizer.chat_template = None
    policy.tokenizer.special_tokens.pop("eos_token")
    with pytest.raises(DataError, match="row 0: it holds no token to train on"):
        survey_of([{"prompt": "ab", "completion": ""}], encoder(policy=policy))


def test_a_row_that_changed_since_the_first_pass_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row(1)) + "\n")
    rows = open_rows(path)
    examples = Examples(rows, encoder(), survey_rows(rows, encoder()), np.arange(1))
    assert len(examples[0].tokens) == 8
    path.write_text(json.dumps(row(1)).replace("1=", "2=") + "\n")
    with pytest.raises(DataError, match=f"{path}:1 is not what it was.*was the file changed"):
        examples[0]


# the first pass


@pytest.mark.parametrize(
    ("choice", "lengths", "trained"),
    [("cut", [8, 17, 7], [2, 4, 1]), ("drop", [8, 17, 7], [2, 0, 1])],
)
def test_long_rows_are_cut_or_dropped(choice, lengths, trained):
    """Limit 10, rows of 8, 17 and 7 tokens: of the second 4 of 11 trained tokens are left."""
    using = encoder(10, choice)
    listed, found = survey_of([row(1), row(10), row(0)], using)
    assert found.lengths.tolist() == lengths
    assert found.trained.tolist() == trained
    usable = np.flatnonzero(found.trained)
    examples = Examples(listed, using, found, usable)
    assert [int(examples[i].action_mask.sum()) for i in range(len(usable))] == [
        n for n in trained if n
    ]


def test_a_cut_that_leaves_nothing_to_train_drops_the_row():
    """Limit 7: the prompt's 6 tokens and one; of a prompt longer by two nothing is left."""
    long_prompt = {"prompt": "123=", "completion": "1"}
    _, found = survey_of([row(0), long_prompt], encoder(7, "cut"))
    assert found.trained.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"dataset is empty: no row to train on \(1 dropped"):
        survey_of([long_prompt], encoder(7, "cut"))


def test_the_numbers_that_are_printed():
    """Lengths 7, 8, 9 and 17, limit 9: dropped 17; 24 tokens, 1 + 2 + 3 trained."""
    rows = [row(0), row(1), row(2), row(10)]
    listed, found = survey_of(rows, encoder(9, "drop"))
    text = describe(found, encoder(9, "drop"))
    assert text == (
        "3 rows, 24 tokens, 6 trained; row length min 7, median 8, p95 17, max 17; "
        "over 9 tokens: 0 cut, 1 dropped"
    )
    cut = describe(survey_of(rows, encoder(9, "cut"))[1], encoder(9, "cut"))
    assert cut.startswith("4 rows, 33 tokens, 9 trained")
    assert cut.endswith("1 cut, 0 dropped")
    examples = Examples(listed, encoder(9, "drop"), found, np.flatnonzero(found.trained))
    assert first_row(examples) == "<|bos|><|user|>1=<|end|><|assistant|>[[<|end|>]]"


def test_the_shown_row_is_short():
    tokenizer = Tokenizer.characters("ab\n")
    mask = np.arange(300) >= 200
    tokens = np.array(tokenizer.encode("a" * 199 + "\n" + "b" * 100), np.int32)
    shown = marked_text(tokenizer, Example(tokens, mask), most=20)
    assert shown == "a" * 10 + " … " + "a" * 8 + "\\n" + "[[" + "b" * 10 + " … " + "b" * 10 + "]]"


@settings(max_examples=50, deadline=None)
@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 5),
)
def test_held_out_rows_are_never_trained_on(keys, fraction, seed):
    """Key 0 is a dropped row; equal keys never stand on both sides; training is never empty."""
    array = np.array(keys, np.uint64)
    lengths = np.ones(len(keys), np.int32)
    found = Survey(lengths, (array > 0).astype(np.int32), array)
    training, held = hold_out(found, fraction, 8, seed)
    usable = np.flatnonzero(array)
    assert len(held) <= min(8, int(fraction * len(usable)))
    assert set(array[training]).isdisjoint(array[held])
    assert set(training) | set(held) <= set(usable)
    assert len(training) > 0 or len(usable) == 0
    assert set(array[training]) | set(array[held]) == set(array[usable])


def memory(path, number):
    """Bytes kept after the first pass over ``number`` rows of 14 kB and some draws; the peak."""
    with path.open("w") as file:
        for i in range(number):
            made = {"prompt": f"{i}=", "completion": str(i), "note": "x" * 14_000}
            file.write(json.dumps(made) + "\n")
    using = encoder()
    using.encode(row(1), "row")  # compiles the template
    tracemalloc.start()
    try:
        rows = open_rows(path)
        found = survey_rows(rows, using)
        examples = Examples(rows, using, found, np.flatnonzero(found.trained))
        for i in range(0, number, 20):
            examples[i]
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path):
    """8 MB more, in 600 rows: 64 bytes a row more are kept at most, and no more ever needed."""
    path = tmp_path / "a.jsonl"
    kept, most = memory(path, 300)
    kept_more, most_more = memory(path, 900)
    assert path.stat().st_size > 12e6
    assert kept_more - kept < 600 * 64
    assert most_more - most < 600 * 64
    assert most_more < 1e6


def test_a_first_token_has_nothing_to_be_predicted_from():
    """A template that begins with the answer: of "c<end>" the end alone is trained."""
    policy = tiny_policy()
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% endfor %}"
    )
    one = encoder(policy=policy).encode({"messages": [CHAT[1]]}, "row")
    assert one.action_mask.tolist() == [False, True]
