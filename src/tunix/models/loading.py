"""Fill a parameter tree from stored tensors, one at a time, whatever the file format.

A format (``huggingface.py``, ``gguf.py``) says where each tensor is and how to read some of its
rows; here they are checked against the model's sizes, cast, transposed to ``x @ w`` and stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from tunix.errors import ModelError
from tunix.models.llama import LlamaConfig, Params, parameter_shapes

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""Target dtypes by the name a config or command line gives."""

ROWS_AT_ONCE = 2**22
"""Elements read at once: 16 MB in float32, so what is in flight is small beside any model."""

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Layer weights that files store ``[out, in]`` and that we keep ``[in, out]``."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape there, and ``read(start, stop)`` of rows of its first axis.

    ``row_order``, where given, is the row of the model that each stored row becomes.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    row_order: np.ndarray | None = None


def numpy_dtype(dtype: str) -> np.dtype:
    """Resolve a dtype name. Raises ``ModelError`` that lists the known ones."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[dtype])


def leaf_names(config: LlamaConfig) -> Iterator[str]:
    """Leaves of the training form as ``layers/query`` or ``embedding``, the largest first."""
    shapes = parameter_shapes(config)
    flat = {name: shape for name, shape in shapes.items() if name != "layers"}
    flat |= {f"layers/{name}": shape for name, shape in shapes["layers"].items()}
    yield from sorted(flat, key=lambda name: -int(np.prod(flat[name])))


def stored_shape(config: LlamaConfig, leaf: str) -> tuple[int, ...]:
    """Shape that a file gives a leaf (one layer of it), matrices being ``[out, in]``."""
    group, _, name = leaf.rpartition("/")
    shapes = parameter_shapes(config)
    shape = shapes["layers"][name][1:] if group else shapes[name]
    return shape[::-1] if name in MATRICES else shape


def stored_names(config: LlamaConfig, names: Mapping[str, str], leaf: str) -> list[str]:
    """Names in the file of the tensors that make up a leaf: one, or one per layer."""
    count = config.num_layers if leaf.startswith("layers/") else 1
    return [names[leaf].format(layer=i) for i in range(count)]


def check(
    config: LlamaConfig,
    stored: Mapping[str, Stored],
    names: Mapping[str, str],
    tolerated: str,
    where: str,
) -> None:
    """Compare the tensors of ``where`` with what the model needs, before anything is read.

    ``names`` maps leaves to patterns with ``{layer}``, ``tolerated`` is a regular expression of
    names that may be there unused. Raises ``ModelError`` naming the first tensor that is missing,
    wrongly shaped (with both shapes) or unexpected.
    """
    expected: set[str] = set()
    for leaf in leaf_names(config):
        shape = stored_shape(config, leaf)
        for name in stored_names(config, names, leaf):
            expected.add(name)
            if name not in stored:
                raise ModelError(f"{where}: tensor {name!r} of shape {shape} is missing")
            if stored[name].shape != shape:
                raise ModelError(
                    f"{where}: tensor {name!r} has shape {stored[name].shape}, expected {shape}"
                )
    extra = sorted(n for n in stored if n not in expected and not re.fullmatch(tolerated, n))
    if extra:
        listed = ", ".join(map(repr, extra[:3])) + (", ..." if len(extra) > 3 else "")
        raise ModelError(
            f"{where}: {len(extra)} unexpected tensor(s) {listed}: a Llama model of these sizes "
            "has no place for them"
        )


def fill(
    config: LlamaConfig, stored: Mapping[str, Stored], names: Mapping[str, str], dtype: str
) -> Params:
    """Read all tensors into a tree in training form; run ``check`` first.

    Each leaf is allocated once and handed to jax without a copy where jax can (CPU), so the peak
    is the model plus one small read; elsewhere one leaf is on the host at a time.
    """
    target = numpy_dtype(dtype)
    layers: Params = {}
    params: Params = {}
    for leaf in leaf_names(config):
        group, _, name = leaf.rpartition("/")
        files = [stored[tensor] for tensor in stored_names(config, names, leaf)]
        shape = stored_shape(config, leaf)
        transposed = name in MATRICES
        if transposed:
            shape = shape[::-1]
        array = _aligned((len(files), *shape), target)
        for i, tensor in enumerate(files):
            _fill_one(array[i], tensor, transposed)
        (layers if group else params)[name] = jax.device_put(array if group else array[0])
    return params | {"layers": layers}


def _fill_one(target: np.ndarray, tensor: Stored, transposed: bool) -> None:
    """Copy a stored tensor into its place by groups of rows."""
    rows = tensor.shape[0]
    step = max(1, ROWS_AT_ONCE // max(1, int(np.prod(tensor.shape[1:]))))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        place = slice(start, stop) if tensor.row_order is None else tensor.row_order[start:stop]
        block = tensor.read(start, stop)
        if transposed:
            target[:, place] = block.T
        else:
            target[place] = block


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a 64-byte boundary, which jax on CPU takes over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)
