"""``kill -9`` at random moments, also in mid-save, then ``--resume``: the same run, bit for bit."""

import random
import signal
import subprocess
import time

import pytest

from tests.faults import runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return runs.make_model(tmp_path_factory.mktemp("model") / "tiny")


def start(words):
    return subprocess.Popen(
        words, env=runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def wait_for_moment(process, folder, rng):
    """Sleep until a random moment of one of three kinds; return its kind."""
    kind = rng.choice(["any time", "after a step", "after a step", "in mid-save"])
    began, lines = time.monotonic(), count(folder)
    wanted = lines + rng.randint(1, 16)
    until = began + (rng.uniform(0.5, 12) if kind == "any time" else 120)
    while process.poll() is None and time.monotonic() < until:
        if kind == "after a step" and count(folder) >= wanted:
            time.sleep(rng.uniform(0, 0.2))
            break
        if kind == "in mid-save" and time.monotonic() > began + 1 and saving(folder):
            time.sleep(rng.uniform(0, 0.03))
            break
        time.sleep(0.002)
    return kind


def count(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(folder):
    path = folder / "checkpoints"
    return path.exists() and any("tmp" in entry.name for entry in path.iterdir())


def kill_until_done(algorithm, model, folder, kills, seed):
    """Run, kill, resume, kill, ...; after ``kills`` kills let it finish. Returns the kinds."""
    rng = random.Random(seed)
    words, done = runs.command(algorithm, model, folder), []
    for _ in range(kills):
        process = start(words)
        kind = wait_for_moment(process, folder, rng)
        finished = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if finished:
            assert process.returncode == 0, errors.decode()
            break
        done.append(kind)
        words = runs.command(algorithm, model, folder, "--resume")
    else:
        last = runs.finish(words)
        assert last.returncode == 0, last.stderr
    return done


def check(algorithm, model, tmp_path, kills, seed):
    straight = runs.finish(runs.command(algorithm, model, tmp_path / "straight"))
    assert straight.returncode == 0, straight.stderr
    wanted = runs.outcome(tmp_path / "straight")
    total, attempt = 0, 0
    while total < kills:
        folder = tmp_path / f"killed-{attempt}"
        total += len(kill_until_done(algorithm, model, folder, kills - total, seed + attempt))
        rows, samples, weights = runs.outcome(folder)
        assert rows == wanted[0]
        assert samples == wanted[1]
        assert weights == wanted[2]
        attempt += 1


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_two_kills(algorithm, model, tmp_path):
    check(algorithm, model, tmp_path, 2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_thirty_kills(algorithm, model, tmp_path):
    check(algorithm, model, tmp_path, 30, seed=100)
