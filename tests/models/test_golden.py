"""Values of real ``transformers`` in float64 (tests/golden/make_golden.py) against ours.

Tolerances in float32 are those of docs/architecture.md, "Numerical truth"; in float64 the two
implementations agree to rounding.
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


def test_training_form_in_float64(tiny, x64):
    """On the same float32 weights no formula differs: equal to rounding."""
    policy, ids, golden = tiny
    wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), policy.params)
    logits = jax.jit(llama.full_logits, static_argnums=0)(policy.config, wide, jnp.asarray(ids))
    assert np.abs(np.asarray(logits) - golden["logits"]).max() <= 1e-12


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


def smollm2_rows(golden):
    """The golden texts as right-padded rows: ids and which of them are real."""
    texts = [golden[f"tokens{i}"] for i in range(3)]
    ids = np.zeros((3, max(map(len, texts))), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids, np.arange(ids.shape[1]) < np.array([[len(text)] for text in texts])


def smollm2_values(config, params, golden):
    """Logits, log-probs ``[rows, length - 1]`` and gradient of the summed loss."""
    ids, valid = smollm2_rows(golden)

    @jax.jit
    def loss(params):
        logits = llama.full_logits(config, params, jnp.asarray(ids), jnp.asarray(valid))
        logprobs = logprobs_of(logits, ids)
        return -jnp.where(valid[:, 1:], logprobs, 0).sum(), (logits, logprobs)

    gradient, (logits, logprobs) = jax.grad(loss, has_aux=True)(params)
    return np.asarray(logits), np.asarray(logprobs)[valid[:, 1:]], gradient


def smollm2_logits_error(logits, golden):
    _, valid = smollm2_rows(golden)
    theirs = np.concatenate([golden[f"logits{i}"] for i in range(3)])
    return np.abs(np.asarray(logits)[valid][:, golden["columns"]] - theirs).max()


def smollm2_gradient_errors(config, gradient, golden):
    """‖Δ‖/‖g‖ over the sampled elements, and over the norms of all tensors."""
    sums = np.zeros(4)
    for leaf in loading.leaf_names(config):
        group, _, name = leaf.rpartition("/")
        value = np.asarray(gradient[group][name] if group else gradient[name], np.float64)
        value = value if group else value[None]
        for i, tensor in enumerate(loading.stored_names(config, huggingface.NAMES, leaf)):
            flat = (value[i].T if name in loading.MATRICES else value[i]).ravel()
            piece, norm = golden["gradient_slice/" + tensor], golden["gradient_norm/" + tensor]
            sample = flat[:: max(1, flat.size // 40)]
            sums += ((sample - piece) ** 2).sum(), (piece**2).sum(), 0, norm**2
            sums[2] += (np.linalg.norm(flat) - norm) ** 2
    return (sums[0] / sums[1]) ** 0.5, (sums[2] / sums[3]) ** 0.5


def test_smollm2(smollm2):
    """Float32. The gradient of these texts has an error of 4e-5 in torch's own float32."""
    golden, config = np.load(GOLDEN / "smollm2.npz"), smollm2.config
    logits, logprobs, gradient = smollm2_values(config, smollm2.params, golden)
    assert smollm2_logits_error(logits, golden) <= 5e-4
    check_logprobs(logprobs, np.concatenate([golden[f"logprobs{i}"] for i in range(3)]))
    assert max(smollm2_gradient_errors(config, gradient, golden)) <= 4e-5
    greedy_agrees(smollm2, golden["tokens0"], golden)
    cached = cached_logits(config, smollm2.params, smollm2_rows(golden)[0], prefix=26)
    assert smollm2_logits_error(cached, golden) <= 5e-4


@pytest.mark.slow
def test_smollm2_in_float64(smollm2, x64):
    golden, config = np.load(GOLDEN / "smollm2.npz"), smollm2.config
    wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), smollm2.params)
    logits, logprobs, gradient = smollm2_values(config, wide, golden)
    assert smollm2_logits_error(logits, golden) <= 1e-8
    theirs = np.concatenate([golden[f"logprobs{i}"] for i in range(3)])
    assert np.abs(logprobs - theirs).max() <= 1e-8
    assert max(smollm2_gradient_errors(config, gradient, golden)) <= 1e-9
