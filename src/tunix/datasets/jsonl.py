"""JSONL files: one object a line, errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix.errors import DataError, nearest


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)``; blank lines are passed over.

    Raises:
        DataError: no such file, it holds no row, or a line is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        raise DataError(f"no such file: {path}{nearest(path.name, siblings)}")
    empty = True
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, got {line.strip()[:60]}")
            empty = False
            yield number, row
    if empty:
        raise DataError(f"{path} holds no rows")


def field_of(row: dict[str, Any], name: str, where: str) -> Any:
    """Return ``row[name]``, or raise a DataError that names the row and the nearest field."""
    if name not in row:
        raise DataError(f"{where}: no field {name!r}; it has {sorted(row)}{nearest(name, row)}")
    return row[name]
