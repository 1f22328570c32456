"""The nouns every layer shares. Nothing here computes and nothing here imports jax.

Every per-token array is aligned with the token it speaks of: ``logprobs[t]`` is the log-probability
of ``tokens[t]`` given ``tokens[:t]``, and ``action_mask[t]`` is True where the policy emitted
``tokens[t]``. There is no shifted copy of anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]
"""A chat message: ``role``, ``content`` and whatever else a template reads (``tool_calls`` ...)."""

Status = Literal["finished", "truncated", "env_error", "timeout"]
"""How an episode ended: by itself, cut at a token limit, by a failure, or out of time."""


@dataclass(frozen=True)
class Task:
    """What an episode starts from. Exactly one of ``messages``, ``text``, ``tokens`` is given."""

    id: str
    messages: list[Message] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    split: str = "train"


@dataclass
class Trajectory:
    """One episode as the policy saw it: token ids in, token ids out, never re-tokenised.

    Per-token arrays have shape ``[length]``. Where ``action_mask`` is False, ``logprobs`` and
    ``log_kept`` are 0 and ``policy_version`` is -1.
    """

    task_id: str
    sample: int
    tokens: np.ndarray  # int32
    action_mask: np.ndarray  # bool, True where the policy emitted the token
    logprobs: np.ndarray  # float32, nats, under the sampling temperature with full support
    log_kept: np.ndarray  # float32, log of the mass that top-k, top-p and min-p kept (<= 0)
    policy_version: np.ndarray  # int32
    status: Status = "finished"
    reward: float | None = None
    """Total reward; None where it is missing or was not finite: the sample leaves the loss."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the total was made of, by name and before weights."""
    text: str = ""
    """The last answer, without the end-of-turn token."""
    messages: list[Message] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    extras: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """True where the episode may be trained on: it has a finite reward and some action."""
        return self.reward is not None and bool(self.action_mask.any())

    @property
    def completion_tokens(self) -> int:
        """How many tokens the policy emitted."""
        return int(self.action_mask.sum())


@dataclass
class Group:
    """The episodes of one task; group statistics are taken over ``valid`` ones only."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> np.ndarray:
        """Float64 ``[size]``; NaN where a trajectory has no usable reward."""
        return np.array([np.nan if t.reward is None else t.reward for t in self.trajectories])

    @property
    def valid(self) -> np.ndarray:
        """Bool ``[size]``."""
        return np.array([t.valid for t in self.trajectories], dtype=bool)
