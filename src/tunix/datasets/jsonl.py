"""JSONL files: one object a line, read by index; errors name file and line."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from tunix.errors import DataError, nearest


class JsonlRows:
    """The rows of a JSONL file by index; blank lines are passed over.

    One pass over the file finds where each row begins: 8 bytes a row are kept, no row is.

    Raises:
        DataError: the file holds no row; on indexing, the line is not a JSON object.
    """

    def __init__(self, path: Path):
        self.path = path
        starts, blank, offset = array("q"), array("q"), 0
        with path.open("rb") as lines:
            for line in lines:
                (starts if line.strip() else blank).append(offset)
                offset += len(line)
        if not starts:
            raise DataError(f"{path} holds no rows")
        starts.append(offset)
        self._bounds = np.frombuffer(starts, np.int64)
        self._blank = np.frombuffer(blank, np.int64) if blank else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self._bounds[index], self._bounds[index + 1]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if rb"\ud" in line.lower():  # half a surrogate pair is no text that can be encoded
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where(index)}: not JSON ({error})") from None
        if not isinstance(row, dict):
            start_of_line = line.strip()[:60].decode(errors="replace")
            raise DataError(f"{self.where(index)}: expected a JSON object, got {start_of_line}")
        return row

    def where(self, index: int) -> str:
        """``FILE:LINE``, lines counted from 1."""
        blank_before = np.searchsorted(self._blank, self._bounds[index])
        return f"{self.path}:{index + 1 + int(blank_before)}"


def field_of(row: dict[str, Any], name: str, where: str) -> Any:
    """Return ``row[name]``, or raise a DataError that names the row and the nearest field."""
    if name not in row:
        raise DataError(f"{where}: no field {name!r}; it has {sorted(row)}{nearest(name, row)}")
    return row[name]
