"""What every training run does around its steps: folder, state, logs, checkpoints, interruption.

An algorithm's file shows the loop itself; this one keeps the promise that a run killed at any
moment and resumed gives the same numbers as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from tunix.config import TrainingConfig
from tunix.datasets.batch import Batch
from tunix.errors import RunError
from tunix.models.policy import Policy, save_policy
from tunix.profiling.spans import Spans
from tunix.training.adapter import trained_adapter
from tunix.training.checkpoint import Checkpoints
from tunix.training.learner import Learner, LossFunction
from tunix.training.optimizer import learning_rate_schedule, make_optimizer
from tunix.training.run_folder import RunFolder

Config = TypeVar("Config", bound=TrainingConfig)

Metrics = dict[str, float | int]
"""Logged numbers by name; ``step`` and counts may be whole numbers."""

Evaluate = Callable[[], tuple[dict[str, float], list[dict[str, Any]]]]
"""Returns metrics and samples for people; changes nothing."""


@runtime_checkable
class Observer(Protocol):
    """Something that watches a run: the console, a notebook widget, a test."""

    def start(self, run_folder: Path, total_steps: int, first_step: int) -> None:
        """The run begins (or goes on) at ``first_step``."""
        ...

    def step(self, metrics: Metrics, times: dict[str, float]) -> None:
        """A step ended; ``times`` says in seconds where its time went."""
        ...

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """An evaluation after ``step`` steps ended."""
        ...

    def message(self, text: str) -> None:
        """Something a person should know."""
        ...

    def close(self) -> None:
        """The run ended, in whichever way."""
        ...


@dataclass(frozen=True)
class Run:
    """What training returns: the trained policy and the record of how it came to be."""

    folder: Path
    policy: Policy
    metrics: list[Metrics]
    """One dictionary a step, those before an interruption included."""
    evaluations: list[Metrics]
    """One dictionary an evaluation, each with its ``step``; the first is before any update."""


@dataclass
class TrainingRun(Generic[Config]):
    """A run in progress; use it as a context manager.

    ``steps`` yields the steps still to do; the body of the loop calls ``update`` for each batch and
    ``finish_step`` at its end. ``score`` names the evaluation metric that makes a checkpoint the
    best one, larger is better (``sign`` -1 turns that around).
    """

    folder: RunFolder
    config: Config
    policy: Policy
    """What training starts from; its parameters are let go once the learner has its own."""
    loss: LossFunction
    total_steps: int
    total_updates: int
    temperature: float
    score: str
    sign: int
    observers: Sequence[Observer] = ()
    evaluate: Evaluate | None = None
    evaluation_interval: int = 0

    step: int = field(init=False, default=0)
    learner: Learner = field(init=False)
    spans: Spans = field(init=False, default_factory=Spans)
    metrics: list[Metrics] = field(init=False, default_factory=list)
    evaluations: list[Metrics] = field(init=False, default_factory=list)
    counters: dict[str, int] = field(init=False, default_factory=dict)
    """Small whole numbers that must survive a resume: streaks, totals."""
    _checkpoints: Checkpoints = field(init=False)
    _best: float = field(init=False, default=-math.inf)
    _updates: list[Metrics] = field(init=False, default_factory=list)
    _guard: _InterruptGuard = field(init=False)
    _cleanup: contextlib.ExitStack = field(init=False)
    _half_done: bool = field(init=False, default=False)
    """True while the parameters are those of an unfinished step."""
    _evaluation_due: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        adapter = trained_adapter(self.config, self.policy)
        self.policy = replace(self.policy, adapter=adapter)

    def __enter__(self):
        with contextlib.ExitStack() as stack:  # whatever fails, what was opened is closed
            for observer in self.observers:
                stack.callback(observer.close)
            self.folder.warn = self.tell
            stack.callback(self._write_trace)
            self.learner = self._make_learner()
            self._checkpoints = Checkpoints(
                self.folder.path / "checkpoints", keep=self.config.keep_checkpoints
            )
            stack.callback(self._checkpoints.close)
            self._restore()
            self._open(stack)
            for observer in self.observers:
                observer.start(self.folder.path, self.total_steps, self.step)
            self._guard = _InterruptGuard()
            self._guard.install()
            stack.callback(self._guard.remove)
            self._cleanup = stack.pop_all()
        return self

    def _make_learner(self) -> Learner:
        learner = Learner(
            self.policy.config,
            self.policy.params,
            make_optimizer(self.config, self.total_updates),
            self.loss,
            adapter=self.policy.adapter,
            temperature=self.temperature,
            micro_batch_tokens=self.config.micro_batch_tokens,
        )
        self.policy = replace(self.policy, params={}, adapter=None)
        return learner

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open what else the run needs, with the learner as it was restored."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._cleanup:
            if error is not None:
                self._save_interrupted()

    def _write_trace(self) -> None:
        try:
            self.spans.write_trace(self.folder.path / "trace.json")
        except OSError as error:  # not worth more than a word
            self.tell(f"trace.json could not be written: {error}")

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps still to do, from 0; evaluates before the very first."""
        if self._evaluation_due:
            self._evaluate_and_save()
        self.spans.step_times()
        while self.step < self.total_steps:
            self._updates = []
            started = time.perf_counter()
            yield self.step
            self._log_step(time.perf_counter() - started)
            self._evaluation_due = self._is_evaluated(self.step)
            self._evaluate_and_save()
            self._checkpoints.check()
            if self._guard.requested and self.step < self.total_steps:
                raise KeyboardInterrupt
        self._save_model()

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Within it Ctrl-C acts at once; outside, a step is first brought to its end."""
        return self._guard.open()

    def update(self, batch: Batch) -> None:
        """One optimizer update.

        Raises:
            RunError: ``max_skipped_updates`` in a row were not finite.
        """
        unchanged = not self._half_done
        self._half_done = True
        with self.spans("update"):
            metrics = {"learning_rate": self._learning_rate()}
            metrics |= self.learner.update(batch, self._dropout_key())
        if metrics["skipped_updates"] and unchanged:
            self._half_done = False
        self._updates.append(metrics)
        streak = self.counters.get("skipped_in_a_row", 0) + 1
        self.counters["skipped_in_a_row"] = streak if metrics["skipped_updates"] else 0
        if metrics["skipped_updates"]:
            self.tell(f"step {self.step + 1}: loss or gradient is not finite; update skipped")
        if self.counters["skipped_in_a_row"] >= self.config.max_skipped_updates:
            raise RunError(
                f"{streak} updates in a row had a loss or gradient that is not finite; stopped "
                f"in step {self.step + 1}"
            )

    def _learning_rate(self) -> float:
        """Rate of the next update; the schedule counts the updates that were not skipped."""
        (_, done), *_ = optax.tree.get_all_with_path(self.learner.state.optimizer_state, "count")
        return float(np.asarray(learning_rate_schedule(self.config, self.total_updates)(done)))

    def _dropout_key(self) -> PRNGKeyArray | None:
        """A key for each update of the run, the same after a resume; None without dropout."""
        if self.config.lora_dropout == 0:
            return None
        key = jax.random.fold_in(jax.random.key(self.config.seed), self.step)
        return jax.random.fold_in(key, len(self._updates))

    def finish_step(self, metrics: Metrics, tokens: int) -> None:
        """End the body of a step; ``tokens`` are the real ones (no padding) it worked on."""
        self.step += 1
        self._half_done = False
        means = {name: _mean([u[name] for u in self._updates]) for name in _names(self._updates)}
        if self._updates:
            means["skipped_updates"] = sum(u["skipped_updates"] for u in self._updates)
        row: Metrics = {"step": self.step} | metrics | means
        self.metrics.append(row | {"tokens": tokens, "updates": len(self._updates)})

    def _log_step(self, seconds: float) -> None:
        times = self.spans.step_times()
        row = self.metrics[-1]
        row |= {"seconds": seconds, "tokens_per_second": row["tokens"] / seconds}
        row |= {f"time/{name}": value for name, value in times.items()}
        row |= {"compilations": float(self.learner.compilations)}
        self.folder.append_metrics(row)
        for observer in self.observers:
            observer.step(row, times)

    def _is_evaluated(self, step: int) -> bool:
        interval = self.evaluation_interval
        return step == self.total_steps or (interval > 0 and step % interval == 0)

    def _evaluate_and_save(self) -> None:
        score = self._evaluate() if self._evaluation_due else None
        last = self.step == self.total_steps
        due = last or self.step % self.config.checkpoint_interval == 0
        if self.step > 0 and (due or (score is not None and score > self._best)):
            self._save(score)

    def tell(self, text: str) -> None:
        """Hand a message to every observer."""
        for observer in self.observers:
            observer.message(text)

    def result(self) -> Run:
        """Return the trained policy and the run's record; call it within the context."""
        return Run(self.folder.path, self._trained(), self.metrics, self.evaluations)

    def _trained(self) -> Policy:
        params, adapter = self.learner.policy
        return replace(self.policy, params=params, adapter=adapter, version=self.step)

    def _evaluate(self) -> float | None:
        if self.evaluate is None:
            self._evaluation_due = False
            return None
        with self.spans("evaluation"), self.interruptible():
            metrics, samples = self.evaluate()
        self.evaluations.append({"step": self.step} | metrics)
        named = {f"evaluation/{name}": value for name, value in metrics.items()}
        self.folder.append_metrics({"step": self.step} | named)
        self.folder.append_samples([{"step": self.step} | sample for sample in samples])
        for observer in self.observers:
            observer.evaluation(self.step, metrics)
        self._evaluation_due = False
        return self.sign * metrics[self.score]

    def _save(self, score: float | None) -> None:
        if score is not None and not math.isnan(score):
            self._best = max(self._best, score)
        record = {
            "step": self.step,
            "best": None if math.isinf(self._best) else self._best,
            "counters": self.counters,
            "evaluation_due": self._evaluation_due,
            "offsets": self.folder.offsets(),
        }
        with self.spans("checkpoint"):
            self._checkpoints.save(self.step, self.learner.state, record, score)

    def _restore(self) -> None:
        newest = self._checkpoints.latest_step() if self.config.resume else None
        if newest is None:
            if self.config.resume:
                self.folder.cut_back({})
            return
        self.learner.state, record = self._checkpoints.restore(newest, self.learner.state)
        self.step = newest
        self._best = -math.inf if record["best"] is None else record["best"]
        self.counters = record["counters"]
        self._evaluation_due = record["evaluation_due"]
        self.folder.cut_back(record["offsets"])
        self._reread()

    def _reread(self) -> None:
        """Take up the record of the steps and evaluations before the interruption."""
        prefix = "evaluation/"
        for row in self.folder.read_metrics():
            judged = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}
            if judged:
                self.evaluations.append({"step": row["step"]} | judged)
            else:
                self.metrics.append(row)

    def _save_interrupted(self) -> None:
        """Save the last whole step if it is not, and say from where the run can go on."""
        try:
            # while collecting or evaluating, the parameters are those of the last finished step
            if not self._half_done and 0 < self.step != self._checkpoints.latest_step():
                self._save(None)
            self._checkpoints.wait()
        except Exception as error:  # what stopped the run matters more than this
            self.tell(f"the state of step {self.step} could not be saved: {error}")
        newest = self._checkpoints.latest_step()
        state = "nothing is saved yet" if newest is None else f"the state of step {newest} is saved"
        self.tell(f"{state} in {self.folder.path}")

    def _save_model(self) -> None:
        with self.spans("checkpoint"):
            save_policy(self._trained(), self.folder.path / "model")


class _InterruptGuard:
    """Turns SIGINT and SIGTERM into an exception at a moment when nothing is half done."""

    def __init__(self) -> None:
        self.requested = False
        self._open = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        if self.requested:
            raise KeyboardInterrupt
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested or self._open:  # a second one does not wait
            raise KeyboardInterrupt
        self.requested = True


def _names(rows: list[Metrics]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan
