"""Losses against numbers worked out by hand and against dense computations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix.losses import logprobs as logprobs_module
from tunix.losses.advantages import group_advantages
from tunix.losses.aggregate import token_weights, weighted_sum
from tunix.losses.logprobs import token_logprobs
from tunix.losses.policy_gradient import clipped_surrogate, kl_estimate


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, deviation 1/2, so ±1; without the division ±1/2."""
    rewards, valid = jnp.array([[1.0, 0, 0, 1]]), jnp.ones((1, 4), bool)
    np.testing.assert_allclose(group_advantages(rewards, valid, True, 0.0), [[1, -1, -1, 1]])
    np.testing.assert_allclose(
        group_advantages(rewards, valid, False, 0.0), [[0.5, -0.5, -0.5, 0.5]]
    )


def test_a_missing_reward_leaves_the_statistics():
    """Of 1, NaN, 0 the mean is 1/2 over two samples; the NaN's advantage is 0."""
    rewards = jnp.array([[1.0, np.nan, 0.0]])
    got = group_advantages(rewards, jnp.array([[True, False, True]]), True, 0.0)
    np.testing.assert_allclose(got, [[1, 0, -1]])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e9])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("normalize", [True, False])
def test_groups_of_one_or_of_equal_rewards_have_advantage_zero(reward, size, normalize):
    got = group_advantages(jnp.full((1, size), reward), jnp.ones((1, size), bool), normalize, 0.0)
    assert not np.asarray(got).any()


def test_a_group_without_valid_samples_has_advantage_zero():
    got = group_advantages(jnp.full((1, 3), np.nan), jnp.zeros((1, 3), bool), True, 1e-4)
    assert not np.asarray(got).any()


def test_clipped_surrogate_by_hand():
    """Ratios 1.5 and 0.5 with clips 0.2 and 0.3.

    A = 1: min(1.5, 1.3) = 1.3, clipped; min(0.5, 0.8) = 0.5, not clipped.
    A = -1: min(-1.5, -1.3) = -1.5, not clipped; min(-0.5, -0.8) = -0.8, clipped.
    """
    ratio = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0])
    values, clipped = clipped_surrogate(ratio, jnp.zeros(4), advantages, 0.2, 0.3)
    np.testing.assert_allclose(values, [-1.3, -0.5, 1.5, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [True, False, False, True])


def test_kl_estimators_by_hand():
    """Policy log 0.5, reference log 0.25: d = -log 2."""
    policy, reference = jnp.log(jnp.array(0.5)), jnp.log(jnp.array(0.25))
    assert kl_estimate(policy, reference, "k1") == pytest.approx(math.log(2))
    assert kl_estimate(policy, reference, "k2") == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(policy, reference, "k3") == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_are_unbiased(x64):
    """Expected under the policy, both equal the exact KL of two categorical distributions."""
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
    exact = float((p * jnp.log(p / q)).sum())
    for estimator in ("k1", "k3"):
        expected = float((p * kl_estimate(jnp.log(p), jnp.log(q), estimator)).sum())
        assert expected == pytest.approx(exact, rel=1e-12)


def test_token_weights_by_hand():
    """Sequences of 1, 0 and 3 action tokens: 4 tokens, 2 sequences that count."""
    counts = np.array([1, 0, 3])
    np.testing.assert_allclose(token_weights(counts, "token_mean", 9.0), [1 / 4, 0, 1 / 4])
    np.testing.assert_allclose(token_weights(counts, "sequence_mean", 9.0), [1 / 2, 0, 1 / 6])
    np.testing.assert_allclose(token_weights(counts, "sequence_sum", 8.0), [1 / 16, 0, 1 / 16])


def test_the_mean_is_over_tokens_not_over_rows():
    """100 tokens at 2.0 with 900 at 0.5: 0.65, whatever rows they stand in."""
    weights = token_weights(np.array([100, 900]), "token_mean", 1.0)
    values = np.repeat([2.0, 0.5], [100, 900])
    total = weighted_sum(
        jnp.asarray(values), jnp.asarray(np.repeat(weights, [100, 900])), jnp.ones(1000, bool)
    )
    assert total == pytest.approx(0.65, rel=1e-5)


def test_weighted_sum_never_touches_what_is_masked():
    values = jnp.array([1.0, np.nan])
    mask = jnp.array([True, False])
    value, slope = jax.value_and_grad(lambda v: weighted_sum(v, jnp.ones(2), mask))(values)
    assert value == 1.0
    np.testing.assert_array_equal(slope, [1, 0])


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.sampled_from([1, 7, 23]),
    temperature=st.sampled_from([0.6, 1.0, 1.5]),
    seed=st.integers(0, 1000),
)
def test_blocks_of_the_vocabulary_change_nothing(vocab, temperature, seed):
    """Log-probs, entropies and both gradients equal those of a dense log-softmax, in float64."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "VOCABULARY_BLOCK", 7)
        rng = np.random.default_rng(seed)
        hidden = jnp.asarray(rng.normal(size=(5, 4)))
        head = jnp.asarray(rng.normal(size=(vocab, 4)) * 3)
        targets = jnp.asarray(rng.integers(0, vocab, 5))
        mix = jnp.asarray(rng.normal(size=(2, 5)))

        def blocks(hidden, head):
            logprobs, entropy = token_logprobs(hidden, head, targets, temperature)
            return (mix[0] * logprobs).sum() + (mix[1] * entropy).sum()

        def dense(hidden, head):
            full = jax.nn.log_softmax(hidden @ head.T / temperature)
            entropy = -(jnp.exp(full) * full).sum(axis=1)
            return (mix[0] * full[jnp.arange(5), targets]).sum() + (mix[1] * entropy).sum()

        one = jax.value_and_grad(blocks, (0, 1))(hidden, head)
        two = jax.value_and_grad(dense, (0, 1))(hidden, head)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_entropy_of_equal_logits_is_the_log_of_their_number():
    _, entropy = token_logprobs(jnp.zeros((1, 3)), jnp.ones((50, 3)), jnp.array([4]), 1.0)
    assert entropy[0] == pytest.approx(math.log(50), rel=1e-6)


def test_very_large_logits_stay_finite():
    logprobs, entropy = token_logprobs(
        jnp.full((1, 2), 1e4), jnp.array([[1e4, 1e4], [0, 0], [1.0, 1]]), jnp.array([0]), 1.0
    )
    assert np.isfinite(logprobs).all()
    assert entropy[0] == pytest.approx(0.0, abs=1e-6)
