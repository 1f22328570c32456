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

UNSUPPORTED = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}
"""Settings of PEFT that change what an adapter means, with the values that do not."""


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
    for field, neutral in UNSUPPORTED.items():
        if content.get(field) not in neutral:
            raise ModelError(
                f"{path}: {field} = {content[field]!r} is not supported; supported: {neutral[0]!r}"
            )
    rank = content.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{path}: r = {rank!r}, expected a positive whole number")
    if not content.get("base_model_name_or_path"):
        raise ModelError(f"{path}: base_model_name_or_path is missing; it names the base model")
    return content


def load_adapter(folder: Path, config: llama.LlamaConfig) -> lora.Adapter:
    """Read an adapter for a base of these sizes; weights become float32.

    Raises:
        ModelError: the files cannot be read, or a tensor is missing, unknown or of a shape that
            does not fit the base or the rank.
    """
    settings, path = read_settings(folder), folder / WEIGHTS
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
        alpha=float(settings.get("lora_alpha", 8)),
        rank_stabilized=bool(settings.get("use_rslora", False)),
        dropout=float(settings.get("lora_dropout", 0.0)),
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
