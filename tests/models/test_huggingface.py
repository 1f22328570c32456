import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden.weights import MODELS, weights
from tunix.errors import ModelError
from tunix.models import huggingface
from tunix.models.llama import Llama3Scaling, parameter_shapes
from tunix.models.policy import load_policy, save_policy

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes):
    return MODELS["gqa_tied"] | changes


def equal(first, second):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, second))


# config.json


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_scaling_in_the_forms_of_transformers_4_and_5(rope):
    content = config(**rope)
    if "rope_theta" not in rope:
        del content["rope_theta"]
    parsed = huggingface.parse_config(content)
    assert parsed.rope_theta == 5e5
    assert parsed.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
def test_no_scaling(scaling):
    parsed = huggingface.parse_config(config(rope_scaling=scaling))
    assert parsed.rope_scaling is None
    assert parsed.rope_theta == 10000.0


def test_defaults():
    content = config(num_key_value_heads=None, head_dim=None)
    del content["rope_theta"], content["rms_norm_eps"], content["tie_word_embeddings"]
    parsed = huggingface.parse_config(content)
    assert (parsed.num_kv_heads, parsed.head_dim) == (4, 8)
    assert (parsed.rope_theta, parsed.rms_norm_epsilon) == (10000.0, 1e-6)
    assert not parsed.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, r"'qwen2'.*'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"model_type": None}, "model_type = None"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"'linear'.*'default', 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, r"rope_parameters.*'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor"),
        ({"num_attention_heads": 5, "num_key_value_heads": None}, "not a multiple"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"hidden_size": "32"}, "hidden_size = '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_is_not_supported_is_named(changes, match):
    with pytest.raises(ModelError, match=match):
        huggingface.parse_config(config(**changes))


def test_config_round_trip():
    for content in MODELS.values():
        parsed = huggingface.parse_config(content)
        again = huggingface.config_content(parsed, "float32")
        assert huggingface.parse_config(json.loads(json.dumps(again))) == parsed


# weights


