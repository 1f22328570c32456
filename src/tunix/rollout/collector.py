"""Collects groups of episodes: many at once, failures replaced, rewards judged, order kept."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunix.environments.base import SingleTurn
from tunix.inference.request import SamplingParams
from tunix.rewards.resolve import WeightedReward
from tunix.rollout.episode import EpisodeRunner, request_seed
from tunix.rollout.threads import call
from tunix.types import Group, Task, Trajectory

CONCURRENT_REWARDS = 32
"""Rewards judged at once in threads; more would only take turns at the interpreter."""


@dataclass
class Collector:
    """Plays ``size`` episodes of each task.

    A failed episode is replaced by a fresh sample of its task, up to ``retries`` times; then the
    group is short: the sample stays in it with reward None, masked and counted. So does one that
    a reward fails on. Without ``rewards`` the environment judges; where it is one of its own, what
    it gave is a part of the reward in any case. Groups come back in the order of their tasks,
    never in that of their arrival.
    """

    runner: EpisodeRunner
    rewards: Sequence[WeightedReward]
    sampling: SamplingParams
    size: int
    seed: int
    retries: int = 1
    reward_timeout: float = 30.0
    zero_truncated: bool = False
    """Give an episode that was cut at a limit the reward 0, whatever it was judged."""
    _gate: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._gate = asyncio.Semaphore(CONCURRENT_REWARDS)

    def collect(self, tasks: Sequence[tuple[Task, int]]) -> list[Group]:
        """Play all episodes of some ``(task, epoch)`` pairs and wait for them.

        Raises:
            DataError: a prompt that is too long or cannot be rendered.
        """
        return asyncio.run(self._collect(tasks))

    async def _collect(self, tasks: Sequence[tuple[Task, int]]) -> list[Group]:
        self._gate = asyncio.Semaphore(CONCURRENT_REWARDS)  # it belongs to one loop
        try:
            async with asyncio.TaskGroup() as running:
                episodes = [
                    [running.create_task(self._episode(task, epoch, i)) for i in range(self.size)]
                    for task, epoch in tasks
                ]
        except BaseExceptionGroup as several:  # the first one says what is wrong
            raise several.exceptions[0] from None
        return with_all_parts(
            [
                Group(task, [e.result() for e in group])
                for (task, _), group in zip(tasks, episodes, strict=True)
            ]
        )

    async def _episode(self, task: Task, epoch: int, sample: int) -> Trajectory:
        for attempt in range(self.retries + 1):
            number = sample + attempt * self.size  # a replacement is a new sample of the task

            def seed(turn: int, number: int = number) -> int:
                return request_seed(self.seed, task.id, epoch, number, turn)

            played = await self.runner.play(task, self.sampling, number, seed)
            if played.error is None:
                judged = await self._judge(task, played)
                cut = self.zero_truncated and judged.status == "truncated"
                return replace(judged, reward=0.0) if cut and judged.reward is not None else judged
        return played

    async def _judge(self, task: Task, played: Trajectory) -> Trajectory:
        parts: dict[str, tuple[Any, float]] = {}
        if not self.rewards or self.runner.make_environment is not SingleTurn:
            parts["environment"] = played.reward, 1.0
        several = await asyncio.gather(*(self._parts(r, task, played) for r in self.rewards))
        for reward, given in zip(self.rewards, several, strict=True):
            if isinstance(given, str):
                return replace(played, reward=None, error=given)
            for name, value in given.items():
                if name in parts:
                    return replace(played, reward=None, error=f"two rewards give a part {name!r}")
                parts[name] = value, reward.weight
        return checked(played, parts)

    async def _parts(
        self, reward: WeightedReward, task: Task, played: Trajectory
    ) -> dict[str, Any] | str:
        """The named parts that a reward gives, or why it gives none."""
        on_loop = inspect.iscoroutinefunction(reward.function)
        async with contextlib.nullcontext() if on_loop else self._gate:
            time_limit = asyncio.timeout(self.reward_timeout)
            try:
                async with time_limit:
                    given = await call(reward.function, task, played)
            except Exception as error:
                if time_limit.expired():
                    return f"{reward.name}: none after {self.reward_timeout} s"
                return f"{reward.name}: {type(error).__name__}: {error}"
        return dict(given) if isinstance(given, dict) else {reward.name: given}


def checked(played: Trajectory, parts: dict[str, tuple[Any, float]]) -> Trajectory:
    """Set the reward to the weighted sum of its parts, given as (value, weight).

    None, with the reason, unless there are parts and all are finite numbers.
    """
    total, known = 0.0, {}
    for name, (value, weight) in parts.items():
        number = isinstance(value, numbers.Real | np.bool_) or (
            getattr(value, "shape", None) == () and np.isreal(value)
        )
        if not number or not math.isfinite(float(value) * weight):
            reason = f"reward part {name!r} is {value!r:.60}; expected a finite number"
            return replace(played, reward=None, error=reason)
        known[name] = float(value)
        total += float(value) * weight
    if not known:
        return replace(played, reward=None, error="the reward is {}; expected a part or more")
    return replace(played, reward=total, reward_parts=known)


def with_all_parts(groups: Sequence[Group]) -> list[Group]:
    """Take the reward from samples that lack a part which others have: it would count as 0."""
    judged = [t for group in groups for t in group.trajectories if t.reward is not None]
    names = {name for t in judged for name in t.reward_parts}

    def kept(played: Trajectory) -> Trajectory:
        missing = sorted(names - played.reward_parts.keys())
        if played.reward is None or not missing:
            return played
        reason = f"reward part {missing[0]!r} is missing, which other samples of the step have"
        return replace(played, reward=None, error=reason)

    return [Group(group.task, [kept(t) for t in group.trajectories]) for group in groups]
