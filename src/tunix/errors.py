"""Errors a user can act on. Each message names the field, its value and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TunixError(Exception):
    """Base of every error that tunix raises on purpose."""


class ConfigError(TunixError):
    """A config field is unknown, misplaced, of the wrong type or out of range."""


class DataError(TunixError):
    """A dataset, task file or chat cannot be used; names file and line where there is one."""


class ModelError(TunixError):
    """A model folder or file cannot be read, or its parts do not fit each other."""


class RunError(TunixError):
    """A run folder, checkpoint or training run cannot go on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``known``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
