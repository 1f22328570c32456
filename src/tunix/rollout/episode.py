"""Plays one episode: token ids in, token ids out, nothing is tokenised twice.

render the observation → generate → hand the answer to the environment → append what it says,
until it ends. What the policy sampled is kept as it was sampled; what the environment says enters
with ``action_mask`` False.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunix.environments.base import Environment, Observation, Step
from tunix.errors import DataError
from tunix.inference.engine import Engine
from tunix.inference.request import Completion, Request, SamplingParams
from tunix.models.policy import Policy, answer_text, encode_task
from tunix.profiling.spans import Spans
from tunix.rollout.threads import call_in_thread
from tunix.types import Message, Status, Task, Trajectory


def request_seed(run_seed: int, task_id: str, epoch: int, sample: int, turn: int) -> int:
    """Fold what names a turn of an episode into the seed of its request (31 bits).

    The engine adds the position, so a sampled token depends on nothing else but the weights.
    """
    name = f"{run_seed}\n{task_id}\n{epoch}\n{sample}\n{turn}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


@dataclass
class _Record:
    """An episode as it grows; the columns are lists of ``[tokens added]`` arrays."""

    columns: dict[str, list[np.ndarray]]
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    text: str = ""
    status: Status = "finished"

    def add_context(self, tokens: list[int]) -> None:
        """Append tokens that the policy did not emit."""
        size = len(tokens)
        zeros = np.zeros(size, np.float32)
        self._add(tokens, np.zeros(size, bool), zeros, zeros, np.full(size, -1))

    def add_action(self, done: Completion) -> None:
        """Append what the policy emitted, exactly as the engine sampled it."""
        mask = np.ones(len(done.tokens), bool)
        self._add([int(t) for t in done.tokens], mask, done.logprobs, done.log_kept, done.versions)

    def _add(self, tokens: list[int], *columns: Any) -> None:
        self.tokens.extend(tokens)
        for (name, parts), column in zip(self.columns.items(), (tokens, *columns), strict=True):
            parts.append(np.asarray(column, COLUMNS[name]))

    def arrays(self) -> dict[str, np.ndarray]:
        empty = {name: np.zeros(0, kind) for name, kind in COLUMNS.items()}
        return {n: np.concatenate([empty[n], *parts]) for n, parts in self.columns.items()}


COLUMNS: dict[str, Any] = {
    "tokens": np.int32,
    "action_mask": bool,
    "logprobs": np.float32,
    "log_kept": np.float32,
    "policy_version": np.int32,
}


class _EnvironmentFailure(Exception):
    """The environment raised; carries what it said."""


def task_prompt(policy: Policy, task: Task, max_prompt_tokens: int) -> list[int]:
    """Render a task to token ids.

    Raises:
        DataError: more than ``max_prompt_tokens``, or the template refuses it.
    """
    tokens = encode_task(policy, task)
    if not 0 < len(tokens) <= max_prompt_tokens:
        raise DataError(
            f"task {task.id!r}: its prompt has {len(tokens)} tokens; expected between 1 and "
            f"max_prompt_tokens ({max_prompt_tokens})"
        )
    return tokens


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays a policy in an environment; lengths in tokens, times in seconds."""

    policy: Policy
    engine: Engine
    make_environment: Callable[[], Environment]
    max_prompt_tokens: int
    max_episode_tokens: int
    timeout: float
    spans: Spans

    async def play(
        self, task: Task, sampling: SamplingParams, sample: int, seed: Callable[[int], int]
    ) -> Trajectory:
        """Play one episode; ``seed(turn)`` names the random stream of each turn.

        The trajectory's reward is the sum of what the environment gave. A failing environment
        ends in ``status`` (``env_error``, ``timeout``) with reward None, never in an exception.

        Raises:
            DataError: the prompt is too long or cannot be rendered.
        """
        started = time.perf_counter()
        record = _Record({name: [] for name in COLUMNS})
        error: str | None = None
        environment: Environment | None = None
        try:
            environment = self._make()
            async with asyncio.timeout(self.timeout):
                await self._run(environment, record, task, sampling, seed)
        except TimeoutError:
            record.status, error = "timeout", f"no end after {self.timeout} s"
        except _EnvironmentFailure as failure:
            record.status, error = "env_error", str(failure)
        finally:
            if environment is not None:
                await self._close(environment)
        arrays = record.arrays()
        return Trajectory(
            task_id=task.id,
            sample=sample,
            tokens=arrays["tokens"],
            action_mask=arrays["action_mask"],
            logprobs=arrays["logprobs"],
            log_kept=arrays["log_kept"],
            policy_version=arrays["policy_version"],
            status=record.status,
            reward=record.reward if error is None else None,
            text=record.text,
            messages=record.messages,
            timings={"episode": time.perf_counter() - started},
            error=error,
        )

    async def _run(self, environment, record: _Record, task: Task, sampling, seed) -> None:
        seen: Observation = await self._ask(environment.reset, task)
        shown = replace(task, messages=seen.messages, text=seen.text, tokens=seen.tokens)
        record.messages = list(seen.messages or [])
        record.add_context(task_prompt(self.policy, shown, self.max_prompt_tokens))
        turn = 0
        while True:
            room = self.max_episode_tokens - len(record.tokens)
            if room < 1:
                record.status = "truncated"
                return
            limited = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            request = Request(
                list(record.tokens), limited, seed(turn), adapter=self.engine.adapters
            )
            completion = await self.engine.generate(request)
            record.add_action(completion)
            record.text = answer_text(
                self.policy, completion.tokens, sampling.stop, sampling.include_stop
            )
            record.messages.append({"role": "assistant", "content": record.text})
            step: Step = await self._ask(environment.step, record.messages[-1])
            record.reward += float(step.reward)
            if completion.finish_reason != "stop" or step.truncated:
                record.status = "truncated"
                return
            if step.terminated:
                return
            record.add_context(self._answer_tokens(step.observation))
            turn += 1

    def _answer_tokens(self, observation: Observation | None) -> list[int]:
        if observation is None or observation.messages is not None:
            raise DataError(
                "an environment that goes on answers with text or tokens; chat messages over "
                f"several turns are not supported yet (got {observation!r:.80})"
            )
        if observation.tokens is not None:
            return observation.tokens
        assert self.policy.tokenizer is not None
        return self.policy.tokenizer.encode(observation.text or "")

    async def _ask(self, method: Callable[..., Any], argument: Task | Message) -> Any:
        try:
            with self.spans("environment"):
                if inspect.iscoroutinefunction(method):
                    return await method(argument)
                return await call_in_thread(method, argument)
        except Exception as error:
            raise _EnvironmentFailure(f"{type(error).__name__}: {error}") from error

    def _make(self) -> Environment:
        try:
            return self.make_environment()
        except Exception as error:
            raise _EnvironmentFailure(f"{type(error).__name__}: {error}") from error

    async def _close(self, environment: Environment) -> None:
        # an episode that was played is not lost to a failed clean-up
        with contextlib.suppress(Exception):
            if inspect.iscoroutinefunction(environment.close):
                await environment.close()
            else:
                await call_in_thread(environment.close)
