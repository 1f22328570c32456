"""GRPO end to end on the tiny model: laws of the loop that a single update does not show."""

import json
import math

import jax
import numpy as np
import pytest
import yaml

from tests.policies import tiny_policy
from tunix.algorithms.language import grpo
from tunix.algorithms.language.grpo import GRPOConfig
from tunix.errors import ConfigError, DataError, RunError
from tunix.types import Task


def config(folder, **more):
    fields = dict(
        model="none", run_folder=str(folder), steps=3, tasks_per_step=2, group_size=4, slots=8,
        max_prompt_tokens=32, max_completion_tokens=6, learning_rate=1e-2, evaluation_size=4,
        evaluation_interval=0, tensorboard=False,
    )  # fmt: skip
    return GRPOConfig(**(fields | more))


def tasks(number=12):
    return [
        Task(f"t{i}", messages=[{"role": "user", "content": f"{i}="}], answer=str(i),
             split="train" if i < 8 else "held_out")
        for i in range(number)
    ]  # fmt: skip


def short(task, episode):
    """Varied within a group: how few tokens were used, and of what kind."""
    return -float(episode.completion_tokens) + float(episode.tokens[-1] % 3)


def run(folder, reward=short, policy=None, **more):
    return grpo.train(
        config(folder, **more), policy=policy or tiny_policy(), tasks=tasks(), reward=reward
    )


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.6},
        {"temperature": 1.5},
        {"top_p": 0.9, "temperature": 0.8},
        {"top_k": 5, "min_p": 0.05},
    ],
)
def test_the_ratio_is_one_before_every_update(tmp_path, more):
    """Four steps at a large rate: engine and trainer agree on every token at each step's start."""
    done = run(tmp_path / "r", steps=4, kl_coefficient=0.1, **more)
    for row in done.metrics:
        assert row["kl"] < 1e-7
        assert row["clip_fraction"] == 0
    assert done.metrics[0]["kl_reference"] < 1e-7
    assert done.metrics[-1]["kl_reference"] > 1e-3
    before, after = tiny_policy().params, done.policy.params
    assert not np.array_equal(before["embedding"], np.asarray(after["embedding"]))


def test_several_updates_a_step_move_away_from_the_behaviour(tmp_path):
    done = run(tmp_path / "r", updates_per_step=2, epochs_per_step=2, steps=2)
    assert all(row["updates"] == 4 for row in done.metrics)
    assert done.metrics[0]["kl"] > 1e-6


