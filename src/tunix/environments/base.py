"""The environment protocol, in gymnasium's words, and the one-step environment.

For language, observation and action are chat messages or plain text. An environment object plays
one episode; a fresh one is made for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tunix.types import Message, Task


@dataclass(frozen=True)
class Observation:
    """What the policy sees next. Exactly one of the three is given."""

    messages: list[Message] | None = None
    text: str | None = None
    tokens: list[int] | None = None


@dataclass(frozen=True)
class Step:
    """What an action led to. ``terminated``: the episode is over; ``truncated``: it was cut."""

    observation: Observation | None = None
    reward: float = 0.0
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode: ``reset`` once, ``step`` until it ends, ``close`` always; async or plain."""

    async def reset(self, task: Task) -> Observation:
        """Begin the episode of a task."""
        ...

    async def step(self, action: Message) -> Step:
        """Take one action: an assistant message."""
        ...

    async def close(self) -> None:
        """Release what the episode held; called exactly once, also after a failure."""
        ...


class SingleTurn:
    """The task is the observation, the first answer ends the episode; a reward judges it later."""

    async def reset(self, task: Task) -> Observation:
        """Show the task as it stands."""
        return Observation(task.messages, task.text, task.tokens)

    async def step(self, action: Message) -> Step:
        """End the episode."""
        return Step(terminated=True)

    async def close(self) -> None:
        """Nothing is held."""
