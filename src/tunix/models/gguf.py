"""Llama models in GGUF files: weights, config, tokenizer, all from the one file.

The header is read here (the ``gguf`` library makes an array object of every number and string of
a vocabulary, seconds and a hundred megabytes for 49,000 tokens); quantised blocks are turned into
floats by the library. Layout: the specification in ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from tunix.errors import ModelError
from tunix.models import loading
from tunix.models.gguf_tokenizer import tokenizer_from_metadata
from tunix.models.llama import Llama3Scaling, LlamaConfig, Params, rope_frequencies
from tunix.text.tokenizer import Tokenizer

_LAYER = "blk.{layer}."
NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers/attention_norm": _LAYER + "attn_norm.weight",
    "layers/query": _LAYER + "attn_q.weight",
    "layers/key": _LAYER + "attn_k.weight",
    "layers/value": _LAYER + "attn_v.weight",
    "layers/output": _LAYER + "attn_output.weight",
    "layers/mlp_norm": _LAYER + "ffn_norm.weight",
    "layers/gate": _LAYER + "ffn_gate.weight",
    "layers/up": _LAYER + "ffn_up.weight",
    "layers/down": _LAYER + "ffn_down.weight",
}
"""Tensor names of llama.cpp's architecture ``llama`` for the leaves of our tree."""

SUPPORTED = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
]
"""Tensor types that can be read."""