def test_a_seed_fixes_a_run_and_another_changes_it(tmp_path):
    one, two, other = (run(tmp_path / str(i), seed=s) for i, s in enumerate((0, 0, 1)))
    for a, b in zip(
        jax.tree.leaves(one.policy.params), jax.tree.leaves(two.policy.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert [r["reward_mean"] for r in one.metrics] != [r["reward_mean"] for r in other.metrics]


def test_micro_batches_and_slots_are_memory_knobs(tmp_path):
    one = run(tmp_path / "a", micro_batch_tokens=4096)
    two = run(tmp_path / "b", micro_batch_tokens=64, slots=16)
    assert one.metrics[0]["reward_mean"] == two.metrics[0]["reward_mean"]
    assert one.metrics[0]["loss"] == pytest.approx(two.metrics[0]["loss"], abs=1e-6)
    assert one.metrics[0]["gradient_norm"] == pytest.approx(
        two.metrics[0]["gradient_norm"], rel=1e-4
    )


def test_equal_rewards_teach_nothing(tmp_path):
    done = run(tmp_path / "r", reward=lambda task, episode: 1.0)
    assert all(
        row["gradient_norm"] == 0 and row["equal_reward_groups"] == 2 for row in done.metrics
    )
    skipped = run(tmp_path / "s", reward=lambda task, episode: 1.0, skip_equal_groups=True)
    assert all(row["updates"] == 0 for row in skipped.metrics)
    for got, was in zip(
        jax.tree.leaves(skipped.policy.params), jax.tree.leaves(tiny_policy().params), strict=True
    ):
        np.testing.assert_array_equal(got, was)


def test_a_nan_reward_leaves_loss_and_statistics(tmp_path):
    """With one NaN of four the mean reward is that of the other three; parameters stay finite."""
    done = run(
        tmp_path / "r", reward=lambda t, e: math.nan if e.sample == 0 else float(e.sample), steps=2
    )
    for row in done.metrics:
        assert row["reward_mean"] == 2.0
        assert row["invalid_samples"] == 2
        assert row["skipped_updates"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(done.policy.params))


def test_parts_are_logged_in_training_and_evaluation(tmp_path):
    """Unweighted by name; the total, which is trained on, has the weights. Also from a file."""
    weights = {"format:.*": 2.0, "length:3": -1.0}
    done = grpo.train(
        config(tmp_path / "r", reward=weights, steps=1), policy=tiny_policy(), tasks=tasks()
    )
    rows = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    for row, prefix in zip(map(json.loads, rows), ("evaluation/", "", "evaluation/"), strict=True):
        assert row[f"{prefix}reward/format:.*"] == 1
        assert 0 <= row[f"{prefix}reward/length:3"] < 1
        total = 2 - row[f"{prefix}reward/length:3"]
        assert row[f"{prefix}reward_mean"] == pytest.approx(total)
    assert done.metrics[0]["invalid_samples"] == 0
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["reward"] == weights


def test_a_group_with_one_usable_sample_is_skipped(tmp_path):
    done = run(
        tmp_path / "r", reward=lambda t, e: 1.0 if e.sample == 0 else None, steps=2,
        max_invalid_share=1.0,
    )  # fmt: skip
    assert all(row["updates"] == 0 for row in done.metrics)


def test_many_useless_rewards_stop_the_run_with_its_state_saved(tmp_path):
    with pytest.raises(RunError, match=r"in 3 steps in a row more than 50%.*ValueError: no judge"):
        run(tmp_path / "r", reward=failing, steps=10)


def failing(task, episode):
    raise ValueError("no judge")


def test_truncated_completions_are_handled_as_chosen(tmp_path):
    """Every completion of one token that is not a stop is cut: kept, masked, or worth nothing."""
    cut = dict(max_completion_tokens=1, steps=1)
    kept = run(tmp_path / "k", reward=lambda t, e: float(e.tokens[-1]), **cut).metrics[0]
    masked = run(tmp_path / "m", reward=lambda t, e: float(e.tokens[-1]), truncated="mask", **cut)
    zero = run(tmp_path / "z", reward=lambda t, e: 5.0, truncated="zero", **cut)
    zeroed = zero.metrics[0]
    assert kept["truncated_samples"] >= 6
    assert kept["gradient_norm"] > 0
    assert masked.metrics[0]["reward_mean"] == kept["reward_mean"]
    assert masked.metrics[0].get("gradient_norm", 0) != kept["gradient_norm"]
    assert zeroed["reward_mean"] == 5.0 * (8 - zeroed["truncated_samples"]) / 8
    assert zero.evaluations[-1]["reward_mean"] < 5.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"group_size": 1}, "group_size: 1; this algorithm compares"),
        ({"updates_per_step": 3}, "updates_per_step: 3 parts of 2 groups"),
        ({"max_completion_tokens": 600}, r"32 \+ 600 = 632, more than the model's context of 512"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "r", **more)


def test_nothing_to_judge_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reward: nothing judges the answers"):
        grpo.train(config(tmp_path / "r"), policy=tiny_policy(), tasks=tasks())


