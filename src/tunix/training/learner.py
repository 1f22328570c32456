"""The learner: exact accumulation over micro-batches, one optimizer update, no algorithm names.

It gets a packed batch whose token weights already hold the global denominators, and a function
from the policy's outputs to per-token losses. Gradients of micro-batches are summed, never
averaged, so how an update is cut into micro-batches changes memory and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from tunix.datasets.batch import Batch, micro_batches, select
from tunix.losses.aggregate import weighted_sum
from tunix.losses.logprobs import token_logprobs
from tunix.models import llama, lora

Sums = dict[str, tuple[Array, Array]]
"""Metrics as (sum, count), so that they add up over micro-batches; the mean is taken at the end."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyOutputs:
    """What the policy says of each action token of a batch; 0 everywhere else."""

    logprobs: Float[Array, "rows length"]
    """Log-probability in nats under ``temperature``, full support."""
    entropy: Float[Array, "rows length"]
    """Entropy in nats of the distribution the token was drawn from."""


LossFunction = Callable[[PolicyOutputs, Batch], tuple[Float[Array, "rows length"], Sums]]
"""Per-token losses ``[rows, length]`` and metrics; the learner applies weights and mask."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that an update changes."""

    params: Any
    """What is trained, in at least float32: the model's parameters, or the adapter's weights."""
    optimizer_state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What training leaves alone: the type of computation, and the base under an adapter."""

    dtype: Any = field(metadata={"static": True})
    """Parameters are cast to it for each pass: a step of Adam would be lost in bfloat16."""
    base: Any = None
    adapter: lora.Adapter | None = None
    """The adapter's settings; its ``weights`` are what is trained."""

    def combined(self, trained: Any) -> tuple[Any, lora.Adapter | None]:
        """Parameters and adapter of the policy that ``trained`` makes."""
        if self.adapter is not None:
            return self.base, replace(self.adapter, weights=trained)
        same = lambda leaf: leaf if leaf.dtype == self.dtype else leaf.astype(self.dtype)  # noqa: E731
        return jax.tree.map(same, trained), None


def masked_sums(mask: Array, values: dict[str, Array]) -> Sums:
    """Return each of ``values`` as (sum over ``mask``, number of tokens in ``mask``)."""
    count = mask.sum()
    return {name: (jnp.where(mask, value, 0).sum(), count) for name, value in values.items()}


def policy_outputs(
    model: llama.LlamaConfig,
    params: Any,
    batch: Batch,
    temperature: float,
    actions: int,
    adapter: lora.Adapter | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> PolicyOutputs:
    """Run packed rows; project only the (at most ``actions``) action positions to the vocabulary.

    ``hidden[row, t - 1]`` predicts ``tokens[row, t]``: the shift happens here and nowhere else.
    """
    keys = None
    if dropout_key is not None:
        keys = lora.token_keys(dropout_key, batch.sequence_ids, batch.positions)
    hidden = llama.hidden_states(
        model, params, batch.tokens, batch.positions, batch.segment_ids, adapter, keys
    )
    hidden, head = llama.projection(params, hidden, adapter, keys)
    size = batch.tokens.size
    mask = jnp.asarray(batch.action_mask).at[:, 0].set(False).reshape(-1)
    where = jnp.flatnonzero(mask, size=actions, fill_value=size)
    before = hidden.reshape(size, -1).at[where - 1].get(mode="clip")
    targets = jnp.asarray(batch.tokens).reshape(-1).at[where].get(mode="clip")
    logprobs, entropy = token_logprobs(before, head, targets, temperature)

    def spread(values: Array) -> Array:
        empty = jnp.zeros(size, values.dtype)
        return empty.at[where].set(values, mode="drop").reshape(batch.shape)

    return PolicyOutputs(spread(logprobs), spread(entropy))


def objective(
    model: llama.LlamaConfig,
    loss: LossFunction,
    temperature: float,
    actions: int,
    trained: Any,
    frozen: Frozen,
    batch: Batch,
    dropout_key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, ""], Sums]:
    """Weighted sum of the per-token losses of one micro-batch, and its metrics."""
    batch = select(batch)
    params, adapter = frozen.combined(trained)
    outputs = policy_outputs(model, params, batch, temperature, actions, adapter, dropout_key)
    values, sums = loss(outputs, batch)
    return weighted_sum(values, batch.weights, batch.action_mask), sums


