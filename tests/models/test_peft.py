"""Adapters of the real ``peft`` (tests/golden/make_lora.py) against ours, and those refused."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden.weights import tokens
from tests.models.test_golden import check_logits
from tests.models.test_lora import EVERYTHING, adapter
from tunix.errors import ConfigError, ModelError
from tunix.inference.engine import Engine
from tunix.inference.request import Request, SamplingParams
from tunix.models import llama, lora
from tunix.models.policy import load_policy, merged, save_policy

GOLDEN = Path(__file__).parents[1] / "golden" / "lora"
BASES = {"attention": "mha_untied", "everything": "mha_untied", "all_linear": "gqa_tied"}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tiny_folder):
    """Copies a golden adapter beside its base, which it names by a relative path."""

    def copy(name):
        base = tiny_folder(BASES[name])
        return shutil.copytree(GOLDEN / name, base.parent / "adapter", dirs_exist_ok=True)

    return copy


@pytest.fixture(params=list(BASES))
def golden(request, folder):
    policy = load_policy(folder(request.param))
    with np.load(GOLDEN / request.param / "logits.npz") as values:
        return policy, jnp.asarray(tokens(BASES[request.param])), values["logits"]


def wide(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)


def test_training_form(golden):
    policy, ids, logits = golden
    ours = llama.full_logits(policy.config, policy.params, ids, adapter=policy.adapter)
    check_logits(ours, logits)
    base = llama.full_logits(policy.config, policy.params, ids)
    assert np.abs(base - logits).max() > 1  # the adapter matters


def test_training_form_in_float64(golden, x64):
    policy, ids, logits = golden
    one = replace(policy.adapter, weights=wide(policy.adapter.weights))
    ours = llama.full_logits(policy.config, wide(policy.params), jnp.asarray(ids), adapter=one)
    assert np.abs(ours - logits).max() <= 1e-12


def test_engine_after_publication(golden):
    """The adapter comes by ``publish``; each token it samples has the golden log-probability."""
    policy, ids, logits = golden
    blank = replace(policy.adapter, weights=jax.tree.map(jnp.zeros_like, policy.adapter.weights))
    starts = [1, 2, 7, 20, 40]
    how = SamplingParams(max_tokens=1)
    requests = [Request(ids[0, :n].tolist(), how, seed=n, adapter=1) for n in starts]
    with Engine(
        policy.config, policy.params, adapters=[blank], slots=8, max_positions=64
    ) as engine:
        assert engine.publish(policy.adapter, 1)
        completions = engine.generate_sync(requests)
    for n, completion in zip(starts, completions, strict=True):
        expected = jax.nn.log_softmax(logits[0, n - 1])[completion.tokens[0]]
        assert abs(completion.logprobs[0] - expected) <= 1e-4


def test_merged_export(golden, tmp_path):
    policy, ids, logits = golden
    save_policy(merged(policy), tmp_path / "merged")
    whole = load_policy(tmp_path / "merged")
    assert whole.adapter is None
    check_logits(llama.full_logits(whole.config, whole.params, ids), logits)


def test_settings_are_read(folder):
    one = load_policy(folder("everything")).adapter
    assert (one.rank, one.alpha, one.rank_stabilized, one.dropout) == (3, 5.0, True, 0.1)
    assert set(one.weights) == {"layers", "embedding", "head"}
    assert set(load_policy(folder("attention")).adapter.weights["layers"]) == {"query", "value"}


@pytest.mark.parametrize("name", BASES)
def test_saved_again_it_is_the_same_file(folder, tmp_path, name):
    """Same tensor names, shapes and values, the base's own tensors apart."""
    source = folder(name)
    save_policy(load_policy(source), tmp_path / "saved")
    theirs, ours = load_file(source / WEIGHTS), load_file(tmp_path / "saved" / WEIGHTS)
    theirs = {k: v for k, v in theirs.items() if not k.endswith("base_layer.weight")}
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)


def write_for_check(base, folder):
    """What ``make_lora.py check`` opens: an adapter of ours on ``base``, merged, and its logits."""
    policy = load_policy(base)
    policy = replace(policy, adapter=adapter(policy.config, EVERYTHING, rank_stabilized=True))
    save_policy(policy, folder / "adapter")
    save_policy(merged(policy), folder / "merged")
    ids = tokens("mha_untied")
    with jax.enable_x64(True):
        one = replace(policy.adapter, weights=wide(policy.adapter.weights))
        logits = llama.full_logits(
            policy.config, wide(policy.params), jnp.asarray(ids), adapter=one
        )
        np.savez(folder / "values.npz", tokens=ids, logits=np.asarray(logits))