def test_the_run_folder_tells_the_run(tmp_path):
    done = run(tmp_path / "r", evaluation_interval=2)
    rows = [
        json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    evaluated = [row["step"] for row in rows if "evaluation/success" in row]
    assert evaluated == [0, 2, 3]
    assert [e["step"] for e in done.evaluations] == [0, 2, 3]
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "samples.jsonl",
        "checkpoints",
        "model",
        "trace.json",
    } <= names
    real = sum(row["tokens"] for row in rows if "tokens" in row)
    assert 3 * 8 * 4 < real < 3 * 8 * (32 + 6)


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path):
    straight = run(tmp_path / "a", steps=5, checkpoint_interval=2)
    stopper = Stopper(after=3)
    with pytest.raises(KeyboardInterrupt):
        grpo.train(
            config(tmp_path / "b", steps=5, checkpoint_interval=2),
            policy=tiny_policy(), tasks=tasks(), reward=short, observers=[stopper],
        )  # fmt: skip
    resumed = run(tmp_path / "b", steps=5, checkpoint_interval=2, resume=True)
    assert [r["step"] for r in resumed.metrics] == [1, 2, 3, 4, 5]
    for a, b in zip(
        jax.tree.leaves(straight.policy.params), jax.tree.leaves(resumed.policy.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_resumed_run_keeps_the_date(tmp_path):
    """The template writes microseconds, and still every prompt begins with the run's beginning."""
    policy = tiny_policy()
    policy.tokenizer.chat_template = "{{ strftime_now('%M%S%f') }}" + policy.tokenizer.chat_template
    seen = set()

    def look(task, episode):
        context = episode.tokens[: int(np.argmax(episode.action_mask))]
        seen.add(policy.tokenizer.decode(context)[:10])
        return short(task, episode)

    for steps in (1, 2):
        run(tmp_path / "r", reward=look, policy=policy, steps=steps, resume=steps == 2)
    assert len(seen) == 1


def test_two_tasks_of_one_id_are_refused(tmp_path):
    with pytest.raises(DataError, match="2 tasks have the id 't0'; expected different ones"):
        grpo.train(
            config(tmp_path / "r"), policy=tiny_policy(), tasks=[*tasks(), tasks()[0]], reward=short
        )


class Stopper:
    """An observer that interrupts a run, as Ctrl-C between two steps does."""

    def __init__(self, after):
        self.after = after

    def start(self, run_folder, total_steps, first_step):
        pass

    def step(self, metrics, times):
        if metrics["step"] == self.after:
            raise KeyboardInterrupt

    def evaluation(self, step, metrics):
        pass

    def message(self, text):
        pass

    def close(self):
        pass


def test_bfloat16_keeps_what_it_trains_in_float32(tmp_path):
    """A step of 1e-5 on a weight of 0.1 is lost in bfloat16, whose neighbours are 5e-4 apart."""
    policy = tiny_policy()
    policy.params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), policy.params)
    seen = []

    class Watch:
        def start(self, *_): ...
        def step(self, metrics, times): ...
        def evaluation(self, *_): ...
        def message(self, text):
            seen.append(text)

        def close(self): ...

    from tunix.training import learner

    kept = []
    original = learner.Learner.update

    def update(self, batch, key=None):
        metrics = original(self, batch, key)
        kept.append(jax.tree.map(np.array, self.state.params))
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.Learner, "update", update)
        done = run(tmp_path / "r", policy=policy, dtype="bfloat16", learning_rate=1e-4, steps=3)
    assert done.policy.params["embedding"].dtype == "bfloat16"
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(kept[0]))
    moved = np.abs(kept[-1]["layers"]["query"] - kept[0]["layers"]["query"])
    assert (moved > 0).mean() > 0.9


def test_a_resumed_run_knows_the_steps_before(tmp_path):
    """``evaluations[0]`` is the one before any update, and the rate of each step is logged."""
    run(tmp_path / "r", steps=2, checkpoint_interval=1, warmup_steps=4)
    again = grpo.train(
        config(tmp_path / "r", steps=4, checkpoint_interval=1, warmup_steps=4, resume=True),
        policy=tiny_policy(), tasks=tasks(), reward=short,
    )  # fmt: skip
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4]
    assert [row["step"] for row in again.evaluations] == [0, 2, 4]
    rates = [row["learning_rate"] for row in again.metrics]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
