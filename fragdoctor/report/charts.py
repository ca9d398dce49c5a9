"""A chart as numbers for an SVG: paths, marks and ticks. Nothing here is text from an input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fragdoctor.frozen import frozen
from fragdoctor.model.diagnosis import TimelineStrip
from fragdoctor.report.document import Chart, Series
from fragdoctor.units import GIB, KIB, MIB, TIB, format_count, format_size

WIDTH: Final = 1104
HEIGHT: Final = 340
LEFT: Final = 76
RIGHT: Final = 16
TOP: Final = 18
BOTTOM: Final = 34
_MAX_TICKS: Final = 12
_LABEL_ROOM: Final = 150


@frozen
class Tick:
    """A mark on an axis: where, and its label."""

    at: float
    label: str


@frozen
class DrawnPath:
    """A curve in the coordinates of the drawing."""

    d: str
    number: int
    is_dashed: bool
    is_fit: bool


@frozen
class Mark:
    """A point with its label; ``is_named`` puts the label beside it, on the left if it must."""

    x: float
    y: float
    label: str
    number: int
    is_named: bool
    is_left: bool


@frozen
class Drawing:
    """Everything that the SVG of one chart draws; x is drawn at ``across[0] + across[1] * x``."""

    paths: Sequence[DrawnPath]
    marks: Sequence[Mark]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    limit: Tick | None = None
    across: tuple[float, float] = (0.0, 1.0)


def drawn(chart: Chart) -> Drawing:
    """Return a chart in coordinates; a limit far above the curves is left out."""
    values = [v for s in chart.series for v in s.y]
    peak = max(values, default=0)
    limit = chart.limit_bytes if chart.limit_bytes and chart.limit_bytes <= 2 * peak else 0
    top = max(peak, limit, 1) * 1.06
    places = [x for s in chart.series for x in s.x]
    low, high = min(places, default=0), max(places, default=1)
    # Points need air on both sides, curves begin at the axis.
    air = 0.02 if any(s.shape == "points" for s in chart.series) else 0.0
    span = (high - low) or 1.0

    def across(x: float) -> float:
        return LEFT + (air + (1 - 3 * air) * (x - low) / span) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    paths, marks = [], []
    for s in chart.series:
        xs, ys = [across(x) for x in s.x], [up(y) for y in s.y]
        if s.shape != "points":
            d = _steps(xs, ys) if s.shape == "step" else _straight(xs, ys)
            paths.append(DrawnPath(d, s.number, s.is_dashed, s.shape == "line"))
        marks += _marks(s, xs, ys)
    ticks = chart.x_ticks or _round_ticks(high)
    shown = ticks if len(ticks) <= _MAX_TICKS else ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]
    return Drawing(
        paths,
        marks,
        [Tick(across(x), f"{x:g}" if chart.x_ticks else format_count(int(x))) for x in shown],
        [Tick(up(size), label) for size, label in _size_ticks(top)],
        Tick(up(limit), chart.limit_label) if limit else None,
        (across(0.0), across(1.0) - across(0.0)),
    )


def of_strip(strip: TimelineStrip) -> Chart:
    """Return the memory of a device over its trace as a chart."""
    n = max(1, len(strip.allocated_bytes))
    x = [i * strip.n_events / n for i in range(n)]
    allocated, reserved = strip.allocated_bytes, strip.reserved_bytes
    peak = f"peak allocated {format_size(strip.peak_bytes[0])}"
    capacity = strip.capacity_bytes
    return Chart(
        (
            Series("reserved", x, reserved, number=0, is_dashed=True),
            Series("allocated", x, allocated, labels=(peak,), number=0),
        ),
        f"Allocated and reserved memory of GPU {strip.device} over its trace",
        limit_bytes=capacity,
        limit_label="" if capacity is None else f"capacity {format_size(capacity)}",
    )


def _marks(s: Series, xs: Sequence[float], ys: Sequence[float]) -> list[Mark]:
    if s.shape == "points":
        return [
            Mark(x, y, label, s.number, is_named=False, is_left=False)
            for x, y, label in zip(xs, ys, s.labels, strict=True)
        ]
    if not s.labels or not xs:
        return []
    i = min(range(len(ys)), key=lambda i: ys[i])
    is_left = xs[i] > WIDTH - _LABEL_ROOM
    return [Mark(xs[i], ys[i], s.labels[0], s.number, is_named=True, is_left=is_left)]


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return a step line: each level lasts to the next point."""
    parts: list[str] = []
    before = ""
    for x, y in zip(xs, ys, strict=True):
        level = f"{y:.1f}"
        if not parts:
            parts.append(f"M{x:.1f} {level}")
        elif level != before:
            parts.append(f"H{x:.1f}V{level}")
        before = level
    return "".join([*parts, f"H{xs[-1]:.1f}"]) if parts else ""


def _straight(xs: Sequence[float], ys: Sequence[float]) -> str:
    points = [f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True)]
    return "M" + "L".join(points) if points else ""


def _size_ticks(top: float) -> list[tuple[float, str]]:
    unit = next((u for u in (TIB, GIB, MIB, KIB) if top >= 2 * u), 1)
    names = {TIB: "TiB", GIB: "GiB", MIB: "MiB", KIB: "KiB", 1: "B"}
    step = _round_step(top / unit / 5)
    return [
        (i * step * unit, f"{i * step:g} {names[unit]}" if i else "0")
        for i in range(int(top / unit / step) + 1)
    ]


def _round_ticks(high: float) -> list[float]:
    step = max(1.0, _round_step(high / 7))
    return [i * step for i in range(int(high / step) + 1)]


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least as large."""
    if rough <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
