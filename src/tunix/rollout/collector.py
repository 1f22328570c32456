"""Collects groups of episodes: many at once, failures replaced, rewards judged, order kept."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunix.inference.request import SamplingParams
from tunix.rewards.verifiable import Reward
from tunix.rollout.episode import EpisodeRunner, request_seed
from tunix.rollout.threads import call_in_thread
from tunix.types import Group, Task, Trajectory

CONCURRENT_REWARDS = 32
"""Rewards judged at once in threads; more would only take turns at the interpreter."""


@dataclass
class Collector:
    """Plays ``size`` episodes of each task.

    A failed episode is replaced by a fresh sample of its task, up to ``retries`` times; then the
    group is short: the sample stays in it with reward None, masked and counted. Groups come back
    in the order of their tasks, never in that of their arrival.
    """

    runner: EpisodeRunner
    reward: Reward | None
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
        return [
            Group(task, [e.result() for e in group])
            for (task, _), group in zip(tasks, episodes, strict=True)
        ]

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
        if self.reward is None:
            return checked(played, {"environment": played.reward})
        try:
            if inspect.iscoroutinefunction(self.reward):
                async with asyncio.timeout(self.reward_timeout):
                    given = await self.reward(task, played)
            else:
                async with self._gate, asyncio.timeout(self.reward_timeout):
                    given = await call_in_thread(self.reward, task, played)
        except TimeoutError:
            return replace(played, reward=None, error=f"reward: none after {self.reward_timeout} s")
        except Exception as error:
            return replace(played, reward=None, error=f"reward: {type(error).__name__}: {error}")
        parts = dict(given) if isinstance(given, dict) else {"reward": given}
        if played.reward:
            parts["environment"] = played.reward
        return checked(played, parts)


def checked(played: Trajectory, parts: dict[str, Any]) -> Trajectory:
    """Set the reward to the sum of its parts; None, with the reason, unless all are finite."""
    for name, value in parts.items():
        number = isinstance(value, numbers.Real | np.bool_) or (
            getattr(value, "shape", None) == () and np.isreal(value)
        )
        if not number or not math.isfinite(float(value)):
            reason = f"reward part {name!r} is {value!r:.60}; expected a finite number"
            return replace(played, reward=None, error=reason)
    known = {name: float(value) for name, value in parts.items()}
    return replace(played, reward=sum(known.values()), reward_parts=known)
