"""Which metrics are shown, in which order and how; the same for the live view and plain lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """A metric as a person sees it."""

    label: str
    format: str
    quiet: bool = False
    """Shown only where it is not 0: counts of things that should not happen."""


SHOWN: Mapping[str, Shown] = {
    "reward_mean": Shown("reward", "{:.3f}"),
    "success": Shown("success", "{:.3f}"),
    "loss": Shown("loss", "{:.4f}"),
    "perplexity": Shown("perplexity", "{:.2f}"),
    "kl": Shown("KL", "{:.5f}"),
    "kl_reference": Shown("KL to reference", "{:.5f}"),
    "entropy": Shown("entropy", "{:.3f}"),
    "clip_fraction": Shown("clipped", "{:.1%}"),
    "completion_tokens_mean": Shown("length", "{:.1f}"),
    "gradient_norm": Shown("gradient", "{:.3g}"),
    "learning_rate": Shown("learning rate", "{:.2e}"),
    "tokens_per_second": Shown("tokens/s", "{:,.0f}"),
    "equal_reward_groups": Shown("equal groups", "{:.0f}", quiet=True),
    "invalid_samples": Shown("invalid samples", "{:.0f}", quiet=True),
    "skipped_updates": Shown("skipped updates", "{:.0f}", quiet=True),
}
"""By the name under which a metric is logged. What is not here is in metrics.jsonl only."""


def shown_metrics(metrics: Mapping[str, float | int]) -> list[tuple[str, str]]:
    """(label, text) of the known metrics that are present, in the table's order."""
    rows = []
    for name, shown in SHOWN.items():
        value = metrics.get(name)
        if value is None or (shown.quiet and value == 0):
            continue
        text = "-" if math.isnan(value) else shown.format.format(value)
        if name == "reward_mean" and "reward_std" in metrics:
            text += f" ± {metrics['reward_std']:.3f}"
        rows.append((shown.label, text))
    return rows


def evaluation_text(metrics: Mapping[str, float | int]) -> str:
    """Held-out success with its interval, or held-out loss."""
    if "success" in metrics:
        low, high = metrics.get("success_low", math.nan), metrics.get("success_high", math.nan)
        text = f"success {metrics['success']:.3f} (95%: {low:.3f} to {high:.3f}"
        text += f", {metrics['tasks']:.0f} tasks)" if "tasks" in metrics else ")"
        rest = {k: v for k, v in metrics.items() if k == "completion_tokens_mean"}
    else:
        text, rest = "", metrics
    return "  ".join(filter(None, [text, *(f"{a} {b}" for a, b in shown_metrics(rest))]))


def shares(times: Mapping[str, float], seconds: float) -> list[tuple[str, float]]:
    """Fractions of a step by where its time went, largest first; they add up to 1.

    Times of other threads (``TRACK/NAME``) run beside the step and are left out.
    """
    own = {name: t for name, t in times.items() if "/" not in name}
    whole = max(seconds, sum(own.values()), 1e-9)
    parts = sorted(own.items(), key=lambda pair: -pair[1])
    parts.append(("other", whole - sum(own.values())))
    return [(name, t / whole) for name, t in parts if t / whole >= 0.01]


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = int(max(seconds, 0))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class TimeLeft:
    """Estimates the time left from the pace of the last steps, evaluations included."""

    def __init__(self, clock: Callable[[], float], total_steps: int, first_step: int):
        self._clock = clock
        self._total = total_steps
        self._marks = [(first_step, clock())]

    def step(self, step: int) -> float:
        """Seconds left after ``step`` steps; the first, which compiles, soon counts no more."""
        self._marks = [*self._marks[-20:], (step, self._clock())]
        marks = self._marks[1:] if len(self._marks) > 2 else self._marks
        done = marks[-1][0] - marks[0][0]
        return (marks[-1][1] - marks[0][1]) / max(done, 1) * (self._total - step)
