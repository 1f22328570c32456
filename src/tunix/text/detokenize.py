"""Incremental detokenisation: pieces of text as tokens arrive, never a part of a character.

Law: the pieces of ``push`` and the last one of ``flush``, joined, equal ``Tokenizer.decode`` of all
ids.
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol, runtime_checkable

from tunix.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@runtime_checkable
class Detokenizer(Protocol):
    """Turns a stream of ids into text. One object serves one stream."""

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is now certain, often empty."""
        ...

    def pending(self) -> str:
        """Text of what is held back as it would stand if the stream ended here."""
        ...

    def flush(self) -> str:
        """Return what was held back; bytes that never became a character are U+FFFD."""
        ...


def detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = False) -> Detokenizer:
    """Make a detokeniser for one stream; work per token does not grow with the stream."""
    if tokenizer.decoder_type == "ByteLevel":
        return _ByteLevel(tokenizer, skip_special_tokens)
    return _Windowed(tokenizer, skip_special_tokens)


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al., GPT-2).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and following.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (byte for byte in range(256) if byte not in kept)
    return {chr(b): b for b in kept} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


class _ByteLevel:
    """Tokens are strings of bytes; an incremental UTF-8 decoder holds back what is incomplete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._alphabet = byte_alphabet()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        try:
            data = bytes(self._alphabet[character] for character in token)
        except KeyError:  # an added token with characters outside the alphabet is plain text
            data = token.encode()
        return self._decoder.decode(data)

    def pending(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Windowed:
    """Any other decoder: decode the last piece and the new one, and return what the new one adds.

    Decoders treat the beginning of a text in a special way (a leading space is dropped) and look at
    runs of byte tokens as a whole; so a piece is cut only in front of a token that is no byte
    token, and the piece before it is decoded along with it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        if _BYTE_TOKEN.fullmatch(token):
            self._held.append(token_id)
            return ""
        piece = self._take() if self._held else ""
        self._held.append(token_id)
        return piece + self._take(unless_incomplete=True)

    def pending(self) -> str:
        known, text = self._decode()
        return text[len(known) :]

    def flush(self) -> str:
        return self._take()

    def _decode(self) -> tuple[str, str]:
        """Text of the piece before, and of that with what is held back."""
        return self._tokenizer.decode(self._before), self._tokenizer.decode(
            self._before + self._held
        )

    def _take(self, unless_incomplete: bool = False) -> str:
        known, text = self._decode()
        if unless_incomplete and text.endswith("\ufffd"):
            return ""
        if text:  # before the first character the beginning is still the beginning
            self._before, self._held = self._held, []
        return text[len(known) :]
