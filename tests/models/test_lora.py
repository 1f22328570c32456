"""LoRA: off is the base bit for bit, on is one policy for trainer, engine, export and PEFT."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies import tiny_policy
from tunix.errors import ConfigError
from tunix.inference.engine import Engine
from tunix.inference.request import Request, SamplingParams
from tunix.models import llama, lora
from tunix.models.policy import load_policy, merged, save_policy

EVERYTHING = ["*_proj", "embed_tokens", "lm_head"]


@pytest.fixture
def params(tiny_params):
    return jax.tree.map(jnp.asarray, tiny_params)


def adapter(config, targets, rank=4, key=3, **settings):
    """An adapter whose product is not zero."""
    shapes = lora.adapter_shapes(llama.parameter_shapes(config), lora.matched(targets), rank)
    weights = lora.initialize(jax.random.key(key), shapes, jnp.float32)
    leaves, treedef = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(key + 1), len(leaves))
    drawn = [
        leaf + 0.1 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)
    ]
    return lora.Adapter(jax.tree.unflatten(treedef, drawn), rank, alpha=8.0, **settings)


def by_hand(config, params, one):
    """The adapted model as a plain one: W + alpha / rank * A @ B in numpy, head apart."""
    new = jax.tree.map(jnp.asarray, params)
    for name, pair in one.weights["layers"].items():
        product = np.einsum("lir,lro->lio", pair["a"], pair["b"])
        new["layers"][name] = new["layers"][name] + 8.0 / one.rank * product
    head = (
        new["embedding"] + 8.0 / one.rank * (one.weights["head"]["a"] @ one.weights["head"]["b"]).T
    )
    pair = one.weights["embedding"]
    new["embedding"] = new["embedding"] + 8.0 / one.rank * pair["a"] @ pair["b"]
    return replace(config, tie_embeddings=False), new | {"head": jnp.asarray(head)}


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 24)), jnp.int32)


def test_adapted_logits_merge_and_hand_agree(tiny_config, params):
    one = adapter(tiny_config, EVERYTHING)
    with_adapter = llama.full_logits(tiny_config, params, TOKENS, adapter=one)
    expected = llama.full_logits(*by_hand(tiny_config, params, one), TOKENS)
    np.testing.assert_allclose(with_adapter, expected, atol=2e-4)
    whole = merged(replace(tiny_policy(), config=tiny_config, params=params, adapter=one))
    assert whole.adapter is None
    assert not whole.config.tie_embeddings
    again = llama.full_logits(whole.config, whole.params, TOKENS)
    np.testing.assert_allclose(again, expected, atol=2e-4)
    plain = llama.full_logits(tiny_config, params, TOKENS)
    assert np.abs(plain - expected).max() > 0.1


def test_fresh_adapter_is_the_base_bit_for_bit(tiny_config, params):
    shapes = lora.adapter_shapes(llama.parameter_shapes(tiny_config), lora.matched(EVERYTHING), 4)
    fresh = lora.Adapter(lora.initialize(jax.random.key(0), shapes, jnp.float32), 4, 8.0)
    plain = llama.full_logits(tiny_config, params, TOKENS)
    np.testing.assert_array_equal(
        llama.full_logits(tiny_config, params, TOKENS, adapter=fresh), plain
    )


def test_scale():
    plain = lora.Adapter({}, 16, 8.0)
    stable = lora.Adapter({}, 16, 8.0, rank_stabilized=True)
    assert (plain.scale, stable.scale) == (0.5, 2.0)


def test_dropout_follows_the_keys_and_not_the_packing(tiny_config, params):
    one = adapter(tiny_config, EVERYTHING, dropout=0.5)
    tokens = TOKENS[:, :10]
    length = jnp.arange(10)

    def hidden(key, rows):
        positions = jnp.stack([jnp.concatenate([length] * (len(r))) for r in rows])
        ids = jnp.stack([jnp.repeat(jnp.asarray(r), 10) for r in rows])
        segments = jnp.stack([jnp.repeat(jnp.arange(len(r)) + 1, 10) for r in rows])
        packed = jnp.stack([jnp.concatenate([tokens[i] for i in r]) for r in rows])
        keys = None if key is None else lora.token_keys(jax.random.key(key), ids, positions)
        out = llama.hidden_states(tiny_config, params, packed, positions, segments, one, keys)
        return {
            i: out[r, 10 * c : 10 * c + 10] for r, row in enumerate(rows) for c, i in enumerate(row)
        }

    apart, together = hidden(1, [[0], [1]]), hidden(1, [[1, 0]])
    for i in (0, 1):
        np.testing.assert_allclose(apart[i], together[i], atol=1e-5)
    other, off = hidden(2, [[0], [1]]), hidden(None, [[0], [1]])
    assert np.abs(apart[0] - other[0]).max() > 0.01
    assert np.abs(apart[0] - off[0]).max() > 0.01
    switched_off = replace(one, dropout=0.0)
    np.testing.assert_array_equal(
        off[0],
        llama.hidden_states(
            tiny_config, params, tokens[:1], length[None], jnp.ones((1, 10), int), switched_off
        )[0],
    )


def test_dropped_keeps_the_share_and_the_mean():
    keys = lora.token_keys(jax.random.key(0), jnp.zeros((1, 50), jnp.int32), jnp.arange(50)[None])
    values = lora.dropped(jnp.ones((1, 50, 200)), keys, 0, 0.25)
    assert set(np.unique(values)) <= {0.0, np.float32(1 / 0.75)}
    assert abs(float((values == 0).mean()) - 0.25) < 0.02
    assert not np.array_equal(values, lora.dropped(jnp.ones((1, 50, 200)), keys, 1, 0.25))


def test_engine_keeps_base_and_adapter_apart(tiny_config, params):
    one = adapter(tiny_config, EVERYTHING)
    how = SamplingParams(max_tokens=12)
    prompt = [5, 7, 9, 11, 3]
    both = [Request(prompt, how, seed, adapter=k) for seed in range(4) for k in (0, 1)]

    def ask(requests, **settings):
        with Engine(tiny_config, params, slots=8, max_positions=64, **settings) as engine:
            return engine.generate_sync(requests)

    mixed = ask(both, adapters=[one])
    alone = ask([replace(r, adapter=0) for r in both[::2]])
    for a, b in zip(mixed[::2], alone, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    single = ask(both[1::2][:1], adapters=[one])[0]
    np.testing.assert_array_equal(mixed[1].logprobs, single.logprobs)
    for request, completion in zip(both[1::2], mixed[1::2], strict=True):
        row = jnp.asarray([[*request.tokens, *completion.tokens]])
        logits = llama.full_logits(tiny_config, params, row, adapter=one)[0]
        scored = jax.nn.log_softmax(logits)[jnp.arange(4, 4 + 12), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, scored, atol=1e-4)
    with pytest.raises(ConfigError, match="adapter is 2; the engine has 1"):
        ask([Request(prompt, how, 0, adapter=2)], adapters=[one])


def test_publication_carries_the_adapter_and_says_whether_anything_changed(tiny_config, params):
    one, other = adapter(tiny_config, ["q_proj"]), adapter(tiny_config, ["q_proj"], key=8)
    request = Request([5, 7], SamplingParams(max_tokens=4), 0, adapter=1)
    with Engine(tiny_config, params, adapters=[one], slots=8, max_positions=64) as engine:
        (before,) = engine.generate_sync([request])
        assert not engine.publish(one, 1)
        assert engine.publish(other, 2)
        (after,) = engine.generate_sync([request])
    assert not np.array_equal(before.logprobs, after.logprobs)
    assert set(after.versions.tolist()) == {2}
    with (
        Engine(tiny_config, params, slots=8, max_positions=64) as bare,
        pytest.raises(ConfigError, match="made without one"),
    ):
        bare.publish(one, 1)


@pytest.mark.parametrize("targets", [["*_proj"], ["q_proj", "v_proj"], EVERYTHING])
def test_peft_folder_is_read_back(tmp_path, targets):
    policy = tiny_policy()
    save_policy(policy, tmp_path / "base")
    base = load_policy(tmp_path / "base")
    one = adapter(base.config, targets, rank_stabilized=True)
    save_policy(replace(base, adapter=one), tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter")
    assert again.adapter is not None
    assert (again.adapter.rank, again.adapter.alpha, again.adapter.scale) == (4, 8.0, 4.0)
    jax.tree.map(np.testing.assert_array_equal, again.adapter.weights, one.weights)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


def test_a_pattern_that_matches_nothing_names_the_modules():
    with pytest.raises(ConfigError, match="'qproj' matches no module; did you mean 'q_proj'"):
        lora.matched(["v_proj", "qproj"])