def test_matrices_are_transposed_and_stacked(tiny_folder):
    policy, stored = load_policy(tiny_folder("mha_untied")), weights("mha_untied")
    shapes = jax.tree.map(lambda leaf: leaf.shape, policy.params)
    assert shapes == parameter_shapes(policy.config)
    up = stored["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(policy.params["layers"]["up"][1], up.T)
    np.testing.assert_array_equal(policy.params["head"], stored["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_dtypes(tiny_folder, source, dtype):
    """Every stored float type in every target type, rounded once."""

    def cast(tensors):
        tensors.update({name: value.astype(source) for name, value in tensors.items()})

    params = load_policy(tiny_folder("gqa_tied", change=cast), dtype=dtype).params
    stored = weights("gqa_tied")["model.layers.0.mlp.down_proj.weight"].astype(source)
    assert params["layers"]["down"].dtype == dtype
    np.testing.assert_array_equal(params["layers"]["down"][0], stored.T.astype(dtype))


def test_unknown_dtype_lists_the_known(tiny_folder):
    with pytest.raises(ModelError, match=r"'int8' is not one of float32, bfloat16, float16"):
        load_policy(tiny_folder("gqa_tied"), dtype="int8")


def shard(folder, count=3):
    """Split a folder's weights over files, as large models are published."""
    tensors = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    files = {name: f"model-{i % count}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return files


def test_sharded_equals_single(tiny_folder):
    single = load_policy(tiny_folder("mha_untied"))
    folder = tiny_folder("mha_untied")
    shard(folder)
    assert equal(load_policy(folder).params, single.params)


def test_broken_shards_are_named(tiny_folder):
    folder = tiny_folder("mha_untied")
    files = shard(folder)
    index = folder / "model.safetensors.index.json"
    moved = next(name for name, file in files.items() if file == "model-0.safetensors")
    index.write_text(json.dumps({"weight_map": files | {moved: "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=rf"model-2\.safetensors: tensor '{moved}' is missing"):
        load_policy(folder)
    index.write_text(json.dumps({"weight_map": files}))
    os.remove(folder / "model-1.safetensors")
    with pytest.raises(ModelError, match=r"model-1\.safetensors does not exist; .*index\.json"):
        load_policy(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json has no weight_map"):
        load_policy(folder)


def test_old_buffers_and_a_duplicate_head_are_tolerated(tiny_folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    folder = tiny_folder("gqa_tied", change=change)
    assert "head" not in load_policy(folder).params


def set_tensor(name, value):
    return lambda tensors: tensors.update({name: value})


def drop_tensor(name):
    return lambda tensors: tensors.pop(name)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop_tensor(UP), rf"'{UP}' of shape \(48, 32\) is missing"),
        (set_tensor(UP, np.zeros((48, 31), np.float32)), r"shape \(48, 31\), expected \(48, 32\)"),
        (set_tensor(UP, np.zeros((32, 48), np.float32)), rf"'{UP}' has shape \(32, 48\)"),
        (set_tensor("model.extra", np.zeros(2, np.float32)), r"1 unexpected.*'model\.extra'"),
        (set_tensor(UP, np.zeros((48, 32), np.int8)), rf"'{UP}' has dtype I8.*BF16"),
        (set_tensor("lm_head.weight", np.ones((61, 32), np.float32)), "tie_word_embeddings is tru"),
    ],
)
def test_misfits_are_named(tiny_folder, change, match):
    with pytest.raises(ModelError, match=match):
        load_policy(tiny_folder("gqa_tied", change=change))


def test_missing_head_of_an_untied_model(tiny_folder):
    with pytest.raises(ModelError, match=r"'lm_head\.weight' of shape \(61, 32\) is missing"):
        load_policy(tiny_folder("mha_untied", change=drop_tensor("lm_head.weight")))


@pytest.mark.parametrize("keep", [4, 1000, -1])
def test_truncated_file_is_named(tiny_folder, keep):
    folder = tiny_folder("gqa_tied")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read.*truncated"):
        load_policy(folder)


def test_no_weights(tiny_folder):
    folder = tiny_folder("gqa_tied")
    os.remove(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors does not exist"):
        load_policy(folder)


# saving


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_folder_is_the_same_model(tiny_folder, tmp_path, name, dtype):
    policy = load_policy(tiny_folder(name), dtype=dtype)
    save_policy(policy, tmp_path / "saved")
    again = load_policy(tmp_path / "saved", dtype=dtype)
    assert again.config == policy.config
    assert again.stop_ids == policy.stop_ids == {0}
    assert equal(again.params, policy.params)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == weights(name).keys()
    if dtype == "float32":
        for key, value in weights(name).items():
            np.testing.assert_array_equal(tensors[key], value)


def test_saved_in_shards(tiny_folder, tmp_path):
    """No file is larger than asked, unless one tensor is; nothing is lost or stored twice."""
    policy = load_policy(tiny_folder("mha_untied"))
    most = 10_000
    save_policy(policy, tmp_path / "saved", max_shard_bytes=most)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "saved").glob("model-*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    stored = {}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= most
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert not stored.keys() & tensors.keys()
        stored |= tensors
    assert stored.keys() == weights("mha_untied").keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert equal(load_policy(tmp_path / "saved").params, policy.params)
    policy.params["final_norm"] = policy.params["final_norm"] + 1
    save_policy(policy, tmp_path / "saved")  # one file now; the old index no longer counts
    assert equal(load_policy(tmp_path / "saved").params, policy.params)


def test_saving_again_replaces_the_file_at_once(tiny_folder, tmp_path):
    policy = load_policy(tiny_folder("gqa_tied"))
    save_policy(policy, tmp_path / "saved")
    policy.params["final_norm"] = policy.params["final_norm"] + 1
    save_policy(policy, tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert jnp.array_equal(again.params["final_norm"], policy.params["final_norm"])
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
