"""Values of real ``transformers`` in float64 (tests/golden/make_golden.py) against ours.

Tolerances are those of docs/architecture.md, "Numerical truth". (No test in float64 here: norms and
RoPE angles of transformers are float32 whatever the model's dtype.)
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.weights import MODELS, tokens
from tunix.models import huggingface, llama, loading
from tunix.models.policy import load_policy

GOLDEN = Path(__file__).parents[1] / "golden"


def logprobs_of(logits, ids):
    picked = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return jnp.take_along_axis(picked, ids[:, 1:, None], axis=-1)[..., 0]


def cached_logits(config, params, ids, prefix=24):
    """Generation form: a chunk of prompt, then token by token."""
    generation = llama.unstack(params)
    rows, length = ids.shape
    cache = llama.new_cache(config, rows, 64, params["embedding"].dtype)
    slots = jnp.arange(rows)
    parts = []

    @jax.jit
    def step(generation, chunk, positions, cache):
        hidden, cache = llama.cached_hidden_states(
            config, generation, chunk, positions, slots, cache, 64
        )
        return llama.logits(generation, hidden), cache

    for start, stop in [(0, prefix), *((i, i + 1) for i in range(prefix, length))]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (rows, stop - start))
        logits, cache = step(generation, jnp.asarray(ids[:, start:stop]), positions, cache)
        parts.append(logits)
    return jnp.concatenate(parts, axis=1)


def check_logits(ours, golden):
    assert np.abs(np.asarray(ours) - golden).max() <= 5e-4


def check_logprobs(ours, golden):
    difference = np.abs(np.asarray(ours) - golden)
    assert difference.max() <= 1e-4
    assert difference.mean() <= 1e-5


def gradient_error(config, ours, golden):
    """‖Δ‖/‖g‖ over all parameters, ours brought to the file's names and orientation."""
    squares, total = 0.0, 0.0
    for leaf in loading.leaf_names(config):
        group, _, name = leaf.rpartition("/")
        value = np.asarray(ours[group][name] if group else ours[name], np.float64)
        value = value if group else value[None]
        for i, tensor in enumerate(loading.stored_names(config, huggingface.NAMES, leaf)):
            matrix = value[i].T if name in loading.MATRICES else value[i]
            squares += ((matrix - golden["gradient/" + tensor]) ** 2).sum()
            total += (golden["gradient/" + tensor].astype(np.float64) ** 2).sum()
    return (squares / total) ** 0.5


@pytest.fixture(params=list(MODELS))
def tiny(request, tiny_folder):
    policy = load_policy(tiny_folder(request.param))
    return policy, tokens(request.param), np.load(GOLDEN / f"{request.param}.npz")


def test_training_form(tiny):
    policy, ids, golden = tiny

    @jax.jit
    def loss(params):
        logits = llama.full_logits(policy.config, params, jnp.asarray(ids))
        logprobs = logprobs_of(logits, ids)
        return -logprobs.mean(), (logits, logprobs)

    gradient, (logits, logprobs) = jax.grad(loss, has_aux=True)(policy.params)
    check_logits(logits, golden["logits"])
    check_logprobs(logprobs, golden["logprobs"])
    assert gradient_error(policy.config, gradient, golden) <= 1e-5


def test_cached_form(tiny):
    policy, ids, golden = tiny
    logits = cached_logits(policy.config, policy.params, ids)
    check_logits(logits, golden["logits"])
    check_logprobs(logprobs_of(logits, ids), golden["logprobs"])


def test_packed_equals_separate(tiny):
    """Both rows in one, of unequal length, with padding behind: the same logits."""
    policy, ids, golden = tiny
    lengths = (40, 29)
    packed = np.concatenate([ids[0], ids[1, :29], [5] * 11])[None]
    positions = np.concatenate([np.arange(40), np.arange(29), np.arange(11)])[None]
    segments = np.repeat([1, 2, 0], [40, 29, 11])[None]
    hidden = llama.hidden_states(
        policy.config,
        policy.params,
        *(jnp.asarray(x, jnp.int32) for x in (packed, positions, segments)),
    )
    logits = llama.logits(policy.params, hidden)[0]
    check_logits(logits[:40], golden["logits"][0])
    check_logits(logits[40:69], golden["logits"][1, : lengths[1]])


def greedy_agrees(policy, prompt, golden):
    """Greedy tokens follow the golden ones up to where the two best are closer than 1e-3."""
    expected, gaps = golden["greedy"], golden["gaps"]
    ids = np.concatenate([prompt, expected[:-1]])[None].astype(np.int32)
    logits = jax.jit(llama.full_logits, static_argnums=0)(policy.config, policy.params, ids)
    ours = np.asarray(jnp.argmax(logits[0, len(prompt) - 1 :], -1))
    clear = gaps > 1e-3
    assert clear.any()
    np.testing.assert_array_equal(ours[clear], expected[clear])


def test_greedy(tiny):
    policy, ids, golden = tiny
    greedy_agrees(policy, ids[0, :8], golden)


def test_smollm2(smollm2):
    golden = np.load(GOLDEN / "smollm2.npz")
    config, columns = smollm2.config, golden["columns"]
    texts = [golden[f"tokens{i}"] for i in range(3)]
    ids = np.zeros((3, 40), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    valid = np.arange(40) < np.array([len(text) for text in texts])[:, None]

    @jax.jit
    def loss(params):
        logits = llama.full_logits(config, params, jnp.asarray(ids), jnp.asarray(valid))
        logprobs = logprobs_of(logits, ids)
        return -jnp.where(valid[:, 1:], logprobs, 0).sum(), (logits, logprobs)

    gradient, (logits, logprobs) = jax.grad(loss, has_aux=True)(smollm2.params)
    cached = cached_logits(config, smollm2.params, ids, prefix=36)
    for i, text in enumerate(texts):
        check_logits(logits[i, : len(text)][:, columns], golden[f"logits{i}"])
        check_logits(cached[i, : len(text)][:, columns], golden[f"logits{i}"])
    ours = np.concatenate([row[: len(t) - 1] for row, t in zip(logprobs, texts, strict=True)])
    check_logprobs(ours, np.concatenate([golden[f"logprobs{i}"] for i in range(3)]))
    greedy_agrees(smollm2, texts[0], golden)
    squares, total, of_norms, norms = np.zeros(4)
    for leaf in loading.leaf_names(config):
        group, _, name = leaf.rpartition("/")
        value = np.asarray(gradient[group][name] if group else gradient[name], np.float64)
        value = value if group else value[None]
        for j, tensor in enumerate(loading.stored_names(config, huggingface.NAMES, leaf)):
            flat = (value[j].T if name in loading.MATRICES else value[j]).ravel()
            piece = golden["gradient_slice/" + tensor]
            squares += ((flat[:: max(1, flat.size // 40)] - piece) ** 2).sum()
            total += (piece**2).sum()
            norm = golden["gradient_norm/" + tensor]
            of_norms += (np.linalg.norm(flat) - norm) ** 2
            norms += norm**2
    assert (squares / total) ** 0.5 <= 1e-5
    assert (of_norms / norms) ** 0.5 <= 1e-5
