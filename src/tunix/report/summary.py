"""What a finished run achieved: answers before and after, and the held-out curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tunix.errors import RunError
from tunix.report.curve import save_curve, terminal_curve
from tunix.training.loop import Run

HELD_OUT = (("success", "held-out success"), ("loss", "held-out loss"))
"""Evaluation metrics that a run is summed up by, the first that it has."""


def show(
    run: Run | str | Path,
    folder: str | Path | None = None,
    *,
    samples: int = 3,
    console: Console | None = None,
) -> Path:
    """Print answers before and after and the held-out curve; return the path of its PNG.

    ``run`` is a run or its folder; the picture ``curve.png`` goes to ``folder``, by default the
    run's own.

    Raises:
        RunError: the folder holds no evaluation.
    """
    path = run.folder if isinstance(run, Run) else Path(run)
    name, label, steps = held_out_curve(path)
    console = console or Console(highlight=False)
    pairs = before_and_after(path)
    for before, after in pairs[:samples]:
        _print(console, _pair_text(before, after))
    points = [(float(row["step"]), float(row[f"evaluation/{name}"])) for row in steps]
    ascii_only = not console.encoding.lower().startswith("utf")
    _print(console, terminal_curve(points, title=f"{label} by step", ascii_only=ascii_only))
    picture = Path(folder or path) / "curve.png"
    save_curve(
        picture, {label: points}, title=path.name, y_label=label, bands=_bands(label, name, steps)
    )
    _print(console, f"curve: {picture}")
    return picture


def held_out_curve(folder: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the metric a run is summed up by, its label, and the rows that hold it.

    Raises:
        RunError: there is none.
    """
    rows = _read(folder / "metrics.jsonl")
    for name, label in HELD_OUT:
        found = [row for row in rows if row.get(f"evaluation/{name}") is not None]
        if found:
            return name, label, found
    raise RunError(f"{folder} holds no evaluation to show")


def before_and_after(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Samples of the same held-out tasks before the first and after the last step.

    Those whose reward rose come first.
    """
    rows = _read(folder / "samples.jsonl")
    last = max((row["step"] for row in rows), default=0)
    before = {row["task"]: row for row in rows if row["step"] == 0}
    after = {row["task"]: row for row in rows if row["step"] == last}
    pairs = [(row, after[task]) for task, row in before.items() if task in after and last > 0]
    return sorted(pairs, key=lambda pair: _reward(pair[0]) - _reward(pair[1]))


def _bands(
    label: str, name: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]] | None:
    low, high = f"evaluation/{name}_low", f"evaluation/{name}_high"
    if not all(low in row and high in row for row in rows):
        return None
    return {label: [(float(row[low]), float(row[high])) for row in rows]}


def _pair_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    prompt = [m for m in before["messages"] if m.get("role") != "assistant"]
    asked = str(prompt[-1].get("content")) if prompt else before["task"]
    rows = [f"asked   {asked}   (right answer: {before.get('answer')})"]
    for word, sample in (("before", before), ("after ", after)):
        answers = [m for m in sample["messages"] if m.get("role") == "assistant"]
        said = str(answers[-1].get("content")) if answers else ""
        rows.append(f"{word}  {said:.300}   (reward {sample.get('reward')})")
    return "\n".join(rows) + "\n"


def _reward(sample: Mapping[str, Any]) -> float:
    reward = sample.get("reward")
    return 0.0 if reward is None else float(reward)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
