"""Law: pieces and flush, joined, are the full decoding; no piece holds a part of a character."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from tunix.models.gguf_tokenizer import tokenizer_from_metadata
from tunix.text.detokenize import byte_alphabet, detokenizer
from tunix.text.tokenizer import Tokenizer


def byte_level():
    """Every byte is a token, some longer ones, and added tokens with text outside the alphabet."""
    alphabet = [*byte_alphabet(), "Ġa", "ä½", "ĠðŁ", "ab"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("ä€ x", special=True)]
    )
    backend.add_tokens([AddedToken("Größe!")])
    return Tokenizer(backend)


def sentence_piece(add_space_prefix=True):
    """Byte tokens beside pieces, as in Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = ["▁", "a", "b", "▁a", "ab", "▁▁", "é", "日", "\ufffd"]
    return tokenizer_from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces + words,
            "tokenizer.ggml.token_type": kinds + [1] * len(words),
            "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces) + len(words))],
            "tokenizer.ggml.add_space_prefix": add_space_prefix,
        },
        "test",
    )


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentence_piece": sentence_piece(),
    "no_prefix": sentence_piece(False),
    "characters": Tokenizer.characters("abc é日"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [False, True])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_full_decoding(name, skip, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    stream = detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [*(stream.push(i) for i in ids), stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece", "no_prefix"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12))
def test_no_piece_holds_a_part_of_a_character(name, text):
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        spelled = {byte: token for token, byte in byte_alphabet().items()}
        ids = [tokenizer.token_id(spelled[byte]) for byte in text.encode()]
    else:
        ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    stream = detokenizer(tokenizer)
    so_far = ""
    for token_id in ids:
        so_far += stream.push(token_id)
        assert whole.startswith(so_far)
    assert so_far + stream.flush() == whole
    if "\u2581" not in text:  # which SentencePiece cannot tell from a space
        assert whole == text


def test_characters_come_when_complete():
    """The four bytes of an emoji: nothing, nothing, nothing, then it."""
    tokenizer = TOKENIZERS["byte_level"]
    spelled = {byte: token for token, byte in byte_alphabet().items()}
    stream = detokenizer(tokenizer)
    pieces = [stream.push(tokenizer.token_id(spelled[byte])) for byte in "👍!".encode()]
    assert pieces == ["", "", "", "👍", "!"]
    assert stream.flush() == ""


def test_incomplete_bytes_at_the_end_are_replaced():
    tokenizer = TOKENIZERS["byte_level"]
    stream = detokenizer(tokenizer)
    assert stream.push(tokenizer.token_id("ä½")) == ""
    assert stream.flush() == "\ufffd"


def test_work_per_token_does_not_grow(monkeypatch):
    """A long stream never decodes more than a few ids at once."""
    tokenizer = sentence_piece()
    longest = 0
    decode = tokenizer.decode

    def counted(ids, skip_special_tokens=False):
        nonlocal longest
        longest = max(longest, len(list(ids)))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = detokenizer(tokenizer)
    for token_id in [tokenizer.token_id("▁a"), tokenizer.token_id("b"), 3 + 0xC3, 3 + 0xA9] * 200:
        stream.push(token_id)
    assert longest <= 8


def test_smollm2_streams_its_own_text(smollm2_tokenizer):
    text = "naïve 👩‍👩‍👧‍👦 日本語 and  spaces\n\n12 <|im_end|>"
    stream = detokenizer(smollm2_tokenizer)
    pieces = [stream.push(i) for i in smollm2_tokenizer.encode(text)]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)
