"""Trackers: the metrics once more, in W&B or MLflow (extra ``tracking``).

Each has a daemon thread of its own behind a bounded queue: whatever a tracker does, the run goes
on, and one that raises or does not answer is of no more use.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.errors import ConfigError

QUEUED = 1000
"""Rows that may wait for a tracker."""

SILENCE = 60.0
"""Seconds that one call to a tracker may take, its opening and closing included."""


@runtime_checkable
class Tracker(Protocol):
    """What takes the metrics of one run."""

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite ``metrics`` of ``step``; a resumed run may come to a step again."""
        ...

    def close(self, failed: bool) -> None:
        """End the run there."""
        ...


class TrackerThread:
    """A tracker at work in a thread; no method waits for it, but ``close``, for ``silence`` s."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], silence: float = SILENCE):
        self.name = name
        self._silence = silence
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUED)
        self._error: BaseException | None = None
        self._busy_since: float | None = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker,), name=f"tunix-{name}", daemon=True
        )
        self._thread.start()

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a row; does nothing once there is a ``fault``."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._hand_over(lambda tracker: tracker.append(step, finite))

    def fault(self) -> str | None:
        """Why the tracker is of no more use; None while it is."""
        if self._error is not None:
            said = " ".join(str(self._error).split())
            return f"{type(self._error).__name__}: {said:.300}"
        busy = self._busy_since
        if busy is not None and time.monotonic() - busy > self._silence:
            return f"no answer for {self._silence:g} s"
        return None

    def close(self, failed: bool) -> None:
        """End the tracker's run and wait until it has taken everything, or shows a fault."""
        self._hand_over(lambda tracker: tracker.close(failed))
        self._hand_over(None)
        deadline = time.monotonic() + self._silence
        while self._thread.is_alive() and self.fault() is None:
            if time.monotonic() > deadline:
                self._error = TimeoutError(f"not done {self._silence:g} s after the run's end")
            self._thread.join(timeout=0.05)

    def _hand_over(self, call: Callable[[Tracker], None] | None) -> None:
        if self.fault() is None:
            try:
                self._calls.put_nowait(call)
            except queue.Full as full:
                self._error = self._error or full

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
            self._busy_since = None
            while (call := self._calls.get()) is not None:
                self._busy_since = time.monotonic()
                call(tracker)
                self._busy_since = None
        except BaseException as error:  # libraries raise SystemExit, too
            self._error = error


def check_installed(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` where the library of a tracker is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name!r} is not installed; install it with: "
                "pip install 'tunix[tracking]'"
            )


def open_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """Open ``wandb`` or ``mlflow`` for the run in ``folder``; raises what the library raises.

    The tracker's run is called like the folder, and its id is kept there, in ``NAME_id.txt``:
    opened again, the same run goes on.
    """
    return {"wandb": _WandB, "mlflow": _MLflow}[name](folder, config)


class _WandB:
    """Online where WANDB_MODE or WANDB_API_KEY is set, offline in the run folder otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        asked = {"WANDB_MODE", "WANDB_API_KEY"} & os.environ.keys()
        self._run = wandb.init(
            id=id_file.read_text(),
            resume="allow",
            mode=None if asked else "offline",
            dir=os.environ.get("WANDB_DIR", str(folder)),
            project=os.environ.get("WANDB_PROJECT", "tunix"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step may not fall, as it does where a resumed run repeats steps
        self._run.define_metric("*", step_metric="step")

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    """Where MLFLOW_TRACKING_URI says, in ``mlflow.db`` in the run folder otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        from mlflow import entities  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        folder = folder.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        self._client, self._metric = MlflowClient(tracking_uri=uri), entities.Metric
        id_file = folder / "mlflow_id.txt"
        if id_file.exists():
            self._id = id_file.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tunix")
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
        id_file.write_text(self._id)
        params = [entities.Param(name, str(value)[:6000]) for name, value in config.items()]
        self._client.log_batch(self._id, params=params)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", n, flags=re.A): v for n, v in metrics.items()}
        rows = [self._metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
