"""Rows by index, from memory or from files of any size; which files a config means."""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.datasets.jsonl import JsonlRows
from tunix.datasets.parquet import ParquetRows
from tunix.errors import DataError, nearest

FORMATS = {".jsonl": JsonlRows, ".json": JsonlRows, ".parquet": ParquetRows}
"""What reads a file, by its suffix; a ``.json`` file holds one object a line as well."""

Files = str | Path | Sequence[str | Path]
"""A file, a glob (``*``, ``?``, ``[...]``, ``**``), or several of them."""


@runtime_checkable
class Rows(Protocol):
    """Rows by index, and for each the place that an error about it names."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """``FILE:LINE`` or the like."""
        ...


@dataclass(frozen=True)
class ListedRows:
    """Rows in memory; ``name`` is what an error calls them."""

    rows: Sequence[dict[str, Any]]
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def where(self, index: int) -> str:
        """``NAME INDEX``, from 0."""
        return f"{self.name} {index}"


class JoinedRows:
    """Several tables, one behind the other."""

    def __init__(self, tables: Sequence[Rows]):
        self._tables = tables
        self._starts = [0, *accumulate(map(len, tables))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        table, within = self._place(index)
        return table[within]

    def where(self, index: int) -> str:
        """As the table that holds the row says."""
        table, within = self._place(index)
        return table.where(within)

    def _place(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._starts, index) - 1
        return self._tables[number], index - self._starts[number]


def open_rows(files: Files) -> Rows:
    """Open the rows of one file or several, in the order of ``find_files``.

    Raises:
        DataError: as ``find_files`` and the formats' readers.
    """
    return JoinedRows([_open(path) for path in find_files(files)])


def find_files(files: Files) -> list[Path]:
    """List the files that are meant, in the order given; those of a glob are sorted.

    Raises:
        DataError: a file that is not there or has another suffix, a glob that matches none, the
            same file twice, or no file at all.
    """
    found: list[Path] = []
    for name in [files] if isinstance(files, str | Path) else files:
        path = Path(name).expanduser()
        if path.is_file() or not glob.has_magic(str(path)):
            found.append(path)
            continue
        matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        if not any(p.is_file() for p in matches):
            raise DataError(f"{name} matches no file")
        found += [p for p in matches if p.is_file()]
    if not found:
        raise DataError("an empty list of files; expected at least one")
    for path, count in Counter(path.resolve() for path in found).items():
        if count > 1:
            raise DataError(f"{path} is named twice; each of its rows would count double")
    return found


def _open(path: Path) -> Rows:
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"{path} is a folder; name its files, such as {path}/*.jsonl")
        folder = path.parent
        siblings = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        near = nearest(path.name, [name for name in siblings if Path(name).suffix in FORMATS])
        raise DataError(f"no such file: {path}{near}")
    if path.suffix not in FORMATS:
        raise DataError(f"{path}: unknown kind of file; expected one of {', '.join(FORMATS)}")
    try:
        return FORMATS[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
