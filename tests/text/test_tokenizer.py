import json

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from tunix.errors import ModelError
from tunix.text.stop import end_of_turn_id, stop_ids
from tunix.text.tokenizer import Tokenizer


def words(adds=None, specials=("<s>", "</s>")):
    """A word-level tokenizer whose BOS has id 0; its post-processor puts ``adds`` in front."""
    vocab = {token: i for i, token in enumerate([*specials, "<unk>", "a", "b", "c"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(t, special=True) for t in specials])
    if adds:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{adds} $A", special_tokens=[(adds, vocab[adds])]
        )
    return backend


def folder_of(path, backend, **config):
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_bos_of_id_0_is_added_once(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, words("<s>"), bos_token="<s>"))
    assert tokenizer.bos_id == 0
    assert tokenizer.adds_bos
    assert tokenizer.encode_text("a b") == [0, 3, 4]
    assert tokenizer.encode_text("<s> a b") == [0, 3, 4]
    assert tokenizer.encode("a b") == [3, 4]
    assert tokenizer.encode("a b", add_special_tokens=True) == [0, 3, 4]
    assert tokenizer.encode_text("") == [0]


@pytest.mark.parametrize(("stated", "post", "adds"), [(True, None, True), (False, "<s>", False)])
def test_add_bos_token_wins_over_the_post_processor(tmp_path, stated, post, adds):
    path = folder_of(tmp_path, words(post), bos_token="<s>", add_bos_token=stated)
    assert Tokenizer.from_folder(path).adds_bos is adds


def test_an_eos_in_front_is_not_taken_for_bos(tmp_path):
    path = folder_of(tmp_path, words("</s>"), bos_token="<s>", eos_token="</s>")
    tokenizer = Tokenizer.from_folder(path)
    assert not tokenizer.adds_bos
    assert tokenizer.encode_text("a") == [3]


def test_absent_special_tokens_are_none(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, words()))
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id)
    assert ids == (None, None, None, None)
    assert tokenizer.chat_template is None
    assert tokenizer.vocab_size == 6


def test_special_tokens_as_objects_and_from_their_own_file(tmp_path):
    path = folder_of(tmp_path, words(), eos_token={"content": "</s>", "special": True})
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.eos_id, tokenizer.unk_id) == (1, 2)


def test_template_file_wins_and_default_is_picked(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = folder_of(tmp_path, words(), chat_template=named)
    assert Tokenizer.from_folder(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(path).chat_template == "F"


def test_named_templates_without_default_are_refused(tmp_path):
    path = folder_of(tmp_path, words(), chat_template=[{"name": "rag", "template": "R"}])
    with pytest.raises(ModelError, match=r"rag.*default"):
        Tokenizer.from_folder(path)


def test_truncation_and_padding_of_the_file_are_not_ours(tmp_path):
    backend = words()
    backend.enable_truncation(1)
    backend.enable_padding(length=9)
    assert Tokenizer.from_folder(folder_of(tmp_path, backend)).encode("a b c") == [3, 4, 5]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_files_are_named(tmp_path, content):
    if content is None:
        match = "no tokenizer.json"
    else:
        folder_of(tmp_path, words())
        (tmp_path / "tokenizer_config.json").write_text(content)
        match = "tokenizer_config.json"
    with pytest.raises(ModelError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_characters():
    """pad 0, bos 1, end 2, unk 3, three roles, then one id per character in order."""
    tokenizer = Tokenizer.characters("ba\nb ")
    assert tokenizer.encode("ab \n") == [8, 7, 10, 9]
    assert tokenizer.encode("z<|end|>a") == [3, 2, 8]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 11
    assert tokenizer.decode([8, 7, 10, 9, 2], skip_special_tokens=True) == "ab \n"
    assert not tokenizer.adds_bos
    assert stop_ids(tokenizer) == {2}
    with pytest.raises(ModelError, match="alphabet is empty"):
        Tokenizer.characters("")


def test_saved_tokenizer_is_the_same(tmp_path, smollm2_tokenizer):
    for name, tokenizer in {
        "characters": Tokenizer.characters("abc 123"),
        "words": Tokenizer(words("<s>"), special_tokens={"bos_token": "<s>"}),
        "smollm2": smollm2_tokenizer,
    }.items():
        tokenizer.save(tmp_path / name)
        again = Tokenizer.from_folder(tmp_path / name)
        text = "a <|end|> b 12 ½ <|im_end|>\n\n1"
        assert again.encode_text(text) == tokenizer.encode_text(text)
        assert again.special_tokens == tokenizer.special_tokens
        assert again.chat_template == tokenizer.chat_template
        assert again.adds_bos == tokenizer.adds_bos
        assert again.decoder_type == tokenizer.decoder_type


def test_saved_post_processor_still_adds_bos(tmp_path):
    """Other libraries read it from tokenizer.json."""
    Tokenizer(words("<s>"), special_tokens={"bos_token": "<s>"}).save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.encode("a").ids == [0, 3]


# stop sets


def template_tokenizer(template, specials=("<s>", "</s>", "<end>")):
    backend = words(specials=specials)
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=template,
    )


TURN = "{% for m in messages %}{{ m['content'] }}END{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "found"),
    [("<end>", 2), (" <end> ", 2), ("</s>", 1), ("<s>", 0), ("", None), (" a <end>", None)],
)
def test_end_of_turn_is_what_the_template_writes(ending, found):
    assert end_of_turn_id(template_tokenizer(TURN.replace("END", ending))) == found


def test_end_of_turn_of_a_template_that_refuses_the_probe():
    assert end_of_turn_id(template_tokenizer("{{ raise_exception('no') }}")) is None


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 4}, {1, 2, 4, 7, 9}),
        ({"eos_token_id": 0}, None, {0, 1, 2}),
        ({}, {"eos_token_id": None}, {1, 2}),
        (None, {"eos_token_id": [0]}, {0, 1, 2}),
    ],
)
def test_stop_set_is_the_union(generation, model, expected):
    assert stop_ids(template_tokenizer(TURN.replace("END", "<end>")), generation, model) == expected


def test_stop_set_without_a_tokenizer():
    assert stop_ids(None, {"eos_token_id": 0}) == {0}
    assert stop_ids(None) == frozenset()
