"""Tasks from files: columns mapped to prompt and answer, a held-out split."""

from __future__ import annotations

import glob
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunix.datasets.jsonl import field_of
from tunix.datasets.rows import Files, find_files, open_rows
from tunix.errors import DataError
from tunix.types import Message, Task


def tasks(
    files: Files,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    system: str | None = None,
    split: str = "train",
) -> list[Task]:
    """Read tasks from files (``datasets.rows``): JSONL or Parquet, one, several, or by a glob.

    ``prompt`` names the column with a text (it becomes one user message) or a list of chat
    messages, ``answer`` the column handed to the reward (it may be absent); every other column
    goes into ``Task.info``. The id is the row's ``id`` or
    ``FILE:LINE``, with the folder where two files have the same name.

    Raises:
        DataError: no such file, no rows, a broken line, a row without the prompt column or with a
            wrong type, two rows with one id.
    """
    rows, paths = open_rows(files), find_files(files)
    same_names = len({path.name for path in paths}) < len(paths)
    found = []
    for i in range(len(rows)):
        row, where = rows[i], rows.where(i)
        messages = as_messages(field_of(row, prompt, where), system, f"{where}: field {prompt!r}")
        found.append(
            Task(
                id=str(row.get("id", where if same_names else where.rpartition("/")[2])),
                messages=messages,
                answer=row.get(answer),
                info={k: v for k, v in row.items() if k not in (prompt, answer)},
                split=split,
            )
        )
    check_ids(found)
    return found


def check_ids(found: Sequence[Task]) -> None:
    """Raise ``DataError`` for two tasks of one id: episodes of both would draw the same numbers."""
    for identifier, count in Counter(task.id for task in found).most_common(1):
        if count > 1:
            raise DataError(f"{count} tasks have the id {identifier!r}; expected different ones")


def names_files(tasks: Sequence[str] | str) -> bool:
    """Tell files and globs from the name of a built-in task, which has neither dot nor slash."""
    if not isinstance(tasks, str):
        return True
    return bool(Path(tasks).suffix) or "/" in tasks or glob.has_magic(tasks)


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
