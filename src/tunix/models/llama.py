"""The Llama family (Llama 2 and 3.x, SmolLM2): pure functions over a plain parameter tree.

One layer function serves training (packed rows, layers stacked and scanned) and generation (a
key/value cache, layers unrolled); the two differ only in the ``attend`` function they hand to it.

Parameter tree, training form; ``x @ w`` everywhere, so weights are ``[in, out]``::

    embedding                    [vocab, embed]
    layers/attention_norm        [layer, embed]
    layers/query                 [layer, embed, heads*head_dim]
    layers/key, layers/value     [layer, embed, kv_heads*head_dim]
    layers/output                [layer, heads*head_dim, embed]
    layers/mlp_norm              [layer, embed]
    layers/gate, layers/up       [layer, embed, mlp]
    layers/down                  [layer, mlp, embed]
    final_norm                   [embed]
    head                         [vocab, embed]; absent where embeddings are tied

The generation form (``unstack``) has ``layers`` as a list of per-layer dictionaries whose matrices
are transposed, ``[out, in]``. That is not taste: measured with XLA on CPU, a row of ``x @ w`` with
``w`` as ``[in, out]`` changes its last bits with the number of rows (another kernel from 24, 48 or
64 rows on), while with ``[out, in]`` it is bit-equal for every number of rows from 8 up. The same
holds for long reductions (another kernel from 4096 elements on), so the generation form adds in an
order of its own, ``fixed_order_sum``. Together they make a generated token independent of the
batch it was generated in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from tunix.models import lora
from tunix.models.attention import (
    cached_attention,
    fixed_order_sum,
    packed_attention,
    write_cache,
)

Params = dict[str, Any]
Cache = list[tuple[Array, Array]]
"""Per layer: keys ``[slots, kv_heads, head_dim, positions]``, values ``[slots, kv_heads,
positions, head_dim]``; keys are stored positions-minor because that is the faster operand."""

KEPT_ACTIVATIONS = 2**30
"""Bytes of activations that are kept rather than recomputed: a recomputation costs a third more."""

Attend = Callable[[Array, Array, Array], Array]

Adapt = Callable[[str, Array, Array], Array]
"""``adapt(name, x, y)``: what the matrix ``name`` gives for input ``x``, ``y`` being ``x @ w``."""


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 and later: long wavelengths are stretched by ``factor``."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    tie_embeddings: bool = False


def parameter_shapes(config: LlamaConfig) -> Params:
    """Return the training-form tree with a shape tuple at each leaf."""
    c = config
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {
        "attention_norm": (c.hidden_size,),
        "query": (c.hidden_size, width),
        "key": (c.hidden_size, kv_width),
        "value": (c.hidden_size, kv_width),
        "output": (width, c.hidden_size),
        "mlp_norm": (c.hidden_size,),
        "gate": (c.hidden_size, c.intermediate_size),
        "up": (c.hidden_size, c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
    }
    shapes: Params = {
        "embedding": (c.vocab_size, c.hidden_size),
        "layers": {name: (c.num_layers, *shape) for name, shape in layer.items()},
        "final_norm": (c.hidden_size,),
    }
    if not c.tie_embeddings:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    return shapes


def initialize(
    key: PRNGKeyArray,
    config: LlamaConfig,
    dtype: Any = jnp.float32,
    embedding_deviation: float = 0.02,
) -> Params:
    """Draw a fresh model in training form.

    Norms are 1, embeddings normal with ``embedding_deviation``, a head of its own with 0.02,
    matrices normal with deviation ``in ** -0.5``; the two that write into the residual stream are
    smaller by ``(2 * layers) ** -0.5`` (Radford et al. 2019, GPT-2, section 2.3).
    """
    shapes = parameter_shapes(config)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    drawn = []
    for (path, shape), k in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        name = path[-1].key
        if name.endswith("norm"):
            drawn.append(jnp.ones(shape, dtype))
            continue
        deviation = shape[-2] ** -0.5
        if name in ("embedding", "head"):
            deviation = embedding_deviation if name == "embedding" else 0.02
        if name in ("output", "down"):
            deviation *= (2 * config.num_layers) ** -0.5
        drawn.append((jax.random.normal(k, shape) * deviation).astype(dtype))
    return jax.tree_util.tree_unflatten(treedef, drawn)


def unstack(params: Params) -> Params:
    """Turn the training form into the generation form: fresh buffers, nothing is shared."""

    def one(i: int) -> Params:
        # A copy even of what needs no change: jit would hand the trainer's own buffer on.
        return jax.tree.map(lambda leaf: jnp.copy(leaf[i].T), params["layers"])

    num_layers = params["layers"]["query"].shape[0]
    rest = {name: jnp.copy(leaf) for name, leaf in params.items() if name != "layers"}
    return rest | {"layers": [one(i) for i in range(num_layers)]}


def head(params: Params) -> Float[Array, "vocab embed"]:
    """Return the output projection; it is the embedding where the two are tied."""
    return params.get("head", params["embedding"])


def rms_norm(
    x: Float[Array, "*batch embed"],
    weight: Float[Array, " embed"],
    epsilon: float,
    *,
    fixed_order: bool = False,
) -> Float[Array, "*batch embed"]:
    """Root-mean-square norm (Zhang and Sennrich 2019, eq. 4), in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if fixed_order:
        mean = fixed_order_sum(wide * wide)[..., None] / x.shape[-1]
    else:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return weight * (wide * jax.lax.rsqrt(mean + epsilon)).astype(x.dtype)


