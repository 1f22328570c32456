"""Answers that must be JSON of a given shape: the library jsonschema (extra ``rewards``)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tunix.errors import ConfigError
from tunix.rewards.verifiable import Reward
from tunix.types import Task, Trajectory

FENCED = re.compile(r"```json\s*\n(.*?)```", re.DOTALL)


def fits_schema(file: str) -> Reward:
    """Reward 1 where the text is JSON that fits the schema in ``file``, else 0.

    The text is the whole answer, or its fenced ``json`` block where it has exactly one.

    Raises:
        ConfigError: the file cannot be read or holds no JSON schema.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(Path(file).expanduser().read_text())
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward: json_schema:{file} cannot be read: {error}") from None
    except SchemaError as error:
        raise ConfigError(
            f"reward: json_schema:{file} holds no JSON schema: {error.message} at {error.json_path}"
        ) from None
    validator = kind(schema, registry=Registry())  # nothing is fetched from the network

    def reward(task: Task, episode: Trajectory) -> float:
        blocks = FENCED.findall(episode.text)
        try:
            value = json.loads(blocks[0] if len(blocks) == 1 else episode.text)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(value))

    return reward
