"""Log-probabilities of given tokens, with the vocabulary in blocks.

``[tokens, vocab]`` never exists: the forward pass keeps a running log-sum-exp over blocks of the
vocabulary, the backward pass computes each block's logits once more.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

VOCABULARY_BLOCK = 4096
"""Vocabulary entries per block; a block of logits is ``[tokens, 4096]``."""


def _block(hidden: Array, head: Array, start: int, temperature: float) -> Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    block = head[start : start + VOCABULARY_BLOCK]
    return jnp.einsum("nd,vd->nv", hidden, block, preferred_element_type=wide) / temperature


def token_logprobs(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    temperature: float,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Log-probability of each target, and the entropy of the distribution it was drawn from.

    With ``l = hidden @ head.T / temperature`` and ``p = softmax(l)``: ``log p[target]`` and
    ``H = - sum_v p_v log p_v``, both in nats, over the full vocabulary, both differentiable.
    """
    logprobs, entropy = _blockwise(hidden, head, targets, temperature)  # pyright: ignore
    return logprobs, entropy


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blockwise(hidden, head, targets, temperature):
    return _forward(hidden, head, targets, temperature)[0]


def _forward(hidden, head, targets, temperature):
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    largest = jnp.full(hidden.shape[0], -jnp.inf, wide)
    total = jnp.zeros(hidden.shape[0], wide)  # sum of exp(l - largest)
    moment = jnp.zeros(hidden.shape[0], wide)  # sum of exp(l - largest) * (l - largest)
    for start in range(0, head.shape[0], VOCABULARY_BLOCK):
        logits = _block(hidden, head, start, temperature)
        new = jnp.maximum(largest, logits.max(axis=1))
        shift = jnp.where(jnp.isinf(largest), 0, largest - new)
        shrink = jnp.exp(shift)
        centred = logits - new[:, None]
        mass = jnp.exp(centred)
        moment = shrink * (moment + shift * total) + (mass * centred).sum(axis=1)
        total = shrink * total + mass.sum(axis=1)
        largest = new
    log_total = largest + jnp.log(total)
    entropy = jnp.log(total) - moment / total
    target_logits = (hidden * head[targets]).astype(wide).sum(axis=1) / temperature
    return (target_logits - log_total, entropy), (hidden, head, targets, log_total, entropy)


def _backward(temperature, saved, gradients):
    hidden, head, targets, log_total, entropy = saved
    by_logprob, by_entropy = gradients
    to_hidden = jnp.zeros(hidden.shape, log_total.dtype)
    to_head = []
    for start in range(0, head.shape[0], VOCABULARY_BLOCK):
        logprobs = _block(hidden, head, start, temperature) - log_total[:, None]
        # d log p_t / d l_v = [v = t] - p_v, and d H / d l_v = -p_v (log p_v + H)
        slope = -(by_logprob[:, None] + by_entropy[:, None] * (logprobs + entropy[:, None]))
        to_logits = (slope * jnp.exp(logprobs) / temperature).astype(hidden.dtype)
        block = head[start : start + VOCABULARY_BLOCK]
        to_hidden = to_hidden + (to_logits @ block).astype(log_total.dtype)
        to_head.append(to_logits.T @ hidden)
    direct = (by_logprob / temperature).astype(hidden.dtype)[:, None]
    to_hidden = to_hidden.astype(hidden.dtype) + direct * head[targets]
    return to_hidden, jnp.concatenate(to_head).at[targets].add(direct * hidden), None


_blockwise.defvjp(_forward, _backward)