def linear(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "_ _"], *, fixed_order: bool = False
) -> Float[Array, "*batch outputs"]:
    """``x @ weight``; the weight is ``[in, out]``, or ``[out, in]`` where ``fixed_order``."""
    return jnp.einsum("...i,oi->...o", x, weight) if fixed_order else x @ weight


def rope_frequencies(config: LlamaConfig) -> Float[Array, " half"]:
    """Angular frequency of each pair of a head, radians per position (Su et al. 2021, eq. 15).

    With Llama-3 scaling, wavelengths over ``original_max_positions / low_frequency_factor`` are
    stretched by ``factor``, those under ``/ high_frequency_factor`` kept, in between blended.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** -(jnp.arange(half) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rope_angles(
    config: LlamaConfig, positions: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of the rotation of each pair at each position."""
    angle = positions[..., None] * rope_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate the pairs ``(x[i], x[i + half])`` of each head: half-split RoPE."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(
    config: LlamaConfig,
    weights: Params,
    x: Float[Array, "*batch embed"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
    attend: Attend,
    *,
    adapt: Adapt | None = None,
    fixed_order: bool = False,
) -> Float[Array, "*batch embed"]:
    """One transformer block.

    ``attend(query, key, value)`` maps per-head arrays ``[*batch, heads | kv_heads, head_dim]``
    to a context ``[*batch, heads, head_dim]``. ``adapt`` adds an adapter. ``fixed_order`` says
    that ``weights`` are in generation form and that no result may depend on the number of rows.
    """
    batch = x.shape[:-1]

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, weights[name], config.rms_norm_epsilon, fixed_order=fixed_order)

    def project(x: Array, name: str) -> Array:
        y = linear(x, weights[name], fixed_order=fixed_order)
        return y if adapt is None else adapt(name, x, y)

    h = norm(x, "attention_norm")
    query = project(h, "query").reshape(*batch, config.num_heads, config.head_dim)
    key = project(h, "key").reshape(*batch, config.num_kv_heads, config.head_dim)
    value = project(h, "value").reshape(*batch, config.num_kv_heads, config.head_dim)
    context = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
    x = x + project(context.reshape(*batch, -1), "output")
    h = norm(x, "mlp_norm")
    return x + project(jax.nn.silu(project(h, "gate")) * project(h, "up"), "down")


def activation_bytes(config: LlamaConfig, tokens: int) -> int:
    """Rough size in float32 of what all layers keep for the backward pass, attention apart."""
    each = 8 * config.hidden_size + 4 * config.intermediate_size
    return 4 * config.num_layers * tokens * each


def hidden_states(
    config: LlamaConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    adapter: lora.Adapter | None = None,
    dropout_keys: Shaped[Array, "rows length"] | None = None,
) -> Float[Array, "rows length embed"]:
    """Training form: final-norm outputs of packed rows.

    A token sees the earlier tokens of its own segment; ``hidden[:, t]`` predicts
    ``tokens[:, t + 1]``. The layers are scanned. Where their activations are large they are
    recomputed in the backward pass, so that those that live at once are one layer's plus
    ``[layers, rows, length, embed]``. With an ``adapter``, ``dropout_keys`` (``lora.token_keys``)
    switch its dropout on.
    """
    cos, sin = rope_angles(config, positions)

    def attend(query: Array, key: Array, value: Array) -> Array:
        return packed_attention(query, key, value, segment_ids)

    def block(x: Array, scanned: tuple[Params, Params, Array]) -> tuple[Array, None]:
        weights, pairs, number = scanned

        def adapt(name: str, x: Array, y: Array) -> Array:
            if adapter is None or name not in pairs:
                return y
            place = number * len(lora.MODULES) + list(lora.MODULES).index(name)
            return lora.add(adapter, pairs[name], x, y, dropout_keys, place)

        return layer(config, weights, x, cos, sin, attend, adapt=adapt), None

    if activation_bytes(config, tokens.size) > KEPT_ACTIVATIONS:
        block = jax.checkpoint(block)
    pairs = {} if adapter is None else adapter.weights["layers"]
    scanned = (params["layers"], pairs, jnp.arange(config.num_layers))
    x, _ = jax.lax.scan(block, embed(params, tokens, adapter), scanned)
    return rms_norm(x, params["final_norm"], config.rms_norm_epsilon)