SCALING_FACTORS = "rope_freqs.weight"
"""Divisors of the RoPE frequencies; llama.cpp stores Llama 3 scaling in this form only."""

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFFile:
    """An open file: its metadata, and its tensors ready to be read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, loading.Stored]


class _Header:
    """Reads the values of a GGUF header one after the other."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise ValueError("the file ends within its header")
        return self.data[start : self.position].tobytes()

    def numbers(self, form: str, count: int = 1) -> tuple:
        """The next ``count`` little-endian numbers of a ``struct`` format."""
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(form)))

    def string(self) -> str:
        """A string: its length in bytes, then UTF-8."""
        return self.take(self.numbers("Q")[0]).decode("utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value of the given type; arrays become lists."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            inner, count = self.numbers("I")[0], self.numbers("Q")[0]
            if inner in (GGUFValueType.STRING, GGUFValueType.ARRAY):
                return [self.value(inner) for _ in range(count)]
            return list(self.numbers(_SCALARS[GGUFValueType(inner)], count))
        return self.numbers(_SCALARS[GGUFValueType(kind)])[0]


def open_gguf(path: Path) -> GGUFFile:
    """Map a file into memory and read its header; no tensor is read yet.

    Raises ``ModelError`` naming the file where it is no GGUF file, truncated, of another
    architecture than llama, or holds a tensor type that is not supported.
    """
    try:
        data = np.memmap(path, mode="r").view(np.ndarray)
        header = _Header(data)
        if header.take(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        (version,) = header.numbers("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, supported: 2, 3")
        tensor_count, value_count = header.numbers("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = header.string()
            metadata[key] = header.value(header.numbers("I")[0])
        tensors = _list_tensors(path, header, tensor_count, metadata.get("general.alignment", 32))
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}") from error
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{path}: general.architecture = {architecture!r} is not supported; supported: 'llama'"
        )
    return GGUFFile(path, metadata, tensors)


def _list_tensors(
    path: Path, header: _Header, count: int, alignment: int
) -> dict[str, loading.Stored]:
    infos = []
    for _ in range(count):
        name = header.string()
        dimensions = header.numbers("Q", header.numbers("I")[0])
        kind, offset = header.numbers("I")[0], header.numbers("Q")[0]
        infos.append((name, dimensions[::-1], kind, offset))  # the file lists the fastest first
    base = -(-header.position // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in infos:
        known = number in [member.value for member in GGMLQuantizationType]
        kind = GGMLQuantizationType(number) if known else None
        if kind is None or kind.name not in SUPPORTED:
            raise ModelError(
                f"{path}: tensor {name!r} is quantised as {kind.name if kind else number}, which "
                f"is not supported; supported: {', '.join(SUPPORTED)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ModelError(
                f"{path}: tensor {name!r} of type {kind.name} has shape {shape}, expected rows of "
                f"a multiple of {block} numbers"
            )
        size = int(np.prod(shape)) // block * block_bytes
        start = base + offset
        if start + size > len(header.data):
            raise ModelError(
                f"{path} is truncated: tensor {name!r} ends at byte {start + size}, but the file "
                f"has {len(header.data)}"
            )
        blocks = header.data[start : start + size].reshape(shape[0], -1)
        tensors[name] = loading.Stored(shape, _reader(blocks, kind, shape))
    return tensors


def _reader(blocks: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]):
    """A function that turns some rows of a tensor's bytes into float32."""

    def read(start: int, stop: int) -> np.ndarray:
        return dequantize(blocks[start:stop], kind).reshape(stop - start, *shape[1:])

    return read


def read_config(file: GGUFFile) -> LlamaConfig:
    """Model sizes from the metadata. Raises ``ModelError`` naming a missing or unusable key."""

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{key}", default)
        if value is None:
            raise ModelError(f"{file.path}: metadata llama.{key} is missing")
        return value

    embedding = file.tensors.get(NAMES["embedding"])
    if embedding is None:
        raise ModelError(f"{file.path}: tensor {NAMES['embedding']!r} is missing")
    kind = get("rope.scaling.type", "none")
    if kind != "none":
        raise ModelError(
            f"{file.path}: llama.rope.scaling.type = {kind!r} is not supported; supported: 'none', "
            "and Llama 3 scaling as a tensor"
        )
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", width // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{file.path}: llama.rope.dimension_count = {get('rope.dimension_count')} is not "
            f"supported; supported: the whole head, {head_dim}"
        )
    config = LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=get("context_length"),
        rms_norm_epsilon=_shortest(get("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(get("rope.freq_base", 10000.0)),
        tie_embeddings=NAMES["head"] not in file.tensors,
    )
    if SCALING_FACTORS in file.tensors:
        factors = file.tensors[SCALING_FACTORS]
        return _with_scaling(config, factors.read(0, factors.shape[0]), file.path)
    return config


def _shortest(value: float) -> float:
    """Metadata is float32, so 1e-5 arrives as 9.999999747e-06: take the shortest equal decimal."""
    return float(str(np.float32(value)))


def _with_scaling(config: LlamaConfig, factors: np.ndarray, path: Path) -> LlamaConfig:
    """Recover Llama 3 scaling from its divisors: all models of the family share these constants."""
    scaling = Llama3Scaling(_shortest(float(factors.max())), 1.0, 4.0, 8192)
    scaled = replace(config, rope_scaling=scaling)
    with jax.enable_x64(True):
        expected = np.asarray(rope_frequencies(config) / rope_frequencies(scaled))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            f"{path}: tensor {SCALING_FACTORS!r} is not Llama 3 scaling with low_freq_factor 1, "
            "high_freq_factor 4 and 8192 original positions, which is the one supported"
        )
    return scaled


def read_generation(file: GGUFFile) -> dict[str, Any]:
    """The ids that end a turn, as ``generation_config.json`` would state them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return {"eos_token_id": sorted({i for i in ids if i is not None})}


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """Tokenizer, special tokens and chat template from the metadata; None if it has none."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return None
    return tokenizer_from_metadata(file.metadata, str(file.path))


def read_params(file: GGUFFile, config: LlamaConfig, dtype: str) -> Params:
    """Dequantise into a tree in training form, tensor by tensor.

    The rows of queries and keys return to half-split order (llama.cpp interleaves the pairs of
    RoPE). Raises ``ModelError`` naming a tensor that is missing, unexpected or of another shape.
    """
    stored = dict(file.tensors)
    stored.pop(SCALING_FACTORS, None)
    loading.check(config, stored, NAMES, r"", str(file.path))
    for leaf, heads in (("query", config.num_heads), ("key", config.num_kv_heads)):
        order = half_split_order(heads, config.head_dim)
        for name in loading.stored_names(config, NAMES, f"layers/{leaf}"):
            stored[name] = replace(stored[name], row_order=order)
    return loading.fill(config, stored, NAMES, dtype)


def half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """For each interleaved row, ``2 i + j`` of a head, its row ``j * head_dim / 2 + i`` in ours."""
    rows = np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)
