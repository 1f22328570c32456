"""The tokenizer of a policy: a thin, typed skin over the ``tokenizers`` library.

Rules kept here and relied on everywhere: an id of 0 is an id like any other (tests are
``is None``), special tokens are added by nobody but ``encode_text``, and offsets are those of the
characters a token really covers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tunix.errors import ModelError

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that ``tokenizer_config.json`` names and chat templates see as variables."""

CHARACTER_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Chat template of ``Tokenizer.characters``: one role token, the content, the end-of-turn token."""


class Tokenizer:
    """Text to token ids and back, with the special tokens and chat template that go with them."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        """Wrap ``backend``, which must not be used elsewhere afterwards.

        ``special_tokens`` maps names of ``ROLES`` to token texts, ``config`` is the content of
        ``tokenizer_config.json`` and is written back by ``save``.
        """
        backend.no_truncation()
        backend.no_padding()
        self.config = dict(config or {})
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._backend = backend
        self._adds_bos = self._find_adds_bos(backend)
        # The post-processor adds special tokens and trims white space off offsets. The first is
        # ours to decide, the second would make a token look shorter than the text it covers.
        self._post_processor = backend.post_processor
        backend.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, its config, special tokens and template.

        Raises ``ModelError`` that names the file which is missing or cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        special = read_json(folder / "special_tokens_map.json") | config
        names = {role: _token_text(special.get(role)) for role in ROLES}
        return cls(
            backend,
            special_tokens={role: text for role, text in names.items() if text is not None},
            chat_template=_read_template(folder, config.pop("chat_template", None)),
            config=config,
        )

    @classmethod
    def characters(
        cls, alphabet: str, *, chat_template: str | None = CHARACTER_TEMPLATE
    ) -> Tokenizer:
        """Make a tokenizer with one id per character of ``alphabet``, in that order.

        Before them come ``<|pad|> <|bos|> <|end|> <|unk|> <|system|> <|user|> <|assistant|>``;
        ``<|end|>`` is both EOS and end of turn. Other characters become ``<|unk|>``.
        """
        if not alphabet:
            raise ModelError("alphabet is empty: expected at least one character")
        names = ("pad", "bos", "end", "unk", "system", "user", "assistant")
        special = [f"<|{name}|>" for name in names]
        vocab = {token: i for i, token in enumerate([*special, *dict.fromkeys(alphabet)])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
        backend.decoder = decoders.Fuse()  # pyright: ignore
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        roles = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
        roles["unk_token"] = "<|unk|>"
        return cls(backend, special_tokens=roles, chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: what an embedding must cover."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, None where there is none."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, None where there is none."""
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token; often the same as ``eos_id``, so never a source of masks."""
        return self._special_id("pad_token")

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown token, None where every text can be encoded."""
        return self._special_id("unk_token")

    @property
    def adds_bos(self) -> bool:
        """True where a plain text is to begin with BOS (``add_bos_token`` or post-processor)."""
        return self._adds_bos

    @property
    def added_tokens(self) -> dict[int, str]:
        """Ids and texts of the tokens that are matched before the model runs, special or not."""
        return {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``decode(skip_special_tokens=True)`` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @property
    def decoder_type(self) -> str | None:
        """Name of the library's decoder (``ByteLevel``, ``Sequence`` ...), None without one."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())["type"]

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token text, None where there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Text of the token as the vocabulary spells it (not decoded), None for an unused id."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode ``text``; with ``add_special_tokens`` the same as ``encode_text``."""
        if add_special_tokens:
            return self.encode_text(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        """Encode a plain text, with BOS in front if this tokenizer adds one; never two of them."""
        ids = self.encode(text)
        bos = self.bos_id
        if self._adds_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode without special tokens; per token the characters ``[start, end)`` it covers.

        The tokens of a character that was split in bytes all cover that whole character.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Turn ids into text; bytes that form no character become U+FFFD, unused ids nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        The folder opens again by ``from_folder`` and by ``transformers.AutoTokenizer``.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self._post_processor is not None:
            backend.post_processor = self._post_processor
        # not backend.save, whose errors have no type
        (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
        config = self.config | self.special_tokens | {"add_bos_token": self._adds_bos}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        config.setdefault("clean_up_tokenization_spaces", False)
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _find_adds_bos(self, backend: tokenizers.Tokenizer) -> bool:
        stated = self.config.get("add_bos_token")
        bos = self._special_id("bos_token")
        if bos is None:
            return False
        if stated is not None:
            return bool(stated)
        return backend.encode("", add_special_tokens=True).ids[:1] == [bos]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one. Raises ``ModelError`` naming the file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, indented, as the Hugging Face libraries do."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as an object with ``content``."""
    return value.get("content") if isinstance(value, dict) else value


def _read_template(folder: Path, stated: Any) -> str | None:
    """The file wins over the config; of several named templates the one called default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated}
        if "default" not in named:
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: chat_template has {sorted(map(str, named))}, "
                "expected one named 'default'"
            )
        return named["default"]
    return stated
