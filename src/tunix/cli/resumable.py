"""Going on with a JSONL file of answers: rows are appended in the order of the input.

Beside ``OUTPUT`` stands ``OUTPUT.settings.json`` with all that the answers depend on. A killed
command leaves whole rows and perhaps a part of one, which is cut off; the same command then ends
with the file that an undisturbed one writes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tunix.errors import ConfigError, DataError
from tunix.models.policy import Policy

if TYPE_CHECKING:
    from tunix.cli.generate import Prompt

COMPLETIONS = "completions"
"""Field that a row gets for its answers."""

WITHOUT_EFFECT = ("model", "input", "output", "slots", "max_prompt_tokens")
"""Fields that change no answer; model and input are compared by what they hold."""


def rows_done(path: Path, config: Any, policy: Policy, asked: Sequence[Prompt]) -> int:
    """Return how many rows ``path`` has already, after cutting off an unfinished one.

    Raises:
        ConfigError: the file is of other settings or weights, or of something else altogether.
        DataError: a row in it is not the answer to the row of ``asked`` in its place.
    """
    record = path.with_name(path.name + ".settings.json")
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in WITHOUT_EFFECT}
    settings["weights_crc32"] = checksum((policy.params, policy.adapter))
    if path.stat().st_size == 0:
        new = record.with_name(record.name + ".new")
        new.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        os.replace(new, record)
        return 0
    way_out = "choose another output, or delete it to start anew"
    if not record.exists():
        raise ConfigError(f"output: {path} exists, but {record.name} beside it does not; {way_out}")
    made_with = json.loads(record.read_text(encoding="utf-8"))
    for name in sorted(settings.keys() | made_with):
        before, now = made_with.get(name), settings.get(name)
        if before != now:
            raise ConfigError(
                f"output: {path} was made with {name} = {before!r}, now it is {now!r}; {way_out}"
            )
    done = end = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            if done == len(asked) or _input_of(line) != json.dumps(asked[done].row):
                place = asked[done].where if done < len(asked) else "no row of the input"
                raise DataError(f"{path}:{done + 1}: is not the answer to {place}; {way_out}")
            done, end = done + 1, end + len(line)
    os.truncate(path, end)
    return done


def checksum(params: Any) -> int:
    """CRC-32 over all parameters, in the order of the tree."""
    value = 0
    for leaf in jax.tree.leaves(params):
        value = zlib.crc32(np.asarray(leaf).tobytes(), value)
    return value


def _input_of(line: bytes) -> str | None:
    try:
        row = json.loads(line)
        return json.dumps({name: value for name, value in row.items() if name != COMPLETIONS})
    except (ValueError, AttributeError):
        return None
