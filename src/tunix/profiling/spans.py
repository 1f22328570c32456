"""Spans: where the time of a step went, always on, and a trace that Perfetto opens.

A span costs a few microseconds and a fixed amount of memory. Times are exclusive: at each moment a
thread's time belongs to the span it opened last and has not closed, so the parts of a step add up
to the step, nested spans and interleaved asyncio tasks included.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MAX_EVENTS = 100_000
"""Spans a trace holds; older ones make room for newer ones (about 20 MB)."""


@dataclass
class _Thread:
    """The spans that a thread has open, oldest first, and since when its time is not booked."""

    track: str
    open: list[str] = field(default_factory=list)
    since: float = 0.0


class Spans:
    """Records named spans of time from any number of threads.

    ``with spans("rollout"): ...`` books the time within to ``rollout``. Names in use: rollout,
    prefill, decode, environment, reward, reference, pack, update, publish, evaluation, checkpoint,
    and ``wait.CAUSE`` where a role waits for another.
    """

    def __init__(self, max_events: int = MAX_EVENTS):
        self._lock = threading.Lock()
        self._threads: dict[int, _Thread] = {}
        self._booked: dict[tuple[str, str], float] = {}
        self._events: deque[tuple[str, str, float, float]] = deque(maxlen=max_events)
        self._origin = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Book the time until the end of the block to ``name``, on the current thread's track."""
        identity = threading.get_ident()
        start = time.perf_counter()
        with self._lock:
            thread = self._threads.get(identity)
            if thread is None:
                thread = self._threads[identity] = _Thread(_track_name())
            self._book(thread, start)
            thread.open.append(name)
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self._book(thread, end)
                _remove_last(thread.open, name)
                if not thread.open:  # a thread that ends leaves nothing behind
                    self._threads.pop(identity, None)
                self._events.append((thread.track, name, start, end))

    def add(self, name: str, start: float, end: float, track: str | None = None) -> None:
        """Record a span that was measured elsewhere.

        ``start`` and ``end`` are ``time.perf_counter()`` seconds. Without a ``track`` it belongs
        to the current thread, and its time is taken from the span that is open there.
        """
        with self._lock:
            thread = self._threads.get(threading.get_ident())
            where = track or (thread.track if thread else _track_name())
            self._events.append((where, name, start, end))
            self._add_time(where, name, end - start)
            if track is None and thread and thread.open:
                self._add_time(where, thread.open[-1], start - end)

    def step_times(self) -> dict[str, float]:
        """Seconds since the last call, by span name; exclusive of what ran within a span.

        Spans of the calling thread have their plain name and add up to at most the time passed.
        Those of other threads run beside it and are named ``TRACK/NAME``.
        """
        with self._lock:
            now = time.perf_counter()
            for thread in self._threads.values():
                self._book(thread, now)
            here = self._threads.get(threading.get_ident())
            own = here.track if here else _track_name()
            booked, self._booked = self._booked, {}
        return {
            name if track == own else f"{track}/{name}": max(seconds, 0.0)
            for (track, name), seconds in booked.items()
        }

    def write_trace(self, path: str | Path) -> None:
        """Write the newest spans in Chrome's trace format, which ui.perfetto.dev opens.

        The file appears whole or not at all. One track a thread; spans that overlap without being
        nested (asyncio tasks) go on further tracks of the same name. Times are in microseconds.
        """
        with self._lock:
            events = list(self._events)
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps({"traceEvents": _trace_events(events, self._origin)}))
        os.replace(unfinished, path)

    def _book(self, thread: _Thread, now: float) -> None:
        if thread.open:
            self._add_time(thread.track, thread.open[-1], now - thread.since)
        thread.since = now

    def _add_time(self, track: str, name: str, seconds: float) -> None:
        key = (track, name)
        self._booked[key] = self._booked.get(key, 0.0) + seconds


def _track_name() -> str:
    """``engine`` for a thread called ``tunix-engine-3``: few names, however many threads."""
    name = threading.current_thread().name
    found = re.match(r"(?:tunix-)?([A-Za-z]+)", name)
    return found.group(1).lower() if found else "thread"


def _remove_last(names: list[str], name: str) -> None:
    del names[len(names) - 1 - names[::-1].index(name)]


def _trace_events(events: list[tuple[str, str, float, float]], origin: float) -> list[dict]:
    """Chrome trace events, each on a lane where it nests in or follows what is there already."""
    lanes: dict[str, list[list[float]]] = {}
    numbers: dict[tuple[str, int], int] = {}
    written: list[dict] = []
    for track, name, start, end in sorted(events, key=lambda e: (e[2], -e[3])):
        place = track, _place(lanes.setdefault(track, []), start, end)
        if place not in numbers:
            numbers[place] = len(numbers) + 1
            label = {"name": "thread_name", "ph": "M", "pid": 1, "tid": numbers[place]}
            written.append(label | {"args": {"name": track}})
        event = {"name": name, "ph": "X", "pid": 1, "tid": numbers[place]}
        at, length = round((start - origin) * 1e6, 1), round((end - start) * 1e6, 1)
        written.append(event | {"ts": at, "dur": length})
    return written


def _place(lanes: list[list[float]], start: float, end: float) -> int:
    """Put a span on the first lane that takes it; a lane holds the ends of its open spans."""
    for index, ends in enumerate(lanes):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return index
    lanes.append([end])
    return len(lanes) - 1
