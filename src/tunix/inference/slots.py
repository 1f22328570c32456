"""The host's side of the slots: one row of plain NumPy arrays each, worked on all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix.inference.request import Completion, FinishReason, Request
from tunix.inference.sampling import Draws

MIN_ROWS = 8
"""Fewest rows of a decode step: below 8, matrix products round differently (measured, CPU)."""
CHUNK = 64
"""Prompts are read in chunks of this many positions, and windows are multiples of it."""


def bucket(n: int, smallest: int, largest: int, factor: int = 2) -> int:
    """The smallest of ``smallest * factor**i`` and ``largest`` that is at least ``n``."""
    size = smallest
    while size < n:
        size *= factor
    return min(size, largest)


def buckets(smallest: int, largest: int, factor: int = 2) -> list[int]:
    """Every value that ``bucket`` can return, ascending."""
    sizes = [bucket(1, smallest, largest, factor)]
    while sizes[-1] < largest:
        sizes.append(bucket(sizes[-1] + 1, smallest, largest, factor))
    return sizes


class SlotTable:
    """What each slot is doing: the inputs of its next decode step and what it drew so far.

    ``positions`` is ``capacity`` where a slot is not decoding, which keeps it from writing into
    the cache. What a slot draws is stored by absolute position.
    """

    def __init__(self, slots: int, capacity: int):
        self.capacity = capacity
        self.decoding = np.zeros(slots, bool)
        self.tokens = np.zeros(slots, np.int32)
        self.positions = np.full(slots, capacity, np.int32)
        self.adapters = np.zeros(slots, np.int32)
        self.seeds = np.zeros((slots, 2), np.uint32)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.filtered = np.zeros(slots, bool)
        self.starts = np.zeros(slots, np.int32)
        self.ends = np.zeros(slots, np.int32)
        self.stops = np.full((slots, 1), -1, np.int32)
        self.matched = np.zeros(slots, bool)
        """Where a stop string is complete."""
        self.drawn = np.zeros((slots, capacity), np.int32)
        self.logprobs = np.zeros((slots, capacity), np.float32)
        self.log_kept = np.zeros((slots, capacity), np.float32)
        self.versions = np.zeros((slots, capacity), np.int32)

    def start(self, slot: int, request: Request, limit: int) -> None:
        """Let a slot whose prompt is read, but for its last token, decode from there."""
        s, length = request.sampling, len(request.tokens)
        self.decoding[slot] = True
        self.tokens[slot] = request.tokens[-1]
        self.positions[slot] = length - 1
        self.adapters[slot] = request.adapter
        self.seeds[slot] = request.seed >> 32, request.seed & 0xFFFFFFFF
        self.temperature[slot] = s.temperature
        self.top_k[slot] = min(s.top_k or 0, 2**30)
        self.top_p[slot] = s.top_p
        self.min_p[slot] = s.min_p
        self.filtered[slot] = s.filtered
        if s.temperature == 0:  # greedy: filters are ignored, which spares the step the search
            self.top_k[slot], self.top_p[slot], self.min_p[slot] = 0, 1, 0
        self.starts[slot] = length
        self.ends[slot] = min(length + s.max_tokens, limit) - 1
        missing = len(s.stop_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(s.stop_ids)] = sorted(s.stop_ids)
        self.matched[slot] = False

    def release(self, slot: int) -> None:
        """Make a slot inert, and its sampling such that it asks for no filter."""
        self.decoding[slot] = self.filtered[slot] = False
        self.positions[slot] = self.capacity
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = 0, 1, 0

    def move(self, source: int, target: int) -> None:
        """Carry a decoding slot over to a free one."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[target] = array[source]
        self.release(source)

    def draws(self, rows: int) -> Draws:
        """How the next token of the first ``rows`` slots is drawn."""
        return Draws(
            seeds=self.seeds[:rows],
            positions=self.positions[:rows] + 1,
            temperature=self.temperature[:rows],
            top_k=self.top_k[:rows],
            top_p=self.top_p[:rows],
            min_p=self.min_p[:rows],
        )

    def record(
        self, sampled: Sequence[np.ndarray], matched: np.ndarray, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Store a step's draws and advance; return the slots that are done, and which failed.

        ``sampled`` are the arrays of ``sampling.Sampled``, each ``[rows]``; ``matched`` (bool
        ``[rows]``) is True where the token completes a stop string.
        Both are arrays of slot numbers; a slot fails where its log-probability is not finite.
        """
        tokens, logprobs, log_kept = sampled
        active = np.flatnonzero(self.decoding[: len(tokens)])
        tokens, logprobs = tokens[active], logprobs[active]
        positions = self.positions[active] + 1
        self.drawn[active, positions] = tokens
        self.logprobs[active, positions] = logprobs
        self.log_kept[active, positions] = log_kept[active]
        self.versions[active, positions] = version
        self.tokens[active] = tokens
        self.positions[active] = positions
        self.matched[active] = matched[active]
        stopped = (self.stops[active] == tokens[:, None]).any(1) | matched[active]
        failed = ~np.isfinite(logprobs)
        done = stopped | (positions >= self.ends[active]) | failed
        return active[done], active[failed]

    def completion(self, slot: int, prefill_version: int, aborted: bool = False) -> Completion:
        """Copy out what a decoding slot drew."""
        span = slice(self.starts[slot], self.positions[slot] + 1)
        stopped = bool((self.stops[slot] == self.tokens[slot]).any() or self.matched[slot])
        reason: FinishReason = "aborted" if aborted else "stop" if stopped else "length"
        return Completion(
            tokens=self.drawn[slot, span].copy(),
            logprobs=self.logprobs[slot, span].copy(),
            log_kept=self.log_kept[slot, span].copy(),
            versions=self.versions[slot, span].copy(),
            prefill_version=prefill_version,
            finish_reason=reason,
        )
