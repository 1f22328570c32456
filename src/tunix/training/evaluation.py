"""The evaluator: the same collector on held-out tasks; nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix.rollout.collector import Collector
from tunix.types import Task, Trajectory

EVALUATION_EPOCH = -1
"""Seeds of evaluation episodes are drawn from a pass of their own, the same at each evaluation."""


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a success rate (Wilson 1927); ``(0, 1)`` without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True)
class Evaluator:
    """Plays each held-out task with fixed seeds: two evaluations differ by the policy only."""

    collector: Collector
    tasks: list[Task]
    success_reward: float

    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics and, for people, what was asked, answered and given.

        ``success`` is the share of judged episodes whose reward reached ``success_reward``, with
        its 95% interval (``success_low``, ``success_high``); ``tasks`` counts the judged episodes,
        ``invalid_samples`` those without a usable reward, which are in no other number;
        ``reward/NAME`` is as ``part_means``.
        """
        groups = self.collector.collect([(task, EVALUATION_EPOCH) for task in self.tasks])
        played = [(g.task, t) for g in groups for t in g.trajectories]
        judged = [t for _, t in played if t.reward is not None]
        rewards = np.array([t.reward for t in judged], dtype=np.float64)
        successes = int((rewards >= self.success_reward).sum())
        low, high = wilson_interval(successes, len(judged))
        lengths = [t.completion_tokens for t in judged]
        metrics = {
            "success": successes / len(judged) if judged else math.nan,
            "success_low": low,
            "success_high": high,
            "reward_mean": float(rewards.mean()) if judged else math.nan,
            "completion_tokens_mean": float(np.mean(lengths)) if judged else math.nan,
            "tasks": float(len(judged)),
            "invalid_samples": float(len(played) - len(judged)),
        } | part_means(judged)
        return metrics, [sample_record(task, t) for task, t in played]


def part_means(judged: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named part of the reward, unweighted, as ``reward/NAME``."""
    names = sorted(judged[0].reward_parts.keys() - {"reward"}) if judged else []
    return {f"reward/{n}": float(np.mean([t.reward_parts[n] for t in judged])) for n in names}


def sample_record(task: Task, played: Trajectory) -> dict[str, Any]:
    """One line of ``samples.jsonl``: an episode as a person reads it."""
    return {
        "task": task.id,
        "messages": played.messages,
        "answer": task.answer,
        "reward": played.reward,
        "reward_parts": played.reward_parts,
        "status": played.status,
        "error": played.error,
        "completion_tokens": played.completion_tokens,
    }
