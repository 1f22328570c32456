"""Training an adapter: the laws of an update hold, the base and the reference never move."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.algorithms.cases import CASES, episodes
from tests.algorithms.test_grpo import config, run, short, tasks
from tests.algorithms.test_laws import separate_rows
from tests.policies import tiny_policy
from tunix.algorithms.language import grpo, sft
from tunix.datasets.batch import pack
from tunix.errors import ConfigError
from tunix.models import llama
from tunix.models.policy import load_policy, merged, save_policy
from tunix.training.learner import Learner

LORA = dict(lora_rank=2, lora_targets=["*_proj", "lm_head"])


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=lambda case: case.name)
def test_an_update_of_an_adapter_is_a_function_of_the_samples(case, x64, tiny_config):
    """Packing, micro-batches and padding change nothing, with dropout and without."""
    case = replace(case, lora=True)
    params = llama.initialize(jax.random.key(5), tiny_config, jnp.float64)
    learner = Learner(
        tiny_config, params, optax.sgd(0.1), case.loss, adapter=case.adapter(tiny_config),
        temperature=case.temperature,
    )  # fmt: skip
    sequences = case.sequences(episodes())

    def outcome(batch, micro_batch_tokens, key):
        learner.micro_batch_tokens = micro_batch_tokens
        gradients, loss, _ = learner.gradients(batch, key)
        return gradients, float(loss)

    apart = separate_rows(sequences, 64)
    apart = replace(apart, sequence_ids=np.repeat(np.arange(8)[:, None], 64, 1).astype(np.int32))
    plain = None
    for key in (None, jax.random.key(3)):
        expected = outcome(apart, 10**6, key)
        for batch, tokens in ((apart, 64), (pack(sequences, 64), 10**6), (pack(sequences, 64), 64)):
            gradients, loss = outcome(batch, tokens, key)
            difference = optax.tree.norm(jax.tree.map(jnp.subtract, gradients, expected[0]))
            assert float(difference) <= 1e-10 * float(optax.tree.norm(expected[0]))
            assert loss == pytest.approx(expected[1], rel=1e-10)
        plain = plain or expected
    assert expected[1] != pytest.approx(plain[1], rel=1e-6)  # dropout does something


def test_the_gradient_of_an_adapter_is_that_of_the_merged_model(x64, tiny_config):
    """By the chain rule: d/dA = s dW Bᵀ, d/dB = s Aᵀ dW, with dW of the whole merged model."""
    case = replace(CASES[1], lora=True)
    params = llama.initialize(jax.random.key(5), tiny_config, jnp.float64)
    one = case.adapter(tiny_config)
    batch = pack(case.sequences(episodes()), 64)

    def gradients(config, params, adapter):
        learner = Learner(
            config, params, optax.sgd(0.1), case.loss, adapter=adapter, temperature=case.temperature
        )
        return learner.gradients(batch)[0]

    low = gradients(tiny_config, params, one)
    whole = merged(replace(tiny_policy(), config=tiny_config, params=params, adapter=one))
    full = gradients(whole.config, whole.params, None)
    for name, pair in one.weights["layers"].items():
        slope = full["layers"][name]
        by_a = one.scale * np.einsum("lio,lro->lir", slope, pair["b"])
        by_b = one.scale * np.einsum("lir,lio->lro", pair["a"], slope)
        np.testing.assert_allclose(low["layers"][name]["a"], by_a, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(low["layers"][name]["b"], by_b, rtol=1e-8, atol=1e-12)
    pair = one.weights["embedding"]
    by_b = one.scale * pair["a"].T @ full["embedding"]
    np.testing.assert_allclose(low["embedding"]["b"], by_b, rtol=1e-8, atol=1e-12)
    by_a = one.scale * full["head"].T @ one.weights["head"]["b"].T
    np.testing.assert_allclose(low["head"]["a"], by_a, rtol=1e-8, atol=1e-12)


def test_grpo_trains_the_adapter_and_neither_base_nor_reference(tmp_path):
    """The reference is the base with the adapter off: bit-equal from the first step to the last."""
    policy = tiny_policy()
    save_policy(policy, tmp_path / "base")
    policy = load_policy(tmp_path / "base")
    base = jax.tree.map(np.array, policy.params)
    scored = []

    original = Learner.logprobs

    def recorded(self, batch, reference=None):
        assert reference is policy.params  # no second copy of the model
        scored.append(original(self, probe, reference))
        return original(self, batch, reference)

    made = CASES[1].sequences(episodes())
    probe = pack(made, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "logprobs", recorded)
        done = run(tmp_path / "r", policy=policy, steps=3, kl_coefficient=0.1, **LORA)
    for later in scored[1:]:
        np.testing.assert_array_equal(later, scored[0])
    assert done.metrics[0]["kl_reference"] < 1e-7
    assert done.metrics[-1]["kl_reference"] > 1e-4
    assert all(row["kl"] < 1e-7 for row in done.metrics)  # the engine has the current adapter
    jax.tree.map(np.testing.assert_array_equal, done.policy.params, base)
    saved = load_policy(tmp_path / "r" / "model")
    assert saved.adapter is not None
    jax.tree.map(np.testing.assert_array_equal, saved.adapter.weights, done.policy.adapter.weights)
    with pytest.raises(ConfigError, match=r"lora_rank: 3, but the adapter of .* has rank 2"):
        run(tmp_path / "other", policy=saved, lora_rank=3)
    further = run(tmp_path / "further", policy=saved, steps=1)
    assert further.policy.adapter.rank == 2


def test_a_resumed_adapter_goes_on_bit_for_bit(tmp_path):
    more = dict(steps=4, checkpoint_interval=2, lora_dropout=0.3, **LORA)
    whole = run(tmp_path / "whole", **more)

    calls = []

    def interrupted(task, episode):
        calls.append(0)
        if len(calls) > 8 * 3:
            raise KeyboardInterrupt
        return short(task, episode)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", reward=interrupted, **more)
    resumed = grpo.train(
        config(tmp_path / "cut", resume=True, **more),
        policy=tiny_policy(), tasks=tasks(), reward=short,
    )  # fmt: skip
    jax.tree.map(
        np.testing.assert_array_equal,
        resumed.policy.adapter.weights,
        whole.policy.adapter.weights,
    )


def test_sft_dropout_is_off_in_evaluation(tmp_path):
    rows = [{"prompt": f"{i}=", "completion": f"|{i}"} for i in range(40)]

    def train(folder, **more):
        settings = sft.SFTConfig(
            model="none", run_folder=str(folder), batch_size=8, steps=2, evaluation_fraction=0.2,
            learning_rate=1e-2, tensorboard=False, **LORA, **more,
        )  # fmt: skip
        return sft.train(settings, policy=tiny_policy(), data=rows)

    plain, dropping = train(tmp_path / "a"), train(tmp_path / "b", lora_dropout=0.9)
    assert plain.evaluations[0]["loss"] == dropping.evaluations[0]["loss"]
    assert plain.evaluations[-1]["loss"] != dropping.evaluations[-1]["loss"]


def test_adapter_settings_without_a_rank_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lora_alpha: 8.0, but no adapter is trained"):
        run(tmp_path / "r", lora_alpha=8.0)


def test_a_publication_that_changed_nothing_stops_the_run(tmp_path):
    """float32 has no room for such a step: every weight rounds back to what it was."""
    from tunix.errors import RunError

    with pytest.raises(RunError, match=r"left every published number as it was"):
        run(tmp_path / "r", learning_rate=1e-30, adam_epsilon=1.0)
