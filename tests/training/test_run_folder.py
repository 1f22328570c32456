import dataclasses
import json
import subprocess
import sys
import time
import warnings

import pytest
import yaml

from tunix.config import TrainingConfig
from tunix.errors import ConfigError, RunError
from tunix.metrics.sinks import JsonLines
from tunix.training.run_folder import RunFolder, default_folder


def config(**changes):
    return TrainingConfig(model="m", tensorboard=False, **changes)


def test_records_reproduce_the_run(tmp_path):
    from tunix.config_parsing import load_config

    path = tmp_path / "deep" / "run"
    folder = RunFolder.open(path, "sft", config(run_folder=str(path), learning_rate=3e-5))
    folder.close()
    again = load_config(TrainingConfig, path / "config.yaml")
    assert again == config(learning_rate=3e-5)
    environment = json.loads((path / "environment.json").read_text())
    assert environment["command"] == "sft"
    assert environment["versions"]["jax"]
    assert environment["device_count"] >= 1


def test_metrics_samples_offsets_and_cut_back(tmp_path):
    folder = RunFolder.open(tmp_path, "sft", config())
    folder.append_metrics({"step": 1, "loss": float("nan")})
    folder.append_samples([{"step": 1, "text": "a"}, {"step": 1, "text": "b"}])
    offsets = folder.offsets()
    kept = {name: (tmp_path / name).read_bytes() for name in offsets}
    folder.append_metrics({"step": 2, "loss": 1.0})
    folder.append_samples([{"step": 2}])
    folder.close()
    folder = RunFolder.open(tmp_path, "sft", config(), resume=True)
    folder.cut_back(offsets)
    assert {name: (tmp_path / name).read_bytes() for name in offsets} == kept
    assert json.loads(kept["metrics.jsonl"]) == {"step": 1, "loss": None}
    folder.cut_back({})
    assert folder.offsets() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    with pytest.raises(RunError, match="was changed"):
        folder.cut_back(offsets)
    folder.close()
    folder.close()


def test_in_use_names_folder_and_process(tmp_path):
    code = (
        "import sys, time; from tunix.training.run_folder import RunFolder;"
        "from tunix.config import TrainingConfig;"
        f"RunFolder.open({str(tmp_path)!r}, 'sft', TrainingConfig(model='m'));"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(RunError, match=f"{tmp_path} is in use by process {other.pid}"):
            RunFolder.open(tmp_path, "sft", config(), resume=True)
        other.kill()
        other.wait()
    RunFolder.open(tmp_path, "sft", config(), resume=True).close()


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    folder = RunFolder.open(tmp_path, "sft", config())
    folder.close()
    folder = RunFolder.open(tmp_path, "sft", config(seed=3))  # nothing was computed in it yet
    folder.append_metrics({"step": 1})
    folder.close()
    with pytest.raises(RunError, match=r"already holds a run.*--resume"):
        RunFolder.open(tmp_path, "sft", config(seed=3))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, True),
        ({"run_folder": "elsewhere", "resume": True, "console": "none"}, True),
        ({"checkpoint_interval": 3, "keep_checkpoints": 9}, True),
        ({"learning_rate": 1e-3}, False),
        ({"seed": 1}, False),
        ({"model": "other"}, False),
    ],
)
def test_resume_keeps_the_config(tmp_path, changes, allowed):
    RunFolder.open(tmp_path, "sft", config()).close()
    changed = dataclasses.replace(config(), **changes)
    if allowed:
        RunFolder.open(tmp_path, "sft", changed, resume=True).close()
        return
    (field,) = changes
    with pytest.raises(ConfigError, match=f"{field}: {changes[field]!r} differs from"):
        RunFolder.open(tmp_path, "sft", changed, resume=True)
    with pytest.raises(ConfigError, match="run of 'sft'"):
        RunFolder.open(tmp_path, "grpo", config(), resume=True)


def test_steps_may_be_raised_not_lowered(tmp_path):
    from tunix.config import PolicyGradientConfig

    def steps(n):
        return PolicyGradientConfig(model="m", steps=n, tensorboard=False)

    RunFolder.open(tmp_path, "grpo", steps(10)).close()
    RunFolder.open(tmp_path, "grpo", steps(20), resume=True).close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["steps"] == 20
    with pytest.raises(ConfigError, match="steps: 10 differs from 20"):
        RunFolder.open(tmp_path, "grpo", steps(10), resume=True)
    assert len(json.loads((tmp_path / "environment.json").read_text())["resumed"]) == 1


def test_nothing_to_resume(tmp_path):
    """A job that is always restarted with --resume starts a run where there is none; it says so."""
    with pytest.warns(RuntimeWarning, match="no run to resume; starting from the beginning"):
        RunFolder.open(tmp_path / "none", "sft", config(), resume=True).close()
    assert (tmp_path / "none" / "config.yaml").exists()
    with pytest.raises(ConfigError, match="run_folder is not set"):
        RunFolder.open(None, "sft", config(), resume=True)
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(RunError, match="missing or damaged"):
        RunFolder.open(tmp_path, "sft", config(), resume=True)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run cannot be written: Not a directory"):
        RunFolder.open(tmp_path / "file" / "run", "sft", config())


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    folder = RunFolder.open(tmp_path, "sft", config())

    def full(self, *rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "append", full)
    with pytest.raises(RunError, match=r"metrics.jsonl cannot be written: No space left.*--resume"):
        folder.append_metrics({"step": 1})
    folder.close()


def test_a_failing_tensorboard_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tunix.training.run_folder.TensorBoard", lambda *a: (_ for _ in ()).throw(OSError("bad"))
    )
    folder = RunFolder.open(tmp_path, "sft", dataclasses.replace(config(), tensorboard=True))
    said = []
    folder.warn = said.append
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            folder.append_metrics({"step": step, "loss": 1.0})
    folder.close()
    assert len(said) == 1
    assert "TensorBoard" in said[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_default_folder_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *a: "20300101-000000")
    first = default_folder("sft")
    first.mkdir(parents=True)
    assert default_folder("sft") != first
    assert not default_folder("sft").exists()
