"""Curves: in a terminal, as a line of blocks, and as a PNG."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, by column and row."""

Points = Sequence[tuple[float, float]]
"""(step, value) pairs."""


def sparkline(values: Sequence[float], width: int = 40, ascii_only: bool = False) -> str:
    """Draw at most ``width`` characters, each the mean of its share of ``values``.

    Lowest to highest value span the range; where nothing is finite there is a space.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = _range(means)
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    return "".join(
        " " if math.isnan(m) else blocks[min(int((m - low) / (high - low) * 8), 7)] for m in means
    )


def terminal_curve(
    values: Sequence[float] | Points,
    width: int = 60,
    height: int = 10,
    title: str = "",
    *,
    ascii_only: bool = False,
) -> str:
    """Draw a curve of ``width`` by ``height`` characters, axis labels besides.

    ``values`` are (step, value) pairs, or numbers whose steps are 0, 1, ... Without a finite value
    it says so.
    """
    pairs = [v if isinstance(v, tuple) else (float(i), v) for i, v in enumerate(values)]
    points = [(float(x), float(y)) for x, y in pairs if math.isfinite(y)]
    if not points:
        return f"{title}\n(no finite values)"
    low, high = _range([y for _, y in points])
    first, last = points[0][0], points[-1][0]
    across, down = (width, height) if ascii_only else (2 * width, 4 * height)
    places = [
        (
            round((x - first) / ((last - first) or 1) * (across - 1)),
            round((high - y) / (high - low) * (down - 1)),
        )
        for x, y in points
    ]
    rows = _canvas(_joined(places), width, height, ascii_only)
    bar = "|" if ascii_only else "│"
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    lines = [f"{labels.get(i, ''):>8} {bar}{row}" for i, row in enumerate(rows)]
    ends = f"{first:g}".ljust(width - len(f"{last:g}")) + f"{last:g}"
    return "\n".join(([title] if title else []) + lines + [" " * 10 + ends])


def save_curve(
    path: str | Path,
    series: Mapping[str, Points],
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    bands: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Write a PNG with one line a series, the file whole or not at all.

    ``bands`` holds (low, high) for each point of a series: its interval, drawn around the line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in series.items():
        steps, values = [x for x, _ in points], [y for _, y in points]
        (line,) = axes.plot(steps, values, marker="o", markersize=3, label=label)
        if bands and label in bands:
            lows, highs = zip(*bands[label], strict=True)
            axes.fill_between(steps, lows, highs, alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb") as file:
        canvas.print_png(file)
    os.replace(unfinished, path)


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest finite value, never equal."""
    known = [v for v in values if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _joined(places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """All dots on the straight lines from each place to the next."""
    dots = set(places)
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(length):
            dots.add((x0 + round((x1 - x0) * i / length), y0 + round((y1 - y0) * i / length)))
    return dots


def _canvas(dots: set[tuple[int, int]], width: int, height: int, ascii_only: bool) -> list[str]:
    if ascii_only:
        return [
            "".join("*" if (x, y) in dots else " " for x in range(width)) for y in range(height)
        ]
    cells = [[0x2800] * width for _ in range(height)]
    for x, y in dots:
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return ["".join(map(chr, row)) for row in cells]
