"""Real runs of the ``tunix`` command on a tiny model, for the tests that kill and hurt them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax

from tests.conftest import TINY
from tunix.environments.verifiable import ALPHABET
from tunix.models import llama
from tunix.models.policy import Policy, save_policy
from tunix.text.tokenizer import Tokenizer

TIMINGS = ("seconds", "tokens_per_second", "compilations")
"""Logged numbers that may differ between a run and its repetition; so may ``time/...``."""


def make_model(folder: Path) -> Path:
    """Write the tiny model with a character tokenizer."""
    tokenizer = Tokenizer.characters(ALPHABET)
    params = llama.initialize(jax.random.key(7), TINY)
    save_policy(Policy(TINY, params, tokenizer, frozenset({tokenizer.eos_id})), folder)
    return folder


def command(algorithm: str, model: Path, folder: Path, *more: str) -> list[str]:
    """Return the command line of a short run with the shipped checkpoint interval."""
    options = {
        "sft": ["--data", "arithmetic", "--steps", "45", "--batch_size", "8",
                "--evaluation_interval", "15", "--schedule", "cosine"],
        "grpo": ["--tasks", "count_letters", "--steps", "45", "--tasks_per_step", "2",
                 "--group_size", "4", "--slots", "8", "--max_prompt_tokens", "32",
                 "--max_completion_tokens", "8", "--evaluation_interval", "15",
                 "--evaluation_size", "16", "--epochs_per_step", "2", "--kl_coefficient", "0.01"],
    }[algorithm]  # fmt: skip
    shared = ["--model", str(model), "--run_folder", str(folder), "--console", "plain"]
    run = "from tunix.cli.main import main; raise SystemExit(main())"
    rate = ["--learning_rate", "1e-3", "--warmup_steps", "5"]
    return [sys.executable, "-c", run, algorithm, *shared, *rate, *options, *more]


def environment() -> dict[str, str]:
    """The parent's environment; compiled programs are shared with it."""
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def finish(words: list[str]) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )


def metrics(folder: Path) -> list[dict]:
    """Read the metrics of a run without its timings."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = lambda name: name not in TIMINGS and not name.startswith("time/")  # noqa: E731
    return [{k: v for k, v in row.items() if kept(k)} for row in rows]


def outcome(folder: Path) -> tuple[list[dict], str, bytes]:
    """What a resumed run must share with an uninterrupted one, bit for bit."""
    samples = (folder / "samples.jsonl").read_text() if (folder / "samples.jsonl").exists() else ""
    return metrics(folder), samples, (folder / "model" / "model.safetensors").read_bytes()
