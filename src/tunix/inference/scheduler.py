"""Which request does what in the next step: admission, prefill, decoding. Synchronous.

A step admits waiting requests into free slots, reads some prompt, then decodes one token in
every slot that is ready. What a request gets is a function of its prompt, sampling and seed and
of the weights at each position, bit for bit (float32 on CPU): not of its slot, its neighbours,
the order of arrival, or how prompts were batched. That rests on

* decode steps of at least 8 rows, weights as ``[out, in]`` and sums in an order of their own (see
  ``models/llama.py``), with which the number of rows and the window make no difference;
* chunks of prompt whose lengths depend on the prompt only; the prompt's last token goes in by
  the decode step, so that prefill computes no logits;
* copying keys and values between slots only where they come from prefill under one version of
  the weights, which is what reading the prompt again would give.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tunix.errors import ConfigError, ModelError
from tunix.inference import device
from tunix.inference.request import Completion, Request
from tunix.inference.slots import CHUNK, MIN_ROWS, SlotTable, bucket, buckets
from tunix.models import llama
from tunix.models.llama import LlamaConfig, Params
from tunix.models.lora import Adapter
from tunix.text.stop import StopSearch
from tunix.text.tokenizer import Tokenizer

ROW_FACTOR = 4
"""Decode steps have 8, 32, 128 … rows: each number costs seconds of compilation."""
PREFILL_ROWS = 8
"""Prompts read in one dispatch; a single one is read alone."""
SHORT_CHUNK = 16
"""Length of the last chunk where at most this many positions are left."""
PREFILL_TOKENS = 512
"""Padded prompt positions read between two decode steps, so that long prompts stall nobody."""

OnDone = Callable[[Completion | Exception], None]
OnToken = Callable[[int], None]


@dataclass(eq=False)
class _Job:
    id: int
    request: Request
    on_done: OnDone
    on_token: OnToken | None
    search: StopSearch | None
    slot: int = -1
    prefill_version: int = -1
    decoding: bool = False
    prefix: bytes = b""


@dataclass(eq=False)
class _Prefill:
    """A prompt being read into its first job's slot, for all jobs that wait for it."""

    tokens: np.ndarray
    jobs: list[_Job]
    done: int = 0

    @property
    def chunk(self) -> int:
        return SHORT_CHUNK if len(self.tokens) - self.done <= SHORT_CHUNK else CHUNK


@dataclass
class Stats:
    """Counts since the start; times in seconds."""

    decode_steps: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    prefill_tokens: int = 0
    copied_tokens: int = 0
    generated_tokens: int = 0
    requests_done: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    idle_seconds: float = 0.0
    shapes: set[tuple] = field(default_factory=set)

    def as_dict(self) -> dict[str, int | float]:
        """Plain numbers; ``compilations`` counts the distinct shapes that were dispatched."""
        plain: dict[str, int | float] = {k: v for k, v in vars(self).items() if k != "shapes"}
        return plain | {"compilations": len(self.shapes)}


