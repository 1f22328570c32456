"""Where metrics go: a JSON line each, and TensorBoard events.

No thread is started. A JSON line is with the operating system, or its error known, when the call
returns, so a killed process loses none and a full disk cannot hang it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold: numpy numbers to Python's, NaN and infinity to None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)


class JsonLines:
    """A file with one JSON object a line, appended to; whole lines or an ``OSError``."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append rows; what of them did not fit on the disk is taken back before the error."""
        data = b"".join(
            json.dumps(plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            for row in rows
        )
        start, written = self.size(), 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, start)
            raise

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file).st_size

    def cut_back(self, size: int) -> None:
        """Drop all but the first ``size`` bytes; raises ``ValueError`` where there are fewer."""
        if size > self.size():
            raise ValueError(f"{self.path} has {self.size()} bytes, {size} were expected")
        os.ftruncate(self._file, size)

    def last(self) -> dict[str, Any] | None:
        """Return the last row, None in an empty file."""
        with open(self.path, "rb") as file:
            lines = file.read().splitlines()
        return json.loads(lines[-1]) if lines else None

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


FLUSH_SECONDS = 2.0
"""TensorBoard events are flushed at most so often, since each flush waits for the disk."""


class TensorBoard:
    """Scalars as TensorBoard events in a folder.

    Events from ``purge_step`` on that an earlier process left there are no longer shown. Raises
    what tensorboardX and the file system raise.
    """

    def __init__(self, folder: str | Path, purge_step: int | None = None):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore

        self._scalar = summary.scalar
        self._event = Event
        # tensorboardX's own SummaryWriter hangs in its queue once its thread met a full disk
        prefix, suffix = str(Path(folder) / "events"), f".{os.getpid()}"
        self._writer = event_file_writer.EventsWriter(prefix, suffix)
        self._flushed = 0.0
        if purge_step is not None:
            started = SessionLog(status=SessionLog.SessionStatus.START)
            self._writer.write_event(self._event(step=purge_step, session_log=started))

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite ones of ``metrics`` at ``step``."""
        now = time.time()
        for name, value in metrics.items():
            if math.isfinite(value):
                summary = self._scalar(name, value)
                self._writer.write_event(self._event(step=step, wall_time=now, summary=summary))
        if now - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = now

    def close(self) -> None:
        """Close the events file."""
        self._writer.close()