@pytest.mark.slow
def test_peft_opens_what_is_written(tiny_folder, tmp_path):
    for module in ("torch", "transformers", "peft"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install torch transformers peft")
    write_for_check(tiny_folder("mha_untied"), tmp_path)
    script = Path(__file__).parents[1] / "golden" / "make_lora.py"
    subprocess.run([sys.executable, str(script), "check", str(tmp_path)], check=True)


# what is refused


def refused(folder, match, **changed):
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | changed))
    with pytest.raises(ModelError, match=match):
        load_policy(folder)
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts"]),
        ("use_qalora", True),
        ("something_new_in_peft", {"a": 1}),
        ("init_lora_weights", "pissa_niter_16"),
        ("peft_type", "IA3"),
    ],
)
def test_settings_that_would_change_the_meaning_are_named(folder, field, value):
    refused(
        folder("attention"), rf"adapter_config\.json: {field} = .*is not supp", **{field: value}
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("r", 0), ("r", "4"), ("r", True), ("lora_alpha", "high"), ("lora_dropout", None)],
)
def test_settings_of_a_wrong_type_are_named(folder, field, value):
    refused(folder("attention"), rf"{field} = {value!r}, expected a", **{field: value})


def test_a_base_that_cannot_be_used_is_named(folder, tiny_folder):
    adapter = folder("attention")
    name = "base_model_name_or_path"
    refused(adapter, rf"{name} = None, expected the folder", **{name: None})
    refused(adapter, rf"{name}: no such file or folder: meta/Llama", **{name: "meta/Llama"})
    refused(adapter, rf"{name}: .*adapter is itself an adapter", **{name: str(adapter)})


def test_an_adapter_of_another_base_is_named(folder, tiny_folder):
    """Of other sizes; or of the same sizes and, as the stored embedding shows, other weights."""
    tiny_folder("gqa_tied")  # half as many key/value heads
    other = {"base_model_name_or_path": "../gqa_tied"}
    match = r"v_proj\.lora_B.* has shape \(32, 4\), expected \(16, 4\): the adapter is of another"
    refused(folder("attention"), match, **other)

    def change(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1

    adapter = folder("everything")
    load_policy(adapter)
    tiny_folder("mha_untied", change=change)
    refused(adapter, r"embed_tokens\.base_layer\.weight.* is not that of the base")


def test_another_rank_is_named(folder):
    refused(
        folder("attention"), r"shape \(4, 32\), expected \(8, 32\): .*another rank than r = 8", r=8
    )


LAYER = "base_model.model.model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(LAYER + "q_proj.lora_B.weight"), r"q_proj\.lora_B.*\(32, 4\) is missing"),
        (lambda t: t.update({LAYER + "q_proj.lora_C": t["x"]}), "unexpected.*q_proj.lora_C"),
        (lambda t: [t.pop(k) for k in list(t) if k != "x"], r"no tensor belongs to a module"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, match):
    path = folder("attention") / WEIGHTS
    tensors = load_file(path) | {"x": np.zeros(2, np.float32)}
    change(tensors)
    if len(tensors) > 1:
        tensors.pop("x")
    save_file(tensors, path)
    refused(path.parent, match)


def test_files_that_cannot_be_read_are_named(folder):
    path = folder("attention") / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    refused(path.parent, r"adapter_model\.safetensors cannot be read, perhaps it is truncated")
    path.unlink()
    refused(path.parent, r"adapter_model\.safetensors does not exist")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"lora_rank": 8}, "lora_rank: 8, but the adapter of .* has rank 4"),
        ({"lora_alpha": 7.0}, "lora_alpha: 7.0, but the adapter of .* has 6.0"),
        ({"lora_rank_stabilized": True}, "lora_rank_stabilized: True, but .* has False"),
        ({"lora_targets": ["k_proj"]}, r"lora_targets: .*'k_proj'.* has q_proj, v_proj"),
    ],
)
def test_a_run_that_asks_for_another_adapter_is_refused(folder, fields, match):
    from tunix.config import TrainingConfig
    from tunix.training.adapter import trained_adapter

    policy = load_policy(folder("attention"))
    same = {"lora_rank": 4, "lora_alpha": 6.0, "lora_targets": ["[qv]_proj"]}
    one = trained_adapter(TrainingConfig(model="m", **same), policy)
    assert isinstance(one, lora.Adapter)
    with pytest.raises(ConfigError, match=match):
        trained_adapter(TrainingConfig(model="m", **fields), policy)
