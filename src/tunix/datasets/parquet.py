"""Parquet files: rows read by index, a row group at a time (needs the extra ``data``)."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tunix.errors import DataError

CACHE_BYTES = 2**28
"""Decoded row groups of a file that are kept, the newest first; one is kept whatever its size."""


class ParquetRows:
    """The rows of a Parquet file by index.

    Nothing is kept of a row; of the file, the last row groups read. To draw one row its whole row
    group is decoded, so a file over ``CACHE_BYTES`` is best written in groups of some thousand
    rows. A key that is null in a nested object counts as absent: Parquet gives every object of a
    column the same keys.

    Raises:
        DataError: pyarrow is not installed, or the file holds no row or is no whole Parquet file.
    """

    def __init__(self, path: Path):
        try:
            import pyarrow.parquet
        except ImportError:
            raise DataError(
                f"{path}: Parquet files need pyarrow; install it with: pip install 'tunix[data]'"
            ) from None
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise self._unreadable(error) from None
        groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
        counts, self._bytes = [], []
        for group in groups:
            counts.append(group.num_rows)
            self._bytes.append(group.total_byte_size)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._tables: OrderedDict[int, Any] = OrderedDict()
        if len(self) == 0:
            raise DataError(f"{path} holds no rows")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        table = self._table(group)
        within = index - int(self._ends[group]) + table.num_rows
        row = table.slice(within, 1).to_pylist()[0]
        return {name: _without_nulls(value) for name, value in row.items()}

    def where(self, index: int) -> str:
        """``FILE:ROW``, rows counted from 1."""
        return f"{self.path}:{index + 1}"

    def _table(self, group: int) -> Any:
        if group not in self._tables:
            try:
                self._tables[group] = self._file.read_row_group(group)
            except (OSError, ValueError) as error:
                raise self._unreadable(error) from None
            while len(self._tables) > 1 and sum(map(self._bytes.__getitem__, self._tables)) > (
                CACHE_BYTES
            ):
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return self._tables[group]

    def _unreadable(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split())
        return DataError(f"{self.path} is not a whole Parquet file: {reason:.200}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
