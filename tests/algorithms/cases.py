"""The table of algorithms that the laws are tested on: 8 unequal episodes of one update each.

A new algorithm joins every law by adding a line to ``CASES``.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.losses import twins
from tunix.algorithms.language import grpo, sft
from tunix.datasets.batch import Sequence
from tunix.losses.aggregate import token_weights
from tunix.models import llama, lora

GROUPS, SIZE = 2, 4
CONSTANT = 16.0
TEMPERATURE = 0.8


@dataclass
class Episode:
    tokens: np.ndarray
    action_mask: np.ndarray
    reward: float
    behaviour: np.ndarray
    reference: np.ndarray


def episodes(vocab=96, seed=3):
    """Eight episodes of unequal length; every second one has context amid its actions."""
    rng = np.random.default_rng(seed)
    made = []
    for i, (prompt, answer) in enumerate(
        [(3, 1), (5, 3), (2, 7), (9, 9), (4, 12), (1, 2), (6, 5), (3, 10)]
    ):
        size = prompt + answer
        mask = np.arange(size) >= prompt
        if i % 2 and answer > 4:
            mask[prompt + 2 : prompt + 4] = False
        tokens = rng.integers(0, vocab, size).astype(np.int32)
        behaviour = np.where(mask, -4.5 + 0.4 * rng.normal(size=size), 0)
        reference = np.where(mask, -4.6 + 0.4 * rng.normal(size=size), 0)
        reward = [0.0, 1.0, 1.0, 0.3, 0.0, 0.0, 1.0, 0.5][i]
        made.append(Episode(tokens, mask, reward, behaviour, reference))
    return made


def grpo_sequences(made, config):
    rewards = np.array([e.reward for e in made]).reshape(GROUPS, SIZE)
    valid = jnp.ones(rewards.shape, bool)
    scores = np.asarray(grpo.advantages(jnp.asarray(rewards), valid, config)).reshape(-1)
    counts = np.array([int(e.action_mask.sum()) for e in made])
    weights = token_weights(counts, config.aggregate, CONSTANT)
    return [
        Sequence(
            e.tokens,
            e.action_mask,
            np.full(len(e.tokens), w),
            {
                "behaviour_logprobs": e.behaviour,
                "advantages": np.full(len(e.tokens), a),
                "reference_logprobs": e.reference,
            },
        )
        for e, w, a in zip(made, weights, scores, strict=True)
    ]


def sft_sequences(made):
    counts = np.array([int(e.action_mask.sum()) for e in made])
    weights = token_weights(counts, "token_mean", 1.0)
    return [
        Sequence(e.tokens, e.action_mask, np.full(len(e.tokens), w))
        for e, w in zip(made, weights, strict=True)
    ]


@dataclass
class Case:
    name: str
    loss: object
    sequences: object
    twin: object
    temperature: float = TEMPERATURE
    lora: bool = False

    def adapter(self, config):
        """With ``lora``, what is trained instead of the parameters: an adapter that is not zero."""
        if not self.lora:
            return None
        shapes = lora.adapter_shapes(
            llama.parameter_shapes(config), lora.matched(["*_proj", "embed_tokens", "lm_head"]), 3
        )
        leaves, treedef = jax.tree.flatten(lora.initialize(jax.random.key(0), shapes, jnp.float64))
        drawn = [
            0.1 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)
        ]
        return lora.Adapter(jax.tree.unflatten(treedef, drawn), 3, alpha=6.0, dropout=0.25)


def grpo_case(aggregate, beta, estimator="k3", normalize=True):
    config = grpo.GRPOConfig(
        model="none",
        aggregate=aggregate,
        kl_coefficient=beta,
        kl_estimator=estimator,
        normalize_advantages=normalize,
        clip_low=0.15,
        clip_high=0.25,
    )

    def twin(made, logprobs):
        rows = [
            {
                "reward": e.reward,
                "logp": list(lp[e.action_mask]),
                "old": list(e.behaviour[e.action_mask]),
                "ref": list(e.reference[e.action_mask]),
            }
            for e, lp in zip(made, logprobs, strict=True)
        ]
        return twins.grpo_loss(
            [rows[:SIZE], rows[SIZE:]],
            clip_low=0.15,
            clip_high=0.25,
            beta=beta,
            estimator=estimator,
            aggregate=aggregate,
            constant=CONSTANT,
            normalize=normalize,
            epsilon=config.advantage_epsilon,
        )

    return Case(
        f"grpo-{aggregate}-{beta}-{estimator}-{'std' if normalize else 'nostd'}",
        partial(grpo.loss, config=config),
        partial(grpo_sequences, config=config),
        twin,
    )


def sft_case():
    def twin(made, logprobs):
        return twins.sft_loss([lp[e.action_mask] for e, lp in zip(made, logprobs, strict=True)])

    return Case("sft", sft.loss, sft_sequences, twin, temperature=1.0)


CASES = [
    sft_case(),
    grpo_case("token_mean", 0.04),
    grpo_case("sequence_mean", 0.04, "k1"),
    grpo_case("sequence_sum", 0.04, "k2", normalize=False),
]
