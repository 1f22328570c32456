"""The console: a live view in a terminal, one plain line a step in a pipe."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunix.report.curve import sparkline
from tunix.report.layout import TimeLeft, duration, evaluation_text, shares, shown_metrics

Mode = Literal["auto", "live", "plain", "none"]

HISTORY = 2000
"""Values kept for the sparklines."""


def console_observer(mode: Mode = "auto", console: Console | None = None) -> RunConsole:
    """Return the observer that a config's ``console`` asks for."""
    console = console or Console(highlight=False)
    if mode == "none":
        return RunConsole(Console(quiet=True))
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveConsole(console)
    return RunConsole(console)


class RunConsole:
    """Observer of a run that prints one plain line a step."""

    def __init__(self, console: Console):
        self.console = console
        self.total_steps = 0
        self.clock = time.perf_counter

    def start(self, run_folder: Path, total_steps: int, first_step: int) -> None:
        """Say where the run goes and from which step."""
        self.total_steps = total_steps
        self.time_left = TimeLeft(self.clock, total_steps, first_step)
        begun = f", from step {first_step}" if first_step else ""
        self._print(f"{run_folder}: {total_steps} steps{begun}")

    def step(self, metrics: Mapping[str, float | int], times: Mapping[str, float]) -> None:
        """Print a step's line."""
        step, seconds = int(metrics["step"]), metrics.get("seconds", 0.0)
        left = duration(self.time_left.step(step))
        parts = " ".join(f"{name} {part:.0%}" for name, part in shares(times, seconds))
        values = "  ".join(f"{label} {text}" for label, text in shown_metrics(metrics))
        self._print(
            f"step {step}/{self.total_steps}  {values}  {seconds:.2f} s ({parts})  left {left}"
        )

    def evaluation(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Print an evaluation's line."""
        self._print(f"step {step}/{self.total_steps}  held-out {evaluation_text(metrics)}")

    def message(self, text: str) -> None:
        """Print something a person should know."""
        self._print(text)

    def close(self) -> None:
        """Nothing is left open."""

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveConsole(RunConsole):
    """Observer of a run that keeps one view up to date in a terminal."""

    def __init__(self, console: Console):
        super().__init__(console)
        self._live: Live | None = None
        self._rewards: deque[float | int] = deque(maxlen=HISTORY)
        self._held_out: deque[float | int] = deque(maxlen=HISTORY)
        self._metrics: Mapping[str, float | int] = {}
        self._times: Mapping[str, float] = {}
        self._evaluated = "not yet evaluated"
        self._sample: dict[str, Any] | None = None

    def start(self, run_folder: Path, total_steps: int, first_step: int) -> None:
        """Open the view."""
        super().start(run_folder, total_steps, first_step)
        self._folder, self._step, self._started = run_folder, first_step, self.clock()
        self._left: float | None = None
        self._live = Live(
            get_renderable=self._view, console=self.console, refresh_per_second=2, transient=False
        )
        self._live.start()

    def step(self, metrics: Mapping[str, float | int], times: Mapping[str, float]) -> None:
        """Show a step."""
        self._step = int(metrics["step"])
        self._left = self.time_left.step(self._step)
        self._metrics, self._times = metrics, times
        self._rewards.append(metrics.get("reward_mean", metrics.get("loss", math.nan)))
        self._sample = _last_row(self._folder / "samples.jsonl") or self._sample
        self._refresh()

    def evaluation(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Show an evaluation."""
        self._evaluated = f"{evaluation_text(metrics)} at step {step}"
        self._held_out.append(metrics.get("success", metrics.get("loss", math.nan)))
        self._sample = _last_row(self._folder / "samples.jsonl") or self._sample
        self._refresh()

    def close(self) -> None:
        """Leave the last view on the screen; safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), self._numbers()]
        if self._sample is not None:
            parts.append(Panel(_sample_text(self._sample), title="a recent sample", height=6))
        return Panel(Group(*parts), title=Text(str(self._folder)), title_align="left")

    def _progress(self) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=None)
        row.add_column(ratio=1)
        row.add_column(justify="right")
        left = "" if self._left is None else f", {duration(self._left)} left"
        row.add_row(
            f"step {self._step}/{self.total_steps}",
            ProgressBar(total=max(self.total_steps, 1), completed=self._step),
            Text(f"{duration(self.clock() - self._started)}{left}"),
        )
        return row

    def _numbers(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        plain = not self.console.encoding.lower().startswith("utf")
        table.add_row("held-out", Text(self._evaluated))
        for label, values in (("held-out", self._held_out), ("training", self._rewards)):
            if len(values) > 1:
                table.add_row(f"{label} curve", sparkline(list(values), 48, ascii_only=plain))
        if self._metrics:
            pairs = [f"{label} {text}" for label, text in shown_metrics(self._metrics)]
            table.add_row("this step", Text("   ".join(pairs)))
            seconds = self._metrics.get("seconds", 0.0)
            went = "  ".join(f"{name} {part:.0%}" for name, part in shares(self._times, seconds))
            table.add_row("its time", Text(f"{seconds:.2f} s: {went}"))
        return table


def _last_row(path: Path) -> dict[str, Any] | None:
    """Return the last line of a JSONL file that may be long; None where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            return json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None


def _sample_text(sample: dict[str, Any]) -> Text:
    text = Text(overflow="ellipsis")
    for message in sample.get("messages", [])[-2:]:
        text.append(f"{message.get('role', '')}: ", style="bold")
        text.append(f"{str(message.get('content', ''))[:300]}\n")
    reward = sample.get("reward")
    given = "no reward" if reward is None else f"reward {reward:g}"
    text.append(f"answer {sample['answer']!r}: {given}" if "answer" in sample else given)
    return text
