"""Built-in tasks whose answers can be checked: adding, sorting letters, counting letters.

Each draws tasks from a space of thousands or more; whether a task is held out is a function of
its prompt alone (``crc32(prompt) % 10 == 0``), so no training task is ever evaluated on, in SFT or
in RL. Each can also write demonstrations, in two habits: the answer at once, or the work first.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tunix.errors import ConfigError, nearest
from tunix.rewards.verifiable import Reward, answer_after
from tunix.types import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MARKER = "|"
"""What comes after the last marker is the answer; before it may stand the work."""

DRAWS = 30
"""Draws a wanted task after which a family counts as exhausted; one in ten is held out."""

ALPHABET = LETTERS + "0123456789+=?| "
"""Every character that the prompts and demonstrations of these tasks use."""

Draw = Callable[[random.Random], tuple[str, str, str]]
"""From a random source to (prompt, answer, the work written down)."""


def _arithmetic(rng: random.Random) -> tuple[str, str, str]:
    """``684+358=``; the work is, from the right, digit pair, carry in and two-digit sum."""
    a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
    carry, work = 0, []
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        work.append(f"{x}{y}{carry}{total:02d}")
        carry = total // 10
    return f"{a}+{b}=", str(a + b), " ".join(work)


def _sort_letters(rng: random.Random) -> tuple[str, str, str]:
    """``dbca=``; the work is how often each letter of the word occurs."""
    word = "".join(rng.choices(LETTERS, k=rng.randint(5, 8)))
    answer = "".join(sorted(word))
    return f"{word}=", answer, " ".join(f"{c}{word.count(c)}" for c in sorted(set(word)))


def _count_letters(rng: random.Random) -> tuple[str, str, str]:
    """``abcab?b=``; the work is the word with a running count after each hit."""
    word = "".join(rng.choices(LETTERS[:4], k=rng.randint(6, 12)))
    letter = rng.choice(LETTERS[:4])
    count, work = 0, ""
    for c in word:
        count += c == letter
        work += f"{c}{count}" if c == letter else c
    return f"{word}?{letter}=", str(count), work


@dataclass(frozen=True)
class VerifiableTask:
    """A family of tasks with a checkable answer."""

    name: str
    draw: Draw
    reward: Reward

    def tasks(self, size: int, seed: int, split: str = "train") -> list[Task]:
        """Draw up to ``size`` distinct tasks of a split (``train`` or ``held_out``).

        Fewer where the family has no more of them. The draw is a function of the arguments alone;
        ``info["work"]`` is the work written down.
        """
        rng = random.Random(f"{self.name} {split} {seed}")
        found: dict[str, Task] = {}
        for _ in range(DRAWS * size):
            if len(found) == size:
                break
            prompt, answer, work = self.draw(rng)
            if held_out(prompt) == (split == "held_out") and prompt not in found:
                messages = [{"role": "user", "content": prompt}]
                found[prompt] = Task(
                    f"{self.name}/{prompt}",
                    messages,
                    answer=answer,
                    info={"work": work},
                    split=split,
                )
        return list(found.values())

    def demonstrations(
        self, size: int, seed: int, work_share: float = 0.35
    ) -> list[dict[str, str]]:
        """Draw ``size`` correct demonstrations from training tasks, as prompt and completion.

        A share of them writes the work down before the marker, the others answer at once.
        """
        rng = random.Random(f"{self.name} demonstrations {seed}")
        rows: list[dict[str, str]] = []
        while len(rows) < size:
            prompt, answer, work = self.draw(rng)
            if not held_out(prompt):
                shown = work if rng.random() < work_share else ""
                rows.append({"prompt": prompt, "completion": f"{shown}{MARKER}{answer}"})
        return rows


def held_out(prompt: str) -> bool:
    """Return True for the tenth of all prompts that training never sees."""
    return zlib.crc32(prompt.encode()) % 10 == 0


BUILT_IN = {
    "arithmetic": VerifiableTask("arithmetic", _arithmetic, answer_after(MARKER)),
    "sort_letters": VerifiableTask("sort_letters", _sort_letters, answer_after(MARKER)),
    "count_letters": VerifiableTask("count_letters", _count_letters, answer_after(MARKER)),
}


def built_in(name: str) -> VerifiableTask:
    """Return a built-in task by name.

    Raises:
        ConfigError: there is none of that name; lists them.
    """
    if name not in BUILT_IN:
        raise ConfigError(
            f"tasks: no file and no built-in task {name!r}; built in: {sorted(BUILT_IN)}"
            f"{nearest(name, BUILT_IN)}"
        )
    return BUILT_IN[name]
