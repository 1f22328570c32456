"""Adapters in the folder format of the ``peft`` library: ``adapter_config.json`` and weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tunix.errors import ModelError
from tunix.models import llama, lora
from tunix.models.huggingface import NAMES
from tunix.text.tokenizer import read_json, write_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

WITHOUT_EFFECT = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "revision", "inference_mode"),
    *("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Settings of PEFT that are read here, or that say nothing about a finished adapter."""

NEUTRAL = (None, False, "none", {}, [])
"""Values by which any other setting is off."""

DEFAULTS = {"lora_alpha": 8, "lora_dropout": 0.0}
"""What PEFT takes where nothing is said."""

STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to initialize an adapter that leave the base as it is; others (PiSSA, OLoRA) change it."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / CONFIG).is_file()


def read_settings(folder: Path) -> dict[str, Any]:
    """Content of ``adapter_config.json``.

    Raises:
        ModelError: it is no LoRA, names no base, or uses what is not supported.
    """
    path = folder / CONFIG
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type = {content.get('peft_type')!r} is not supported; supported: 'LORA'"
        )
    for field, value in content.items():
        if field not in WITHOUT_EFFECT and value not in NEUTRAL:
            raise ModelError(f"{path}: {field} = {value!r} is not supported; expected it unset")
    if content.get("init_lora_weights") not in STARTS:
        raise ModelError(
            f"{path}: init_lora_weights = {content['init_lora_weights']!r} is not supported, since "
            f"it changes the base; supported: {', '.join(map(repr, STARTS[1:]))}"
        )
    rank = content.get("r")
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{path}: r = {rank!r}, expected a positive whole number")
    for field in ("lora_alpha", "lora_dropout"):
        if type(content.setdefault(field, DEFAULTS[field])) not in (int, float):
            raise ModelError(f"{path}: {field} = {content[field]!r}, expected a number")
    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{path}: base_model_name_or_path = {base!r}, expected the folder, .gguf file or "
            "package:NAME of the base model"
        )
    return content


def load_adapter(folder: Path, config: llama.LlamaConfig, params: llama.Params) -> lora.Adapter:
    """Read an adapter for a base; weights become float32.

    Raises:
        ModelError: the files cannot be read, or a tensor is missing, unknown or of a shape that
            does not fit the base or the rank, or the base was another.
    """
    settings, path = read_settings(folder), folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{path} does not exist; adapters are read from that file only")
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read, perhaps it is truncated: {error}") from error
    shapes = llama.parameter_shapes(config)
    modules = {lora.MODULES[leaf]: leaf for leaf in lora.MODULES}
    parts = (part for name in stored for part in name.split("."))
    leaves = [modules[name] for name in dict.fromkeys(parts) if name in modules]
    if not leaves:
        known = ", ".join(modules)
        raise ModelError(f"{path}: no tensor belongs to a module of the model ({known})")
    expected = lora.adapter_shapes(shapes, leaves, settings["r"])
    _check_base(path, stored, params)

    def read(leaf: str, matrix: str, shape: tuple[int, ...], layer: int | None) -> np.ndarray:
        name, wanted = tensor_name(leaf, matrix, layer), shape[-2:][::-1]
        if name not in stored:
            raise ModelError(f"{path}: tensor {name!r} of shape {wanted} is missing")
        tensor = stored.pop(name)
        if tensor.shape != wanted:
            raise ModelError(
                f"{path}: tensor {name!r} has shape {tensor.shape}, expected {wanted}: the "
                f"adapter is of another base or of another rank than r = {settings['r']}"
            )
        return np.asarray(tensor, np.float32).T

    def layered(leaf: str, matrix: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(np.stack([read(leaf, matrix, shape, i) for i in range(shape[0])]))

    weights: Any = {
        "layers": {
            leaf: {matrix: layered(leaf, matrix, shape) for matrix, shape in pair.items()}
            for leaf, pair in expected["layers"].items()
        }
    }
    for leaf, pair in expected.items():
        if leaf != "layers":
            weights[leaf] = {m: jnp.asarray(read(leaf, m, s, None)) for m, s in pair.items()}
    if stored:
        extra = ", ".join(map(repr, sorted(stored)[:3]))
        raise ModelError(f"{path}: {len(stored)} unexpected tensor(s): {extra}")
    return lora.Adapter(
        weights,
        rank=settings["r"],
        alpha=float(settings["lora_alpha"]),
        rank_stabilized=bool(settings.get("use_rslora", False)),
        dropout=float(settings["lora_dropout"]),
    )


def _check_base(path: Path, stored: dict[str, np.ndarray], params: llama.Params) -> None:
    """PEFT writes the base's embedding and head beside their adapters; they must be ours."""
    for leaf, ours in (("embedding", params["embedding"]), ("head", llama.head(params))):
        name = f"base_model.model.{NAMES[leaf].removesuffix('.weight')}.base_layer.weight"
        theirs = stored.pop(name, None)
        if theirs is not None and not np.array_equal(theirs.astype(ours.dtype), np.asarray(ours)):
            raise ModelError(
                f"{path}: tensor {name!r} of shape {theirs.shape} is not that of the base, of "
                f"shape {ours.shape}: the adapter is of another base"
            )


def tensor_name(leaf: str, matrix: str, layer: int | None) -> str:
    """PEFT's name of a matrix (``a`` or ``b``) of a module."""
    base = NAMES[leaf if layer is None else f"layers/{leaf}"].format(layer=layer)
    module = "base_model.model." + base.removesuffix(".weight")
    kind = "lora_embedding_" + matrix.upper()
    return f"{module}.{kind}" if leaf == "embedding" else f"{module}.lora_{matrix.upper()}.weight"


def save_adapter(folder: Path, adapter: lora.Adapter, base: str) -> None:
    """Write an adapter; ``base`` is where its base model comes from.

    The weights come last and appear whole.
    """
    weights = adapter.weights
    modules = [lora.MODULES[leaf] for leaf in (*weights["layers"], *weights) if leaf != "layers"]
    tensors: dict[str, np.ndarray] = {}
    for leaf, pair in weights["layers"].items():
        for matrix, stacked in pair.items():
            for layer, tensor in enumerate(np.asarray(stacked, np.float32)):
                tensors[tensor_name(leaf, matrix, layer)] = np.ascontiguousarray(tensor.T)
    for leaf in (leaf for leaf in weights if leaf != "layers"):
        for matrix, tensor in weights[leaf].items():
            whole = np.ascontiguousarray(np.asarray(tensor, np.float32).T)
            tensors[tensor_name(leaf, matrix, None)] = whole
    local = not re.match(r"package:", base) and Path(base).exists()
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(Path(base).resolve()) if local else base,
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "use_rslora": adapter.rank_stabilized,
            "lora_dropout": adapter.dropout,
            "target_modules": modules,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
    )
    partial = folder / (WEIGHTS + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
