"""From what a config says (``exact_match``, ``regex:PATTERN``, ``module:function``) to rewards."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tunix.errors import ConfigError, nearest
from tunix.rewards import json_schema, mathematics, verifiable
from tunix.rewards.verifiable import Reward


@dataclass(frozen=True)
class WeightedReward:
    """A reward under its name; the total counts what it gives ``weight`` times."""

    name: str
    function: Reward
    weight: float = 1.0


BY_NAME: Mapping[str, Reward] = {
    "exact_match": verifiable.exact_match,
    "last_number": verifiable.last_number,
    "math": mathematics.equal,
}

BY_KIND: Mapping[str, tuple[str, Callable[[str], Reward]]] = {
    "regex": ("PATTERN", verifiable.matches),
    "format": ("PATTERN", verifiable.has_format),
    "after": ("MARKER", verifiable.answer_after),
    "length": ("TOKENS", lambda tokens: verifiable.short(_positive(tokens))),
    "json_schema": ("FILE", json_schema.fits_schema),
}
"""``KIND:ARGUMENT``: what the argument is called, and what makes a reward of it."""

LIBRARIES = {"math": "math_verify", "json_schema": "jsonschema"}
"""Modules of the extra ``rewards``."""


def resolve_rewards(named: str | Mapping[str, float]) -> list[WeightedReward]:
    """Return the rewards that a config names: one, or several with their weights.

    One alone is called ``reward``, since it is the total as well.

    Raises:
        ConfigError: nothing is named, or as ``resolve_reward``.
    """
    if isinstance(named, str):
        return [WeightedReward("reward", resolve_reward(named))]
    if not named:
        raise ConfigError("reward: {} names none; expected a name or a mapping name to weight")
    return [WeightedReward(n, resolve_reward(n), weight) for n, weight in named.items()]


def resolve_reward(name: str) -> Reward:
    """Return the reward of a name.

    Raises:
        ConfigError: an unknown name (with the nearest right one), a bad pattern, number or schema,
            a library that is not installed, or an import path that leads nowhere.
    """
    kind, _, argument = name.partition(":")
    library = LIBRARIES.get(kind)
    if library is not None and find_spec(library) is None:
        raise ConfigError(
            f"reward: {name!r} needs {library}; install it with: pip install 'tunix[rewards]'"
        )
    if name in BY_NAME:
        return BY_NAME[name]
    if kind in BY_KIND and argument:
        try:
            return BY_KIND[kind][1](argument)
        except re.error as error:
            raise ConfigError(
                f"reward: {argument!r} is not a regular expression ({error})"
            ) from None
    if argument and kind not in BY_NAME:
        return import_object(name, "reward")
    known = [*BY_NAME, *(f"{kind}:{argument}" for kind, (argument, _) in BY_KIND.items())]
    raise ConfigError(
        f"reward: unknown name {name!r}; expected one of {known} or my_module:my_function"
        f"{nearest(kind, [*BY_NAME, *BY_KIND])}"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"reward: length:{text}; expected a whole number of tokens, at least 1")
    return int(text)


def import_object(path: str, field: str) -> Any:
    """Import ``module:attribute``.

    Raises:
        ConfigError: names the field, what is missing and the nearest attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{field}: cannot import {module_name!r} ({error})") from None
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{field}: module {module_name!r} has no {attribute!r}{nearest(attribute, dir(module))}"
        )
    return getattr(module, attribute)
