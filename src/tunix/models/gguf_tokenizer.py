"""The tokenizer that a GGUF file's metadata describes, rebuilt for the ``tokenizers`` library."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tunix.errors import ModelError
from tunix.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of ``tokenizer.ggml.token_type``."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text into words (``tokenizer.json`` of that family)."""

GPT2, SMOLLM, LLAMA3 = ("gpt-2", "default"), ("smollm",), ("llama-bpe", "llama3", "llama-v3")
"""Values of ``tokenizer.ggml.pre`` and the way of cutting words they stand for."""


def tokenizer_from_metadata(metadata: dict[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer with its special tokens and chat template.

    Raises ``ModelError`` where ``tokenizer.ggml.model`` or ``tokenizer.ggml.pre`` is of a kind
    that is not supported, listing those that are.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokens = values["tokens"]
    kinds = values.get("token_type", [NORMAL] * len(tokens))
    kind, pre = values.get("model"), values.get("pre", "default")
    if kind == "gpt2" and pre in GPT2 + SMOLLM + LLAMA3:
        backend = _byte_level(tokens, values["merges"], pre)
        defaults: dict[str, int] = {}
    elif kind == "llama":
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
        backend = _sentence_piece(tokens, kinds, values)
    else:
        supported = ", ".join(repr(name) for name in GPT2 + SMOLLM + LLAMA3)
        raise ModelError(
            f"{where}: tokenizer.ggml.model = {kind!r} with pre = {pre!r} is not supported; "
            f"supported: 'llama', and 'gpt2' with pre {supported}"
        )
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == USER_DEFINED])
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in pairs if k == CONTROL]
    )
    ids = {
        role: values.get(f"{name}_token_id", defaults.get(name))
        for role, name in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    adds_bos = values.get("add_bos_token", kind == "llama" or pre in LLAMA3)
    return Tokenizer(
        backend,
        special_tokens={role: tokens[i] for role, i in ids.items() if i is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
        config={"add_bos_token": bool(adds_bos)},
    )


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    """BPE over bytes; only the way of cutting words differs between the families."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in LLAMA3))
    if pre in LLAMA3:
        words = [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")]
    elif pre in SMOLLM:
        words = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        words = []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in LLAMA3)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    return backend


def _sentence_piece(
    tokens: list[str], kinds: list[int], values: dict[str, Any]
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: spaces are U+2581, bytes stand in for unknown characters."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = values.get("scores", [-float(i) for i in range(len(tokens))])
    unknown = tokens[values.get("unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            _merges(tokens, kinds, scores, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "\u2581")
    back: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])  # pyright: ignore
        back.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces  # pyright: ignore
    backend.decoder = decoders.Sequence(back)  # pyright: ignore
    return backend


def _merges(
    tokens: list[str], kinds: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: every split of a piece into two known pieces is one.

    They are ranked by the score of the result, the best first, then by the ids of the halves.
    """
    ranked = sorted(
        (i for i, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)),
        key=lambda i: -scores[i],
    )
    merges = []
    for i in ranked:
        piece = tokens[i]
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges
