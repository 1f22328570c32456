"""Llama models in Hugging Face folders: ``config.json`` and ``.safetensors``, read and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors

from tunix.errors import ModelError
from tunix.models import loading
from tunix.models.llama import Llama3Scaling, LlamaConfig, Params
from tunix.text.tokenizer import read_json, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Where the weights are, in one file or in several."""

_LAYER = "model.layers.{layer}."
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers/attention_norm": _LAYER + "input_layernorm.weight",
    "layers/query": _LAYER + "self_attn.q_proj.weight",
    "layers/key": _LAYER + "self_attn.k_proj.weight",
    "layers/value": _LAYER + "self_attn.v_proj.weight",
    "layers/output": _LAYER + "self_attn.o_proj.weight",
    "layers/mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "layers/gate": _LAYER + "mlp.gate_proj.weight",
    "layers/up": _LAYER + "mlp.up_proj.weight",
    "layers/down": _LAYER + "mlp.down_proj.weight",
}
"""Tensor names of ``LlamaForCausalLM`` for the leaves of our tree."""

TOLERATED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Buffers that old versions of transformers saved; they follow from the config."""

SOURCE_DTYPES = {"F64", "F32", "F16", "BF16"}
SAVED_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}


def parse_config(content: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
    """Read the content of ``config.json``, in the form of transformers 4 or 5.

    Raises ``ModelError`` that names the field and its value where the model is of another
    architecture or uses something this implementation does not have, and lists what it has.
    """
    _refuse_unsupported(content, where)
    sizes = {ours: _whole(content, theirs, where) for ours, theirs in _SIZES.items()}
    heads = sizes["num_heads"]
    if content.get("head_dim") is None and sizes["hidden_size"] % heads:
        raise ModelError(
            f"{where}: hidden_size = {sizes['hidden_size']} is not a multiple of "
            f"num_attention_heads = {heads}, and there is no head_dim"
        )
    kv_heads = _whole(content, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: num_key_value_heads = {kv_heads} does not divide "
            f"num_attention_heads = {heads}"
        )
    theta, scaling = _rope(content, where)
    return LlamaConfig(
        **sizes,
        num_kv_heads=kv_heads,
        head_dim=_whole(content, "head_dim", where, sizes["hidden_size"] // heads),
        rms_norm_epsilon=float(content.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(content.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(content: Mapping[str, Any], where: str) -> None:
    architectures = content.get("architectures") or []
    family = content.get("model_type")
    if family != "llama" or (architectures and "LlamaForCausalLM" not in architectures):
        raise ModelError(
            f"{where}: model_type = {family!r}, architectures = {architectures!r} is not "
            "supported; supported: model_type 'llama' with 'LlamaForCausalLM'"
        )
    supported: dict[str, tuple] = {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "hidden_act": ("silu", "swish", None),
        "quantization_config": (None,),
    }
    for field, values in supported.items():
        if content.get(field) not in values:
            raise ModelError(
                f"{where}: {field} = {content[field]!r} is not supported; supported: {values[0]!r}"
            )


def _whole(content: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    """A positive whole number of the config; ``default`` where it is absent or null."""
    value = content.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{where}: {field} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {field} = {value!r}, expected a positive whole number")
    return value


def _rope(content: Mapping[str, Any], where: str) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling of RoPE; transformers 5 keeps both in ``rope_parameters``."""
    new = content.get("rope_parameters") or {}
    theta = float(new.get("rope_theta") or content.get("rope_theta") or 10000.0)
    field = "rope_parameters" if new else "rope_scaling"
    scaling = new or content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"{where}: {field} has rope_type {kind!r}, which is not supported; "
            "supported: 'default', 'llama3'"
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if scaling.get(key) is None]
    if missing:
        raise ModelError(f"{where}: {field} of type 'llama3' lacks {', '.join(missing)}")
    factor, low, high, positions = (scaling[key] for key in keys)
    return theta, Llama3Scaling(float(factor), float(low), float(high), int(positions))


def config_content(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Content of ``config.json`` for a model, readable by transformers 4 and 5."""
    scaling = config.rope_scaling
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    if scaling is not None:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return content


def load_config(folder: Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """Read ``config.json``; returns the config and the file's content.

    Raises ``ModelError`` where the folder has none, or as ``parse_config``.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json, so it is no Hugging Face model folder")
    content = read_json(path)
    return parse_config(content, str(path)), content


def load_params(folder: Path, config: LlamaConfig, dtype: str) -> Params:
    """Read one or several ``.safetensors`` into a tree in training form, tensor by tensor.

    Raises ``ModelError`` that names the file (absent, truncated) or the tensor (missing, extra,
    of another shape or of a dtype that is not a plain float).
    """
    with ExitStack() as files:
        stored: dict[str, loading.Stored] = {}
        for path, named in _weight_files(folder).items():
            found = dict(_open_weights(path, files))
            absent = sorted(named - found.keys())
            if absent:
                raise ModelError(
                    f"{path}: tensor {absent[0]!r} is missing, which {INDEX} says is there"
                )
            stored.update(found)
        duplicate = stored.pop("lm_head.weight", None) if config.tie_embeddings else None
        loading.check(config, stored, NAMES, TOLERATED, str(folder))
        if duplicate is not None:
            _check_duplicate(duplicate, stored[NAMES["embedding"]], folder)
        return loading.fill(config, stored, NAMES, dtype)


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """The files of a folder, each with the tensors that an index says are in it."""
    index = folder / INDEX
    paths: dict[Path, set[str]] = {}
    if index.is_file():
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise ModelError(f"{index} has no weight_map, a table of tensors and their files")
        for tensor, name in sorted(weights.items(), key=lambda item: str(item[1])):
            paths.setdefault(folder / str(name), set()).add(tensor)
    else:
        paths[folder / WEIGHTS] = set()
    for path in paths:
        if not path.is_file():
            source = f"; {INDEX} names it" if index.is_file() else ""
            raise ModelError(f"{path} does not exist{source}")
    return paths


def _open_weights(path: Path, files: ExitStack) -> Iterator[tuple[str, loading.Stored]]:
    """Map a file into memory and list its tensors; nothing is read yet."""
    try:
        handle = files.enter_context(safetensors.safe_open(str(path), framework="numpy"))
    except Exception as error:  # SafetensorError and OSError have no narrower base
        raise ModelError(f"{path} cannot be read, perhaps it is truncated: {error}") from error
    for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
        rows = handle.get_slice(name)
        if rows.get_dtype() not in SOURCE_DTYPES:
            raise ModelError(
                f"{path}: tensor {name!r} has dtype {rows.get_dtype()}, which is not supported; "
                f"supported: {', '.join(sorted(SOURCE_DTYPES))}"
            )
        read = lambda start, stop, rows=rows: rows[start:stop]  # noqa: E731
        yield name, loading.Stored(tuple(rows.get_shape()), read)


def _check_duplicate(head: loading.Stored, embedding: loading.Stored, folder: Path) -> None:
    """A stored head of a tied model must be the embedding, or one of the two would be lost."""
    step = max(1, loading.ROWS_AT_ONCE // embedding.shape[1])
    for start in range(0, embedding.shape[0], step):
        stop = min(start + step, embedding.shape[0])
        if head.shape != embedding.shape or not np.array_equal(
            head.read(start, stop), embedding.read(start, stop)
        ):
            raise ModelError(
                f"{folder}: tie_word_embeddings is true, but 'lm_head.weight' of shape "
                f"{head.shape} differs from 'model.embed_tokens.weight' of shape {embedding.shape}"
            )


def save_params(
    folder: Path, config: LlamaConfig, params: Params, max_shard_bytes: int | None = None
) -> None:
    """Write a tree in training form as one ``.safetensors`` file, tensor by tensor.

    With ``max_shard_bytes`` as several and an index, none larger than that unless a single tensor
    is. A file, and last of all the index, appears under its name only when it is complete.
    """
    parts = _shards(config, params["embedding"].dtype.itemsize, max_shard_bytes)
    if len(parts) == 1:
        _save_shard(folder / WEIGHTS, config, params, parts[0])
        (folder / INDEX).unlink(missing_ok=True)  # of what stood here before: it would win
        return
    files: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _save_shard(folder / file, config, params, part)
        files |= {name: file for name, _, _ in part}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    partial = folder / (INDEX + ".partial")
    write_json(partial, {"metadata": {"total_size": size}, "weight_map": files})
    os.replace(partial, folder / INDEX)


_Place = tuple[str, str, int]
"""A tensor's name in the file, the leaf it is of, and its layer there."""


def _shards(config: LlamaConfig, itemsize: int, most: int | None) -> list[list[_Place]]:
    """The tensors in the order of the file, cut where the next one would exceed ``most`` bytes."""
    parts: list[list[_Place]] = [[]]
    room = most
    for leaf in sorted(loading.leaf_names(config)):
        size = math.prod(loading.stored_shape(config, leaf)) * itemsize
        for layer, name in enumerate(loading.stored_names(config, NAMES, leaf)):
            if most is not None and room is not None:
                if size > room and parts[-1]:
                    parts.append([])
                    room = most
                room -= size
            parts[-1].append((name, leaf, layer))
    return parts


def _save_shard(path: Path, config: LlamaConfig, params: Params, part: list[_Place]) -> None:
    dtype = params["embedding"].dtype
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, leaf, _ in part:
        shape = loading.stored_shape(config, leaf)
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAVED_DTYPES[str(dtype)],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, leaf, layer in part:
            group, _, name = leaf.rpartition("/")
            tensor = np.asarray(params[group][name][layer] if group else params[name])
            matrix = tensor.T if name in loading.MATRICES else tensor
            file.write(np.ascontiguousarray(matrix).reshape(-1).view(np.uint8).data)
    os.replace(partial, path)


def save_config(folder: Path, content: dict[str, Any], generation: dict[str, Any]) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    write_json(folder / "config.json", content)
    write_json(folder / "generation_config.json", generation)
