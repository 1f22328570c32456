"""Laws of an update, for every algorithm and aggregation at once, in float64 to 1e-10 of the norm.

The update is a function of the set of samples alone: not of micro-batches, packing, padding, order
or of what stands in ignored slots. And it is the update that the paper's formula asks for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.algorithms.cases import CASES, episodes
from tests.losses import twins
from tunix.datasets.batch import Batch, pack
from tunix.models import llama
from tunix.training.learner import Learner

BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


FIRST = pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
"""One case an algorithm, for what does not depend on the aggregation."""


@pytest.fixture
def params(x64, tiny_config):
    # weights larger than at initialisation, so that the distribution is far from uniform
    drawn = llama.initialize(jax.random.key(5), tiny_config, jnp.float64)
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, drawn)


def learner(case, config, params, micro_batch_tokens):
    return Learner(
        config,
        params,
        optax.sgd(0.1),
        case.loss,
        adapter=case.adapter(config),
        temperature=case.temperature,
        micro_batch_tokens=micro_batch_tokens,
    )


LEARNERS = {}
"""One learner a case, so that a shape is compiled once; ``gradients`` leaves its state alone."""


def outcome(case, config, params, batch, micro_batch_tokens=10**6):
    if case.name not in LEARNERS:
        LEARNERS[case.name] = learner(case, config, params, 1)
    one = LEARNERS[case.name]
    one.micro_batch_tokens = micro_batch_tokens
    gradients, loss, sums = one.gradients(batch)
    return gradients, float(loss), {k: s / c for k, (s, c) in sums.items()}


def assert_same(one, two):
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, one[0], two[0]))
    assert float(difference) <= 1e-10 * float(optax.tree.norm(two[0]))
    assert one[1] == pytest.approx(two[1], rel=1e-10, abs=1e-12)
    assert one[2] == pytest.approx(two[2], rel=1e-9, abs=1e-12)


def separate_rows(sequences, length):
    """One sequence a row, right-padded: the plain layout everything is compared with."""
    rows = [pack([s], length) for s in sequences]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


@BY_NAME
def test_micro_batches_packing_padding_and_order_change_nothing(case, params, tiny_config):
    """Layouts share shapes where they can, since each shape is a program to compile."""
    sequences = case.sequences(episodes())
    plain = outcome(case, tiny_config, params, separate_rows(sequences, 64))
    shuffled = [sequences[i] for i in (5, 2, 7, 0, 6, 1, 4, 3)]
    layouts = {
        "8 micro-batches": (separate_rows(sequences, 64), 64),
        "packed in one row, padded": (pack(sequences, 128), 128),
        "packed in two rows": (pack(sequences, 64), 10**6),
        "packed, one row a micro-batch": (pack(sequences, 64), 64),
        "packed in another order": (pack(shuffled, 64), 10**6),
        "separate rows in another order": (separate_rows(shuffled, 64), 10**6),
        "padded by 67 more": (separate_rows(sequences, 131), 10**6),
    }
    for name, (batch, micro_batch_tokens) in layouts.items():
        try:
            assert_same(outcome(case, tiny_config, params, batch, micro_batch_tokens), plain)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@BY_NAME
def test_ignored_slots_reach_nothing(case, params, tiny_config):
    """Poison: floats at non-action tokens become NaN; ids at padding become random valid ids."""
    batch = pack(case.sequences(episodes()), 64)
    rng = np.random.default_rng(0)
    ignored, padding = ~batch.action_mask, batch.segment_ids == 0
    poisoned = {}
    for name in ("weights", "behaviour_logprobs", "advantages", "reference_logprobs"):
        values = getattr(batch, name)
        poisoned[name] = None if values is None else np.where(ignored, np.nan, values)
    for name, bound in (("tokens", tiny_config.vocab_size), ("positions", 64)):
        drawn = rng.integers(0, bound, batch.shape).astype(np.int32)
        poisoned[name] = np.where(padding, drawn, getattr(batch, name))
    segments = rng.integers(0, 9, batch.shape).astype(np.int32)
    poisoned["segment_ids"] = np.where(padding, segments, batch.segment_ids)
    bad = Batch(action_mask=batch.action_mask, sequence_ids=batch.sequence_ids, **poisoned)
    assert_same(outcome(case, tiny_config, params, bad), outcome(case, tiny_config, params, batch))


@BY_NAME
def test_value_and_gradient_are_those_of_the_paper(case, params, tiny_config):
    """Loss to 1e-10 of the NumPy twin; its gradient to the log-probs, derived by hand, likewise.

    The log-probabilities come from a NumPy forward pass. The gradient to parameters must then be
    the chain rule of the twin's gradient through the model, which is taken by a finite difference
    along a random direction.
    """
    made = episodes()

    def logprobs(tree):
        shape = dict(
            heads=tiny_config.num_heads, kv_heads=tiny_config.num_kv_heads,
            head_dim=tiny_config.head_dim, theta=tiny_config.rope_theta,
            epsilon=tiny_config.rms_norm_epsilon,
        )  # fmt: skip
        rows = []
        for e in made:
            logits = twins.llama_logits(tree, e.tokens, **shape) / case.temperature
            chosen = twins.log_softmax(logits)[np.arange(len(e.tokens) - 1), e.tokens[1:]]
            rows.append(np.concatenate([[0.0], chosen]))
        return rows

    at = logprobs(params)
    value, by_hand = case.twin(made, at)
    gradients, loss, _ = outcome(case, tiny_config, params, pack(case.sequences(made), 64))
    assert loss == pytest.approx(value, rel=1e-10, abs=1e-12)

    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
    length = float(optax.tree.norm(direction))
    direction = jax.tree.map(lambda leaf: leaf / length, direction)
    step = 1e-6
    ahead = logprobs(jax.tree.map(lambda p, d: p + step * d, params, direction))
    behind = logprobs(jax.tree.map(lambda p, d: p - step * d, params, direction))
    expected = 0.0
    for e, row, a, b in zip(made, by_hand, ahead, behind, strict=True):
        expected += float(np.dot(row, (a - b)[e.action_mask] / (2 * step)))
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    actual = sum(float((g * d).sum()) for g, d in pairs)
    assert actual == pytest.approx(expected, rel=5e-7, abs=1e-9)


@BY_NAME
def test_gradient_to_logprobs_by_hand(case, x64):
    """The loss function alone: d loss / d logprobs equals the hand-derived one to 1e-10."""
    made = episodes()
    batch = jax.tree.map(jnp.asarray, separate_rows(case.sequences(made), 20))
    rng = np.random.default_rng(2)
    given = [
        np.where(e.action_mask, e.behaviour + 0.3 * rng.normal(size=len(e.tokens)), 0) for e in made
    ]
    padded = jnp.asarray([np.pad(g, (0, 20 - len(g))) for g in given])

    from tunix.losses.aggregate import weighted_sum
    from tunix.training.learner import PolicyOutputs

    def number(logprobs):
        values, _ = case.loss(PolicyOutputs(logprobs, jnp.zeros_like(logprobs)), batch)
        return weighted_sum(values, batch.weights, batch.action_mask)

    value, by_hand = case.twin(made, given)
    assert float(number(padded)) == pytest.approx(value, rel=1e-10)
    slope = np.asarray(jax.grad(number)(padded))
    for e, row, expected in zip(made, slope, by_hand, strict=True):
        mask = np.pad(e.action_mask, (0, 20 - len(e.tokens)))
        np.testing.assert_allclose(row[mask], expected, rtol=1e-10, atol=1e-14)
        assert not row[~mask].any()


@FIRST
def test_an_update_moves_by_the_gradient(case, params, tiny_config):
    """Plain SGD: parameters after one update are the old ones minus rate times gradient."""
    batch = pack(case.sequences(episodes()), 64)
    one = learner(case, tiny_config, params, 64)
    gradients, _, _ = one.gradients(batch)
    metrics = one.update(batch)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    for got, wanted in zip(
        jax.tree.leaves(one.state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)
    assert metrics["skipped_updates"] == 0


@FIRST
def test_a_gradient_that_is_not_finite_changes_nothing(case, params, tiny_config):
    batch = pack(case.sequences(episodes()), 64)
    weights = batch.weights.copy()
    weights[0, np.flatnonzero(batch.action_mask[0])[0]] = np.inf
    bad = Batch(**{**vars(batch), "weights": weights})
    one = learner(case, tiny_config, params, 64)
    before = jax.device_get(one.state)
    assert one.update(bad)["skipped_updates"] == 1
    for got, wanted in zip(jax.tree.leaves(one.state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, wanted)