def embed(
    params: Params, tokens: Int[Array, "*batch"], adapter: lora.Adapter | None = None
) -> Float[Array, "*batch embed"]:
    """Look token embeddings up; the adapter's share of them is looked up and projected."""
    x = params["embedding"][tokens]
    if adapter is None or "embedding" not in adapter.weights:
        return x
    pair = adapter.weights["embedding"]
    return x + (adapter.scale * (pair["a"][tokens] @ pair["b"])).astype(x.dtype)


def projection(
    params: Params,
    hidden: Float[Array, "rows length embed"],
    adapter: lora.Adapter | None = None,
    dropout_keys: Shaped[Array, "rows length"] | None = None,
) -> tuple[Float[Array, "rows length inner"], Float[Array, "vocab inner"]]:
    """Hidden states and head whose product is the logits.

    An adapter on the head widens both: ``[h, s h A] @ [W, B].T = h W.T + s h A B``.
    """
    if adapter is None or "head" not in adapter.weights:
        return hidden, head(params)
    pair = adapter.weights["head"]
    low = lora.low_rank_input(adapter, pair, hidden, dropout_keys, 2**31).astype(hidden.dtype)
    low_head = pair["b"].T.astype(hidden.dtype)
    return jnp.concatenate([hidden, low], -1), jnp.concatenate([head(params), low_head], -1)


def new_cache(config: LlamaConfig, slots: int, positions: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache for ``slots`` sequences of up to ``positions`` tokens."""
    kv, width = config.num_kv_heads, config.head_dim
    return [
        (
            jnp.zeros((slots, kv, width, positions), dtype),
            jnp.zeros((slots, kv, positions, width), dtype),
        )
        for _ in range(config.num_layers)
    ]


def cached_hidden_states(
    config: LlamaConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    slots: Int[Array, " rows"],
    cache: Cache,
    window: int,
    adapters: Sequence[lora.Adapter] = (),
    adapter_index: Int[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows length embed"], Cache]:
    """Generation form: run ``length`` new tokens of some slots and write their keys and values.

    Decoding is ``length == 1``, a chunk of prompt is ``length > 1``; ``params`` is ``unstack``'s.
    Each token sees the positions up to its own among the first ``window`` of its slot's cache.
    Positions outside the cache are not written: that is how a row is made to leave no trace.
    ``adapters`` are in generation form; row r uses number ``adapter_index[r]`` of them, from 1,
    and the bare base where that is 0.
    """
    cos, sin = rope_angles(config, positions)

    def chosen(y: Array, number: int, adapted: Array) -> Array:
        assert adapter_index is not None
        return jnp.where(adapter_index[:, None, None] == number, adapted, y)

    x = params["embedding"][tokens]
    for number, one in enumerate(adapters, 1):
        pair = one.weights.get("embedding")
        if pair is not None:
            low = pair["a"][tokens]
            x = chosen(x, number, lora.add_low_transposed(one, pair, low, x))
    written: Cache = []
    for i, (weights, (keys, values)) in enumerate(zip(params["layers"], cache, strict=True)):

        def adapt(name: str, x: Array, y: Array, i=i) -> Array:
            result = y
            for number, one in enumerate(adapters, 1):
                pair = one.weights["layers"][i].get(name)
                if pair is not None:
                    result = chosen(result, number, lora.add_transposed(one, pair, x, y))
            return result

        def attend(query: Array, key: Array, value: Array, keys=keys, values=values) -> Array:
            updated = write_cache(keys, values, key, value, slots, positions)
            written.append(updated)
            return cached_attention(query, *updated, slots, positions, window)

        x = layer(config, weights, x, cos, sin, attend, adapt=adapt, fixed_order=True)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_epsilon, fixed_order=True)
    return hidden, written


def logits(
    params: Params,
    hidden: Float[Array, "*batch embed"],
    adapters: Sequence[lora.Adapter] = (),
    adapter_index: Int[Array, "*batch"] | None = None,
) -> Float[Array, "*batch vocab"]:
    """Project hidden states to the vocabulary, accumulating in at least float32.

    ``adapters`` and ``adapter_index`` as in ``cached_hidden_states``.
    """
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    result = jnp.einsum("...d,vd->...v", hidden, head(params), preferred_element_type=accumulate)
    for number, one in enumerate(adapters, 1):
        if "head" in one.weights:
            assert adapter_index is not None
            adapted = lora.add_transposed(one, one.weights["head"], hidden, result)
            result = jnp.where(adapter_index[..., None] == number, adapted, result)
    return result


def full_logits(
    config: LlamaConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    valid: Bool[Array, "rows length"] | None = None,
    adapter: lora.Adapter | None = None,
) -> Float[Array, "rows length vocab"]:
    """Logits at every position of plain right-padded rows: for tests and small inspections."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones_like(tokens) if valid is None else valid.astype(jnp.int32)
    hidden = hidden_states(config, params, tokens, positions, segments, adapter)
    inner, matrix = projection(params, hidden, adapter)
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("...d,vd->...v", inner, matrix, preferred_element_type=accumulate)