class Scheduler:
    """Continuous batching over ``slots`` sequences of up to ``max_positions`` tokens.

    ``params`` are in training form and copied. Deterministic and not thread-safe: one thread
    calls ``submit``, ``step``, ``publish``, ``abort``. ``on_done`` gets each request's
    ``Completion``, or a ``ModelError`` where the logits were not finite, from within ``step`` or
    ``abort``. Requests with stop strings need the ``tokenizer``. Raises ``ConfigError`` where
    ``max_positions`` exceeds what the model allows.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Any,
        *,
        adapters: Sequence[Adapter] = (),
        slots: int = 64,
        max_positions: int,
        version: int = 0,
        tokenizer: Tokenizer | None = None,
    ):
        if slots < 1 or not 2 <= max_positions <= config.max_positions:
            raise ConfigError(
                f"slots is {slots}, expected at least 1; max_positions is {max_positions}, "
                f"expected 2 to the model's {config.max_positions}"
            )
        self.config = config
        self.max_positions = max_positions
        self.version = version
        self.stats = Stats()
        self._tokenizer = tokenizer
        self.weights = device.Weights(
            device.take_over(config, params),
            tuple(device.take_over_adapter(config, adapter) for adapter in adapters),
        )
        self._usable = slots
        self._rows = -(-slots // MIN_ROWS) * MIN_ROWS
        self._capacity = -(-max_positions // CHUNK) * CHUNK
        dtype = np.promote_types(self.weights.base["embedding"].dtype, np.float32)
        self._cache = llama.new_cache(config, self._rows, self._capacity, dtype)
        self._table = SlotTable(self._rows, self._capacity)
        self._free = list(range(slots))
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[int, _Job] = {}
        self._in_slot: list[_Job | None] = [None] * self._rows
        self._prefills: dict[bytes, _Prefill] = {}
        self._prefixes: dict[bytes, int] = {}
        """Slot that holds the keys and values of a prompt read under the current version."""
        self._held: list[bytes | None] = [None] * self._rows
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._jobs)

    def validate(self, request: Request) -> None:
        """Raise ``ConfigError`` where the request cannot be served; callable from any thread."""
        length, vocab = len(request.tokens), self.config.vocab_size
        if length + 1 > self.max_positions:
            raise ConfigError(
                f"the prompt has {length} tokens, which leaves no room for an answer within "
                f"max_positions = {self.max_positions}"
            )
        for name, ids in (("prompt", request.tokens), ("stop_ids", request.sampling.stop_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                raise ConfigError(f"{name} holds a token id outside [0, {vocab})")
        if not 0 <= request.adapter <= len(self.weights.adapters):
            raise ConfigError(
                f"adapter is {request.adapter}; the engine has {len(self.weights.adapters)} "
                "adapter(s), and 0 means none"
            )
        if request.sampling.stop and self._tokenizer is None:
            raise ConfigError(
                f"stop is {request.sampling.stop}, but the engine has no tokenizer to search the "
                "text with; expected Engine(..., tokenizer=policy.tokenizer)"
            )

    def submit(self, request: Request, on_done: OnDone, on_token: OnToken | None = None) -> int:
        """Queue a request; return the id by which it can be aborted.

        ``on_token`` gets each token's id as it is drawn.
        """
        self.validate(request)
        prompt = request.tokens[:-1]
        prefix = np.asarray([request.adapter, *prompt], np.int32).tobytes() if prompt else b""
        stop, search = request.sampling.stop, None
        if stop and self._tokenizer is not None:
            search = StopSearch(self._tokenizer, stop)
        job = _Job(self._next_id, request, on_done, on_token, search, prefix=prefix)
        self._next_id += 1
        self._jobs[job.id] = job
        self._waiting.append(job)
        return job.id

    def publish(self, published: Params | Adapter, version: int) -> None:
        """Use new weights (training form, copied) from the next step on; see ``taken_over``."""
        self.install(self.taken_over(published), version)

    def taken_over(self, published: Params | Adapter) -> device.Weights:
        """The weights with a new base, or with a new first adapter over the same base."""
        if not isinstance(published, Adapter):
            return replace(self.weights, base=device.take_over(self.config, published))
        if not self.weights.adapters:
            raise ConfigError("an adapter was published to an engine that was made without one")
        adapter = device.take_over_adapter(self.config, published)
        return replace(self.weights, adapters=(adapter, *self.weights.adapters[1:]))

    def install(self, weights: device.Weights, version: int) -> None:
        """Like ``publish`` for weights that ``taken_over`` returned.

        Prompts half read are read anew, so that no prompt's cache mixes versions; requests that
        already decode go on with their cached keys and values.
        """
        self.weights, self.version = weights, version
        self._prefixes.clear()
        self._held = [None] * self._rows
        for prefill in self._prefills.values():
            prefill.done = 0

    def abort(self, id: int) -> None:
        """End a request with what it has drawn so far; one that is already done is ignored."""
        job = self._jobs.get(id)
        if job is None:
            return
        nothing = np.zeros(0, np.int32)
        result = Completion(nothing, nothing.astype(np.float32), nothing.astype(np.float32),
                            nothing, -1, "aborted")  # fmt: skip
        if job.decoding:
            result = self._table.completion(job.slot, job.prefill_version, aborted=True)
        elif job.slot >= 0:
            prefill = self._prefills[job.prefix]
            if prefill.jobs[0] is job:  # what was read lies in its slot: the next one starts anew
                prefill.done = 0
            prefill.jobs.remove(job)
            if not prefill.jobs:
                del self._prefills[job.prefix]
            self._clear(job.slot)
        else:
            self._waiting.remove(job)
        self._finish(job, result)

    def warm_up(self) -> None:
        """Compile every program that a step may run (seconds each), so that no request waits."""
        self._cache = device.warm_up(
            self.config,
            self.weights,
            self._cache,
            self._table.draws(self._rows),
            decode_rows=buckets(MIN_ROWS, self._rows, ROW_FACTOR),
            prefills=list(itertools.product((1, PREFILL_ROWS), (SHORT_CHUNK, CHUNK))),
            windows=buckets(CHUNK, self._capacity),
        )
        if self._free:
            self._clear(self._free[0])

    def step(self) -> None:
        """Admit, read some prompt, decode one token a ready slot."""
        started = time.perf_counter()
        self._admit()
        self._prefill()
        self._compact()
        decoding = time.perf_counter()
        self._decode()
        self.stats.prefill_seconds += decoding - started
        self.stats.decode_seconds += time.perf_counter() - decoding

    def _admit(self) -> None:
        copies: list[tuple[int, _Job]] = []
        while self._waiting and self._free:
            job = self._waiting.popleft()
            job.slot = heapq.heappop(self._free)
            self._in_slot[job.slot] = job
            source = self._prefixes.get(job.prefix)
            if source != job.slot:
                self._forget(job.slot)
            if not job.prefix:
                self._start(job)
            elif source is not None:
                copies.append((source, job))
            elif job.prefix in self._prefills:
                self._prefills[job.prefix].jobs.append(job)
            else:
                tokens = np.frombuffer(job.prefix, np.int32)[1:]
                self._prefills[job.prefix] = _Prefill(tokens, [job])
        self._copy(copies)

    def _prefill(self) -> None:
        budget = PREFILL_TOKENS
        copies: list[tuple[int, _Job]] = []
        while self._prefills and budget > 0:
            length = next(iter(self._prefills.values())).chunk
            batch = [p for p in self._prefills.values() if p.chunk == length][:PREFILL_ROWS]
            budget -= self._prefill_chunk(batch, length)
            for prefill in batch:
                if prefill.done >= len(prefill.tokens):
                    leader, *others = prefill.jobs
                    del self._prefills[leader.prefix]
                    self._prefixes[leader.prefix] = leader.slot
                    self._held[leader.slot] = leader.prefix
                    self._start(leader)
                    copies += [(leader.slot, job) for job in others]
        self._copy(copies)

    def _prefill_chunk(self, batch: list[_Prefill], length: int) -> int:
        """Read the next chunk of some prompts; return the padded positions that went through."""
        rows = 1 if len(batch) == 1 else PREFILL_ROWS
        tokens = np.zeros((rows, length), np.int32)
        positions = np.full((rows, length), self._capacity, np.int32)
        slots = np.arange(self._rows, self._rows + rows, dtype=np.int32)  # outside: dropped
        adapters = np.zeros(rows, np.int32)
        end = 0
        for row, prefill in enumerate(batch):
            part = prefill.tokens[prefill.done : prefill.done + length]
            tokens[row, : len(part)] = part
            positions[row, : len(part)] = prefill.done + np.arange(len(part))
            slots[row] = prefill.jobs[0].slot
            adapters[row] = prefill.jobs[0].request.adapter
            prefill.done += length
            end = max(end, prefill.done)
            self.stats.prefill_tokens += len(part)
        window = bucket(end, CHUNK, self._capacity)
        self.stats.shapes.add(("prefill", rows, length, window))
        self._cache = device.prefill(
            self.config, self.weights, self._cache, tokens, positions, slots, adapters, window
        )
        return rows * length

    def _copy(self, copies: list[tuple[int, _Job]]) -> None:
        """Give jobs the prompt that another slot holds, and let them decode."""
        while copies:
            part, copies = copies[: self._rows], copies[self._rows :]
            pairs = self._row_bucket(len(part))
            sources = np.zeros(pairs, np.int32)
            targets = np.arange(self._rows, self._rows + pairs, dtype=np.int32)
            for i, (source, job) in enumerate(part):
                sources[i], targets[i] = source, job.slot
                self.stats.copied_tokens += len(job.request.tokens) - 1
                self._start(job)
            longest = max(len(job.request.tokens) - 1 for _, job in part)
            self._dispatch_copy(sources, targets, longest)

    def _dispatch_copy(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        window = bucket(length, CHUNK, self._capacity)
        self.stats.shapes.add(("copy", len(sources), window))
        self._cache = device.copy(self._cache, sources, targets, window)

    def _start(self, job: _Job) -> None:
        job.decoding, job.prefill_version = True, self.version
        self._table.start(job.slot, job.request, self.max_positions)

    def _compact(self) -> None:
        """Move the last slots into holes below where that takes a step to a smaller bucket."""
        active = np.flatnonzero(self._table.decoding)
        if not len(active) or self._prefills or self._waiting:
            return
        rows = self._row_bucket(len(active))
        if rows == self._row_bucket(int(active[-1]) + 1):
            return
        moving = active[active >= rows]
        size = self._row_bucket(len(moving))
        sources = np.zeros(size, np.int32)
        targets = np.arange(self._rows, self._rows + size, dtype=np.int32)
        longest = int(self._table.positions[moving].max())
        for i, slot in enumerate(moving.tolist()):
            job = self._in_slot[slot]
            assert job is not None
            target = heapq.heappop(self._free)
            self._forget(target)
            sources[i], targets[i] = slot, target
            self._table.move(slot, target)
            self._in_slot[target], self._in_slot[slot] = job, None
            job.slot = target
            heapq.heappush(self._free, slot)
        self._dispatch_copy(sources, targets, longest)

    def _decode(self) -> None:
        table = self._table
        active = np.flatnonzero(table.decoding)
        if not len(active):
            return
        rows = self._row_bucket(int(active[-1]) + 1)
        window = bucket(int(table.positions[active].max()) + 1, CHUNK, self._capacity)
        self.stats.shapes.add(("decode", rows, window))
        self._cache, logits = device.decode(
            self.config,
            self.weights,
            self._cache,
            table.tokens[:rows],
            table.positions[:rows],
            table.adapters[:rows],
            window,
        )
        sampled = self._draw(logits, active)
        done, failed = table.record(sampled, self._show(sampled, active), self.version)
        self.stats.decode_steps += 1
        self.stats.slot_steps += rows
        self.stats.busy_slot_steps += len(active)
        self.stats.generated_tokens += len(active)
        for slot in done.tolist():
            job = self._in_slot[slot]
            assert job is not None
            if slot in failed:
                self._clear(slot)
                self._finish(job, ModelError(f"logits are not finite at version {self.version}"))
            else:
                self._finish(job, table.completion(slot, job.prefill_version))

    def _draw(self, logits: jax.Array, active: np.ndarray) -> list[np.ndarray]:
        """Draw every row by the program its request needs."""
        rows = len(logits)
        draws, filtered = self._table.draws(rows), self._table.filtered[:rows]
        programs = []
        if not filtered[active].all():
            programs.append(("draw", device.draw))
        if filtered.any():
            programs.append(("draw_filtered", device.draw_filtered))
        self.stats.shapes.update((name, rows) for name, _ in programs)
        sampled = [[np.asarray(x) for x in draw(logits, draws)] for _, draw in programs]
        if len(sampled) == 1:
            return sampled[0]
        return [np.where(filtered, b, a) for a, b in zip(*sampled, strict=True)]

    def _show(self, sampled: list[np.ndarray], active: np.ndarray) -> np.ndarray:
        """Show new tokens to who wants to see them; return where a stop string is complete."""
        tokens, logprobs, _ = sampled
        matched = np.zeros(len(tokens), bool)
        for slot in active[np.isfinite(logprobs[active])].tolist():
            job = self._in_slot[slot]
            assert job is not None
            if job.search is not None:
                matched[slot] = job.search.push(int(tokens[slot]))
            if job.on_token is not None:
                job.on_token(int(tokens[slot]))
        return matched

    def _row_bucket(self, n: int) -> int:
        return bucket(n, MIN_ROWS, self._rows, ROW_FACTOR)

    def _finish(self, job: _Job, result: Completion | Exception) -> None:
        del self._jobs[job.id]
        if job.slot >= 0:
            self._table.release(job.slot)
            self._in_slot[job.slot] = None
            heapq.heappush(self._free, job.slot)
        self.stats.requests_done += 1
        job.on_done(result)

    def _forget(self, slot: int) -> None:
        prefix = self._held[slot]
        if prefix is not None:
            del self._prefixes[prefix]
            self._held[slot] = None

    def _clear(self, slot: int) -> None:
        """Wipe a slot whose keys or values may not be finite."""
        self._forget(slot)
        self.stats.shapes.add(("clear",))
        self._cache = device.clear(self._cache, np.int32(slot))
