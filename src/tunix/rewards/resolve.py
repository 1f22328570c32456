"""From what a config says (``exact_match``, ``regex:PATTERN``, ``module:function``) to a reward."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tunix.errors import ConfigError, nearest
from tunix.rewards import verifiable
from tunix.rewards.verifiable import Reward

BY_NAME: dict[str, Reward] = {
    "exact_match": verifiable.exact_match,
    "last_number": verifiable.last_number,
}


def resolve_reward(name: str) -> Reward:
    """Return the reward that a config names.

    Raises:
        ConfigError: an unknown name (with the nearest right one), a bad pattern, or an import
            path that leads nowhere.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    kind, _, rest = name.partition(":")
    if kind in ("regex", "after") and rest:
        try:
            return verifiable.matches(rest) if kind == "regex" else verifiable.answer_after(rest)
        except re.error as error:
            raise ConfigError(f"reward: {rest!r} is not a regular expression ({error})") from None
    if ":" in name:
        return import_object(name, "reward")
    known = [*BY_NAME, "regex:PATTERN", "after:MARKER"]
    raise ConfigError(
        f"reward: unknown name {name!r}; expected one of {known} or my_module:my_function"
        f"{nearest(name, BY_NAME)}"
    )


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