class Learner:
    """Holds the training state and the compiled update.

    ``loss`` must be a pure function; whatever it needs beyond the outputs is in the batch. With an
    ``adapter`` its weights are trained, and ``params`` are used as they are, without a copy.
    """

    def __init__(
        self,
        model: llama.LlamaConfig,
        params: Any,
        optimizer: optax.GradientTransformation,
        loss: LossFunction,
        *,
        adapter: lora.Adapter | None = None,
        temperature: float = 1.0,
        micro_batch_tokens: int = 4096,
    ):
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.frozen = Frozen(params["embedding"].dtype)
        if adapter is not None:
            self.frozen = replace(self.frozen, base=params, adapter=replace(adapter, weights=None))
            params = adapter.weights
        accumulator = jnp.promote_types(self.frozen.dtype, jnp.float32)
        # a copy, since updates donate the buffers and the caller's must stay readable
        trained = jax.tree.map(lambda leaf: jnp.array(leaf, accumulator, copy=True), params)
        self.state = TrainState(trained, jax.jit(optimizer.init)(trained))
        self._accumulate = jax.jit(
            partial(_accumulate, model, loss, temperature), static_argnums=0, donate_argnums=(3, 4)
        )
        self._apply = jax.jit(partial(_apply, optimizer), donate_argnums=(0,))
        self._logprobs = jax.jit(
            lambda actions, params, adapter, batch: (
                policy_outputs(model, params, batch, temperature, actions, adapter).logprobs
            ),
            static_argnums=0,
        )
        self._zeros = jax.jit(
            lambda params: (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), accumulator))
        )

    @property
    def policy(self) -> tuple[Any, lora.Adapter | None]:
        """Current parameters and adapter; the next ``update`` donates what it trains of them."""
        return self.frozen.combined(self.state.params)

    @property
    def compilations(self) -> int:
        """How many programs the learner has compiled so far."""
        programs = (self._accumulate, self._apply, self._logprobs)
        return sum(program._cache_size() for program in programs)  # pyright: ignore

    def gradients(
        self, batch: Batch, dropout_key: PRNGKeyArray | None = None
    ) -> tuple[Any, Float[Array, ""], dict[str, tuple[float, float]]]:
        """Gradient, loss and (sum, count) metrics of one update, summed over micro-batches.

        Without ``dropout_key`` no adapter input is dropped.
        """
        parts = micro_batches(batch, self.micro_batch_tokens)
        actions = action_bucket(parts)
        trained = self.state.params
        gradients, loss = self._zeros(trained)
        each = []
        for part in parts:
            gradients, loss, sums = self._accumulate(
                actions, trained, self.frozen, gradients, loss, part, dropout_key
            )
            each.append(sums)
        each = jax.device_get(each)
        return gradients, loss, {name: _total(sums[name] for sums in each) for name in each[0]}

    def update(self, batch: Batch, dropout_key: PRNGKeyArray | None = None) -> dict[str, float]:
        """One optimizer update; ``dropout_key`` is a new one for each.

        Returns the loss, the means of the loss function's metrics, ``gradient_norm`` (before
        clipping) and ``skipped_updates`` (1 where loss or gradient was not finite: then neither
        parameters nor optimizer state changed).
        """
        gradients, loss, sums = self.gradients(batch, dropout_key)
        self.state, norm, finite = self._apply(self.state, gradients, loss)
        loss, norm, finite = jax.device_get((loss, norm, finite))
        metrics = {name: mean(*pair) for name, pair in sums.items()}
        metrics |= {"loss": float(loss), "gradient_norm": float(norm)}
        return metrics | {"skipped_updates": float(not finite)}

    def logprobs(self, batch: Batch, reference: Any = None) -> Float[np.ndarray, "rows length"]:
        """Log-probabilities of a batch's actions under the current policy, without dropout.

        With ``reference`` (parameters in training form) under those, without any adapter.
        """
        params, adapter = self.policy if reference is None else (reference, None)
        parts = micro_batches(batch, self.micro_batch_tokens)
        actions = action_bucket(parts)
        rows = [np.asarray(self._logprobs(actions, params, adapter, part)) for part in parts]
        return np.concatenate(rows)[: batch.shape[0]]


def mean(total: Any, count: Any) -> float:
    """``total / count``, NaN where nothing was counted."""
    return float(total) / float(count) if count else math.nan


def action_bucket(parts: list[Batch]) -> int:
    """Room for the action tokens of the fullest micro-batch: half of its tokens, or all of them.

    It must be a function of the batch alone, since other shapes round differently in the last bit;
    few sizes, since each is a program to compile.
    """
    most = max(int(np.asarray(part.action_mask).sum()) for part in parts)
    half = -(-parts[0].tokens.size // 2)
    return half if most <= half else 2 * half


def _accumulate(model, loss, temperature, actions, trained, frozen, gradients, total, batch, key):
    grad = jax.value_and_grad(partial(objective, model, loss, temperature, actions), has_aux=True)
    (value, sums), new = grad(trained, frozen, batch, key)
    return jax.tree.map(jnp.add, gradients, new), total + value, sums


def _total(pairs):
    sums, counts = zip(*pairs, strict=True)
    return float(np.sum(sums, dtype=np.float64)), float(np.sum(counts))


def _apply(optimizer, state, gradients, loss):
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
    new = TrainState(optax.apply_updates(state.params, updates), optimizer_state)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return kept, norm, finite
