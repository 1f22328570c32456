"""Low-rank adaptation (Hu et al. 2021, LoRA, arXiv 2106.09685): h = x W + s · dropout(x) A B.

An adapter is a second parameter tree beside an untouched base (section 4.1, eq. 3, with our
``x @ w`` order). A starts random and B at zero, so a fresh adapter changes nothing; the scale s is
alpha / rank, or alpha / sqrt(rank) where rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732).
``weights``, training form, for the modules that the adapter has::

    layers/NAME/a   [layer, in, rank]    layers/NAME/b   [layer, rank, out]
    embedding/a     [vocab, rank]        embedding/b     [rank, embed]
    head/a          [embed, rank]        head/b          [rank, vocab]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from tunix.errors import ConfigError, nearest

MODULES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "embedding": "embed_tokens",
    "head": "lm_head",
}
"""Modules that can carry an adapter: our leaf, and the name by which users and PEFT know it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """Low-rank matrices and how strongly they count."""

    weights: Any
    rank: int = field(metadata={"static": True})
    alpha: float = field(metadata={"static": True})
    rank_stabilized: bool = field(default=False, metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})
    """Share of inputs that are zeroed in training; without token keys nothing is dropped."""

    @property
    def scale(self) -> float:
        """s: what the product of the matrices is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def matched(patterns: list[str]) -> list[str]:
    """Leaves that the patterns (``*_proj``, ``lm_head`` …) name.

    Raises:
        ConfigError: a pattern that matches no module of the model.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in MODULES.values()):
            raise ConfigError(
                f"lora_targets: {pattern!r} matches no module{nearest(pattern, MODULES.values())}; "
                f"modules: {', '.join(MODULES.values())}"
            )
    return [leaf for leaf, n in MODULES.items() if any(fnmatchcase(n, p) for p in patterns)]


def adapter_shapes(base: Any, leaves: list[str], rank: int) -> Any:
    """Tree of an adapter over ``leaves`` with a shape at each place; ``base``: the model's."""
    tree: Any = {"layers": {}}
    for leaf in leaves:
        if leaf in base["layers"]:
            layers, inner, outer = base["layers"][leaf]
            tree["layers"][leaf] = {"a": (layers, inner, rank), "b": (layers, rank, outer)}
        else:  # a tied head has the embedding's shape
            vocab, embed = base["embedding"]
            inner, outer = (vocab, embed) if leaf == "embedding" else (embed, vocab)
            tree[leaf] = {"a": (inner, rank), "b": (rank, outer)}
    return tree


def initialize(key: PRNGKeyArray, shapes: Any, dtype: Any) -> Any:
    """Fresh weights, as PEFT draws them: A uniform within ± in ** -0.5, B zero.

    For the embedding it is the other way round, since A is looked up and not multiplied.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=_is_shape)
    drawn = []
    for (path, shape), k in zip(flat, jax.random.split(key, len(flat)), strict=True):
        random = "b" if path[0].key == "embedding" else "a"
        bound = shape[-2] ** -0.5 if path[-1].key == random else 0.0
        drawn.append(jax.random.uniform(k, shape, minval=-bound, maxval=bound).astype(dtype))
    return jax.tree_util.tree_unflatten(treedef, drawn)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def token_keys(
    key: PRNGKeyArray, sequences: Int[Array, "rows length"], positions: Int[Array, "rows length"]
) -> Shaped[Array, "rows length"]:
    """One key a token, ``[rows, length]``: dropout must not depend on how rows were packed."""
    fold = jax.vmap(jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(key, s), p)))
    return fold(sequences, positions)


def dropped(
    x: Float[Array, "rows length inputs"],
    keys: Shaped[Array, "rows length"],
    number: int | Array,
    share: float,
) -> Float[Array, "rows length inputs"]:
    """Zero a share of each token's inputs and stretch the rest; ``number`` names the module."""

    def one(x: Array, key: Array) -> Array:
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - share, x.shape)
        return jnp.where(kept, x / (1 - share), 0)

    return jax.vmap(jax.vmap(one))(x, keys)


def low_rank_input(
    adapter: Adapter,
    pair: Any,
    x: Float[Array, "rows length inputs"],
    keys: Shaped[Array, "rows length"] | None,
    number: int | Array,
) -> Float[Array, "rows length rank"]:
    """``s · dropout(x) A``; nothing is dropped without ``keys``."""
    if keys is not None and adapter.dropout > 0:
        x = dropped(x, keys, number, adapter.dropout)
    return adapter.scale * (x @ pair["a"])


def add(
    adapter: Adapter,
    pair: Any,
    x: Float[Array, "rows length inputs"],
    y: Float[Array, "rows length outputs"],
    keys: Shaped[Array, "rows length"] | None,
    number: int | Array,
) -> Float[Array, "rows length outputs"]:
    """``y + s · dropout(x) A B`` in training form; ``number`` tells modules apart."""
    return y + (low_rank_input(adapter, pair, x, keys, number) @ pair["b"]).astype(y.dtype)


def unstack(adapter: Adapter, num_layers: int) -> Adapter:
    """Return the generation form: ``layers`` a list, matrices ``[out, in]``, fresh buffers."""

    def one(i: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.copy(leaf[i].T), adapter.weights["layers"])

    new: Any = {"layers": [one(i) for i in range(num_layers)]}
    if "embedding" in adapter.weights:
        a, b = adapter.weights["embedding"]["a"], adapter.weights["embedding"]["b"]
        new["embedding"] = {"a": jnp.copy(a), "b": jnp.copy(b.T)}  # a is looked up by rows
    if "head" in adapter.weights:
        new["head"] = jax.tree.map(lambda leaf: jnp.copy(leaf.T), adapter.weights["head"])
    return replace(adapter, weights=new)


def add_transposed(
    adapter: Adapter, pair: Any, x: Float[Array, "*batch inputs"], y: Float[Array, "*batch outputs"]
) -> Float[Array, "*batch outputs"]:
    """``y + s · x A B`` in generation form: no result depends on the number of rows."""
    return add_low_transposed(adapter, pair, jnp.einsum("...i,ri->...r", x, pair["a"]), y)


def add_low_transposed(
    adapter: Adapter, pair: Any, low: Float[Array, "*batch rank"], y: Float[Array, "*batch outputs"]
) -> Float[Array, "*batch outputs"]:
    """``y + s · low B`` in generation form."""
    return y + jnp.einsum("...r,or->...o", adapter.scale * low, pair["b"]).astype(y.dtype)


def merge(params: Any, adapter: Adapter) -> Any:
    """Base weights with the adapter added in, ``W + s A B``, in training form and base dtype."""

    def added(weight: Array, pair: Any, transposed: bool = False) -> Array:
        product = adapter.scale * jnp.matmul(pair["a"], pair["b"], precision="highest")
        return (weight + (product.T if transposed else product)).astype(weight.dtype)

    new = dict(params)
    layers = {n: added(params["layers"][n], p) for n, p in adapter.weights["layers"].items()}
    new["layers"] = params["layers"] | layers
    if "embedding" in adapter.weights:
        new["embedding"] = added(params["embedding"], adapter.weights["embedding"])
    if "head" in adapter.weights:
        new["head"] = added(params.get("head", params["embedding"]), adapter.weights["head"], True)
    elif "embedding" in adapter.weights and "head" not in params:
        new["head"] = params["embedding"]  # it was tied to what the adapter left alone
    return new
