"""Rewards that check an answer: plain functions ``(task, episode) -> float``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tunix.types import Task, Trajectory

Reward = Callable[[Task, Trajectory], Any]
"""``float``, or a dictionary of named parts that are added up; plain or async."""

NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?")
"""A minus behind a digit, letter or bracket subtracts; commas only part groups of three digits."""


def exact_match(task: Task, episode: Trajectory) -> float:
    """1 where the answer's text, stripped, equals ``task.answer``, else 0."""
    return float(episode.text.strip() == str(task.answer).strip())


def last_number(task: Task, episode: Trajectory) -> float:
    """1 where the last number in the answer's text equals ``task.answer`` as a number, else 0.

    Thousands separators are dropped; 4, 4.0 and 4.00 are equal. ``3-5`` ends in 5, ``1,2`` in 2.
    """
    found = NUMBER.findall(episode.text)
    return float(bool(found) and _number(found[-1]) == _number(str(task.answer)))


def answer_after(marker: str) -> Reward:
    """Reward 1 where the text after the last ``marker``, stripped, equals ``task.answer``.

    0 where the marker does not occur.
    """

    def reward(task: Task, episode: Trajectory) -> float:
        _, found, answer = episode.text.rpartition(marker)
        return float(bool(found) and answer.strip() == str(task.answer).strip())

    return reward


def matches(pattern: str) -> Reward:
    """Reward 1 where the regular expression is found in the answer's text.

    If it has a group, the last match's first group must equal ``task.answer`` (where there is one).

    Raises:
        re.error: the pattern is not a regular expression.
    """
    compiled = re.compile(pattern)

    def reward(task: Task, episode: Trajectory) -> float:
        found = list(compiled.finditer(episode.text))
        if not found:
            return 0.0
        if compiled.groups == 0 or task.answer is None:
            return 1.0
        return float((found[-1].group(1) or "").strip() == str(task.answer).strip())

    return reward


def has_format(pattern: str) -> Reward:
    """Reward 1 where the whole text, stripped, matches; ``.`` also stands for a line break.

    Raises:
        re.error: the pattern is not a regular expression.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def reward(task: Task, episode: Trajectory) -> float:
        return float(compiled.fullmatch(episode.text.strip()) is not None)

    return reward


def short(tokens: int) -> Reward:
    """Reward ``min(1, max(0, 2 - n / tokens))`` for n tokens that the policy emitted.

    1 up to ``tokens`` of them, falling linearly to 0 at twice as many; end-of-turn tokens count.
    """

    def reward(task: Task, episode: Trajectory) -> float:
        return min(1.0, max(0.0, 2 - episode.completion_tokens / tokens))

    return reward


def _number(text: str) -> float | str:
    text = text.strip()
    try:
        return float(text.replace(",", "") if NUMBER.fullmatch(text) else text)
    except ValueError:
        return text
