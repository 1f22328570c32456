"""Tasks from files: columns mapped to prompt and answer, a held-out split."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunix.datasets.jsonl import field_of, read_jsonl
from tunix.errors import DataError
from tunix.types import Message, Task


def tasks(
    path: str | Path,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    system: str | None = None,
    split: str = "train",
) -> list[Task]:
    """Read tasks from a JSONL file.

    ``prompt`` names the column with a text (it becomes one user message) or a list of chat
    messages, ``answer`` the column handed to the reward (it may be absent); every other column
    goes into ``Task.info``. The id is the row's ``id`` or ``FILE:LINE``.

    Raises:
        DataError: no such file, no rows, a row without the prompt column or with a wrong type.
    """
    path = Path(path)
    found = []
    for line, row in read_jsonl(path):
        where = f"{path}:{line}"
        messages = as_messages(field_of(row, prompt, where), system, f"{where}: field {prompt!r}")
        found.append(
            Task(
                id=str(row.get("id", f"{path.name}:{line}")),
                messages=messages,
                answer=row.get(answer),
                info={k: v for k, v in row.items() if k not in (prompt, answer)},
                split=split,
            )
        )
    return found


def as_messages(value: Any, system: str | None, where: str) -> list[Message]:
    """Turn a prompt column's value into chat messages.

    Raises:
        DataError: neither a text nor a list of messages with a role.
    """
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    elif (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and "role" in m for m in value)
    ):
        messages = value
    else:
        raise DataError(f"{where}: expected a text or a list of chat messages, got {value!r:.80}")
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def hold_out(found: Sequence[Task], size: int) -> tuple[list[Task], list[Task]]:
    """Split tasks into (training, held-out) by a hash of the prompt.

    A tenth is held out, at most ``size``, at least one task where there are two different prompts.
    Equal prompts always fall on the same side, so nothing held out is ever trained on.
    """
    keys = [zlib.crc32(repr((t.messages, t.text, t.tokens)).encode()) for t in found]
    count = Counter(keys)
    room = min(size, max(len(found) // 10, 1))
    held: set[int] = set()
    for key in sorted(count):
        if count[key] <= room and len(held) + 1 < len(count):
            held.add(key)
            room -= count[key]
    training = [t for t, key in zip(found, keys, strict=True) if key not in held]
    return training, [t for t, key in zip(found, keys, strict=True) if key in held]
