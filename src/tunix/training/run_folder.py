"""The run folder: everything a run leaves behind, owned by one process at a time.

config.yaml        the resolved config; `tunix COMMAND --config config.yaml` repeats the run
environment.json   versions, device, git commit, command line
metrics.jsonl      one line a step or evaluation
samples.jsonl      what was asked, answered and given, for people
checkpoints/       for --resume
events.*           the metrics once more, for TensorBoard
wandb/ mlflow.db   the same for trackers, with wandb_id.txt and mlflow_id.txt to go on by
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import yaml

from tunix.errors import ConfigError, RunError
from tunix.metrics.sinks import JsonLines, TensorBoard
from tunix.metrics.trackers import TrackerThread, check_installed, open_tracker

FREE_ON_RESUME = frozenset(
    {
        "run_folder",
        "resume",
        "console",
        "tensorboard",
        "trackers",
        "checkpoint_interval",
        "keep_checkpoints",
    }
)
"""Config fields that a resumed run may change, since they do not change its numbers."""

RECORDED = ("tunix", "jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
"""Distributions whose versions are recorded."""


class RunFolder:
    """An open, locked run folder; made by ``RunFolder.open``.

    ``warn`` is called with a text where something that does not stop the run goes wrong.
    """

    def __init__(self, path: Path, lock: int, config: Any):
        self.path = path
        self.warn: Callable[[str], None] = _warn
        self._lock = lock
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._samples = JsonLines(path / "samples.jsonl")
        self._tensorboard: TensorBoard | None = None
        self._wants_tensorboard = getattr(config, "tensorboard", False)
        self._config = _plain_config(config)
        self._trackers: list[TrackerThread] | None = None
        self._purge_step: int | None = None

    @classmethod
    def open(
        cls, path: str | Path | None, command: str, config: Any, resume: bool = False
    ) -> RunFolder:
        """Make (or with ``resume`` reopen) a run folder and lock it until the process ends.

        Without a path it is ``runs/COMMAND-DATE-TIME``. ``config`` is a dataclass.

        Raises:
            ConfigError: ``resume`` without a path, or with a config that differs from the run's;
                the library of a tracker is missing.
            RunError: in use, already holding a run, or not writable.
        """
        check_installed(getattr(config, "trackers", ()))
        if path is None:
            if resume:
                raise ConfigError("resume: run_folder is not set; name the folder of the run")
            path = default_folder(command)
        path = Path(path).expanduser()
        if resume and not (path / "config.yaml").is_file():
            # what restarts a job that was killed before it began can say --resume all the same
            _warn(f"{path} holds no run to resume; starting from the beginning")
            resume = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            _check_before(path, command, config, resume)
            _write_records(path, command, config, resume)
            return cls(path, lock, config)
        except OSError as error:
            os.close(lock)
            raise _unwritable(path, error) from None
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(failed=kind is not None)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl`` and, by its ``step``, to TensorBoard
        and the trackers.

        NaN and infinity become null.

        Raises:
            RunError: the file cannot be written (a full disk, say).
        """
        with self._writing(self._metrics):
            self._metrics.append(row)
        if "step" in row:
            numbers = {k: float(v) for k, v in row.items() if _is_number(v) and k != "step"}
            if self._wants_tensorboard:
                self._append_events(int(row["step"]), numbers)
            self._track(int(row["step"]), numbers)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Rows of ``metrics.jsonl``; null becomes NaN again."""
        return [
            {name: math.nan if value is None else value for name, value in json.loads(line).items()}
            for line in self._metrics.path.read_text().splitlines()
        ]

    def append_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to ``samples.jsonl``.

        Raises:
            RunError: the file cannot be written.
        """
        with self._writing(self._samples):
            self._samples.append(*rows)

    def offsets(self) -> dict[str, int]:
        """Sizes in bytes of the files that ``cut_back`` shortens; kept in each checkpoint."""
        return {file.path.name: file.size() for file in (self._metrics, self._samples)}

    def cut_back(self, offsets: Mapping[str, int]) -> None:
        """Drop what was written after a checkpoint; ``{}`` drops everything.

        Raises:
            RunError: a file is shorter than it was at the checkpoint.
        """
        for file in (self._metrics, self._samples):
            with self._writing(file):
                try:
                    file.cut_back(offsets.get(file.path.name, 0))
                except ValueError as error:
                    raise RunError(f"run folder {self.path} was changed: {error}") from None
        last = self._metrics.last()
        self._purge_step = 0 if last is None else int(last.get("step", 0)) + 1

    @property
    def begun(self) -> datetime.datetime:
        """When the run was first started; the same after a resume."""
        recorded = json.loads((self.path / "environment.json").read_text())
        return datetime.datetime.fromisoformat(recorded["time"])

    def close(self, failed: bool = False) -> None:
        """Close the files and give the folder free; safe to call twice.

        Trackers are told whether the run ``failed``; each is waited for a minute at most.
        """
        for tracker in self._trackers or ():
            tracker.close(failed)
        self._drop_faulty_trackers()
        self._trackers = []
        if self._tensorboard is not None:
            with contextlib.suppress(Exception):
                self._tensorboard.close()
            self._tensorboard = None
        self._metrics.close()
        self._samples.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._trackers is None:  # opened late: a run that computes nothing leaves nothing there
            self._trackers = [
                TrackerThread(name, partial(open_tracker, name, self.path, self._config))
                for name in dict.fromkeys(self._config.get("trackers", ()))
            ]
        for tracker in self._trackers:
            tracker.append(step, numbers)
        self._drop_faulty_trackers()

    def _drop_faulty_trackers(self) -> None:
        for tracker in list(self._trackers or ()):
            fault = tracker.fault()
            if fault is not None and self._trackers is not None:
                self._trackers.remove(tracker)
                self.warn(f"no more metrics go to {tracker.name}: {fault}")

    def _append_events(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            if self._tensorboard is None:
                self._tensorboard = TensorBoard(self.path, self._purge_step)
            self._tensorboard.append(step, numbers)
        except Exception as error:  # a view of the metrics, not the metrics: the run goes on
            self._wants_tensorboard = False
            self.warn(f"no more TensorBoard events are written: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _writing(self, file: JsonLines):
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{file.path} cannot be written: {error.strerror or error}; when there is room "
                f"again, go on with --resume --run_folder {self.path}"
            ) from None


def default_folder(command: str) -> Path:
    """Where a run goes that names no folder: ``runs/COMMAND-DATE-TIME``, one not yet there."""
    base = Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (base.with_name(f"{base.name}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"run folder {path} cannot be written: {error.strerror or error}")


def _lock(path: Path) -> int:
    """Take the folder's lock; the system frees it when this process ends, however it ends."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise RunError(
            f"run folder {path} is in use by process {owner}; wait for it or take another folder"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _check_before(path: Path, command: str, config: Any, resume: bool) -> None:
    recorded = path / "config.yaml"
    if not resume and not _has_results(path):
        return
    if not resume:
        raise RunError(
            f"run folder {path} already holds a run; go on with it by --resume, or take "
            "another run_folder"
        )
    try:
        fields = dict(yaml.safe_load(recorded.read_text()))
        was = json.loads((path / "environment.json").read_text())["command"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        raise RunError(
            f"{path} is not the folder of a run: config.yaml or environment.json is missing or "
            "damaged"
        ) from None
    if was != command:
        raise ConfigError(f"{path} holds a run of {was!r}; it cannot be resumed by {command!r}")
    now = _plain_config(config)
    for name in sorted(now.keys() | fields.keys()):
        old, new = fields.get(name), now.get(name)
        if name in FREE_ON_RESUME or old == new:
            continue
        if name == "steps" and isinstance(old, int) and isinstance(new, int) and new > old:
            if now.get("schedule", "constant") == "constant":
                continue  # trained further
            raise ConfigError(
                f"steps: {new} instead of {old}, but a {now['schedule']} schedule ends at the "
                "last step; start a new run from this one's model, or take schedule constant"
            )
        raise ConfigError(
            f"{name}: {new!r} differs from {old!r}, with which the run in {path} was started; a "
            "resumed run keeps its config"
        )


def _has_results(path: Path) -> bool:
    """False for a run that ended before it computed anything: its folder can be used again."""
    metrics = path / "metrics.jsonl"
    computed = metrics.is_file() and metrics.stat().st_size > 0
    return (path / "config.yaml").exists() and (computed or any(path.glob("checkpoints/*")))


def _plain_config(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _write_records(path: Path, command: str, config: Any, resume: bool) -> None:
    fields = _plain_config(config)
    for name, value in (("run_folder", None), ("resume", False)):
        if name in fields:  # a run repeated from this file is a new one in a new folder
            fields[name] = value
    text = f"# tunix {command}\n" + yaml.safe_dump(fields, sort_keys=False)
    environment = {"command": command} | _environment()
    if resume:
        with contextlib.suppress(OSError, ValueError):
            first = json.loads((path / "environment.json").read_text())
            environment = first | {"resumed": [*first.get("resumed", []), environment]}
    _write_whole(path / "environment.json", json.dumps(environment, indent=2) + "\n")
    _write_whole(path / "config.yaml", text)  # last: with it the folder holds a run


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _environment() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command_line": shlex.join(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "versions": {name: _version(name) for name in RECORDED},
        "git": _git(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit of the repository around the current folder; None outside one or without git."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changes)}
