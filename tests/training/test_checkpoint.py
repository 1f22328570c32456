import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tunix.errors import RunError
from tunix.training.checkpoint import Checkpoints


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert bits(x) == bits(y)


def state(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "layers": [
            {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)},
            {"w": jnp.asarray(rng.normal(size=(4,)), jnp.bfloat16)},
        ],
        "nothing": None,
        "special": jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32),
    }
    return {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "key": jax.random.key(seed),
        "raw_key": jnp.array([seed, 2**32 - 1], jnp.uint32),
        "count": jnp.int32(16777217),
        "host": np.arange(3.0),
        "empty": jnp.zeros((0, 3)),
    }


def test_round_trip_bit_for_bit(tmp_path):
    saved = state(1)
    with_record = {"step": 5, "offsets": {"metrics.jsonl": 12}, "best": None, "x": 0.1}
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest_step() is None
    checkpoints.save(5, saved, with_record, None)
    checkpoints.close()
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest_step() == 5
    restored, record = checkpoints.restore(5, state(2))
    same(restored, saved)
    assert record == with_record
    assert isinstance(restored["host"], np.ndarray)
    saved.pop("host")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
    with pytest.raises(RunError, match="host is only in the checkpoint"):
        checkpoints.restore(5, like)
    checkpoints.save(6, saved, {}, None)
    checkpoints.wait()
    same(checkpoints.restore(6, like)[0], saved)
    checkpoints.close()


def test_donated_right_after_saving(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    value = jnp.zeros(200_000)
    checkpoints = Checkpoints(tmp_path, keep=10)
    for n in range(1, 6):
        value = step(value)
        checkpoints.save(n, {"x": value}, {}, None)
        for _ in range(3):
            value = step(value)
    checkpoints.wait()
    for i, n in enumerate(range(1, 6)):
        got, _ = checkpoints.restore(n, {"x": jnp.zeros(200_000)})
        np.testing.assert_array_equal(got["x"], 1 + 4 * i)
    checkpoints.close()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": jnp.zeros((2, 3))}, r"b is only in the checkpoint"),
        (
            {"a": jnp.zeros((2, 3)), "b": jnp.int32(0), "c": jnp.zeros(1)},
            r"c is missing in the checkpoint",
        ),
        (
            {"a": jnp.zeros((3, 3)), "b": jnp.int32(0)},
            r"a is float32\[2, 3\], expected float32\[3, 3\]",
        ),
        (
            {"a": jnp.zeros((2, 3)), "b": jnp.float32(0)},
            r"b is int32\[\], expected float32\[\]",
        ),
        (
            {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.int32(0)},
            r"a is float32\[2, 3\], expected bfloat16\[2, 3\]",
        ),
    ],
)
def test_checkpoint_of_another_model(tmp_path, like, message):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"a": jnp.ones((2, 3)), "b": jnp.int32(16777217)}, {}, None)
    checkpoints.wait()
    with pytest.raises(RunError, match=r"checkpoint of another model.*" + message):
        checkpoints.restore(1, like)
    checkpoints.close()


def test_newest_and_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, score in enumerate([0.1, 0.9, None, 0.9, 0.3, float("nan"), 0.2], start=1):
        checkpoints.save(step, {"x": jnp.zeros(2)}, {}, score)
        if step > 1:  # the older one is there until the newer is complete
            assert step - 1 in checkpoints.steps()
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 7]
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=1)  # scores are remembered over a restart
    checkpoints.save(8, {"x": jnp.zeros(2)}, {}, 0.5)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 8]
    checkpoints.close()
    without = Checkpoints(tmp_path, keep=1, keep_best=False)
    without.save(9, {"x": jnp.zeros(2)}, {}, 0.0)
    without.close()
    assert without.steps() == [9]


def test_a_step_saved_twice_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": jnp.zeros(2)}, {"n": 1}, None)
    checkpoints.save(1, {"x": jnp.zeros(2)}, {"n": 2}, 0.7)
    checkpoints.wait()
    assert checkpoints.restore(1, {"x": jnp.zeros(2)})[1] == {"n": 1}
    checkpoints.save(2, {"x": jnp.zeros(2)}, {}, 0.1)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.close()


def test_a_failed_background_save_is_an_error_and_costs_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": jnp.ones(2)}, {}, None)
    checkpoints.wait()

    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr("pathlib.Path.rename", full)

    def save_and_check():
        checkpoints.save(2, {"x": jnp.ones(2)}, {}, None)
        deadline = time.time() + 10
        while time.time() < deadline:
            checkpoints.check()
            time.sleep(0.02)

    with pytest.raises(RunError, match=rf"step 2 could not be saved in {tmp_path}.*No space"):
        save_and_check()
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    checkpoints.save(3, {"x": jnp.ones(2)}, {}, None)
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/c cannot be used"):
        Checkpoints(tmp_path / "file" / "c", keep=1)


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "3").mkdir()
    with pytest.raises(RunError, match=f"{tmp_path / '3'} cannot be read"):
        Checkpoints(tmp_path, keep=1)


SAVER = """
import sys, numpy as np
from tunix.training.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
step = checkpoints.latest_step() or 0
print("ready", flush=True)
while True:
    step += 1
    value = {f"w{i}": np.full((64, 1024), step + i, np.float32) for i in range(20)}
    checkpoints.save(step, value, {"step": step}, None)
    print(step, flush=True)
"""


def test_killed_in_mid_save(tmp_path):
    rng = random.Random(4)
    like = {f"w{i}": np.zeros((64, 1024), np.float32) for i in range(20)}
    newest = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "ready\n"
            for _ in range(2):
                started = int(saver.stdout.readline())
            time.sleep(rng.random() * 0.3)
            os.kill(saver.pid, signal.SIGKILL)
            saver.wait()
        checkpoints = Checkpoints(tmp_path, keep=1)
        step = checkpoints.latest_step()
        assert step is not None
        assert step >= max(newest, started - 1)
        newest = step
        restored, record = checkpoints.restore(step, like)
        assert record == {"step": step}
        for i in range(20):
            assert (restored[f"w{i}"] == step + i).all()
        assert all(entry.name.isdigit() for entry in tmp_path.iterdir())
        checkpoints.close()
