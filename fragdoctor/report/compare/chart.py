"""The timelines of all runs over each other, and the fitted trend, as numbers for an SVG.

Nothing here is text from an input: letters, sizes and coordinates only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.comparison import Comparison, RunSide, Trend
from fragdoctor.units import GIB, KIB, MIB, TIB, format_count, format_size

WIDTH: Final = 1104
HEIGHT: Final = 340
LEFT: Final = 76
RIGHT: Final = 16
TOP: Final = 18
BOTTOM: Final = 34
MAX_RUNS: Final = 8
"""Curves beyond these cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class RunCurve:
    """One run: paths of allocated and reserved memory, and its peak."""

    letter: str
    number: int
    allocated: str
    reserved: str
    peak_x: float
    peak_y: float
    peak_label: str
    is_label_left: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything an SVG of one chart draws, in its own coordinates."""

    curves: Sequence[RunCurve]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    capacity_y: float | None = None
    capacity_label: str = ""
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class TrendChart:
    """Values of all runs over the axis, with the fitted line."""

    points: Sequence[tuple[float, float, str]]
    line: tuple[float, float, float, float]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


def timeline_chart(comparison: Comparison) -> Chart | None:
    """Return the runs' curves over their events; None where no run has a trace."""
    told = [(i, r) for i, r in enumerate(comparison.runs) if r.curve is not None]
    if not told:
        return None
    # The first and the last run are what is compared; of many the ones between are thinned out.
    kept = told if len(told) <= MAX_RUNS else [*told[: MAX_RUNS - 1], told[-1]]
    n_events = max(r.curve.n_events for _, r in kept if r.curve is not None)
    peak = max(max(r.curve.reserved_bytes) for _, r in kept if r.curve is not None)
    capacity = comparison.runs[-1].capacity_bytes
    is_inside = capacity is not None and capacity <= 2 * peak
    top = max(peak, capacity if is_inside and capacity is not None else 0, 1) * 1.06
    return Chart(
        curves=tuple(_curve(r, i, n_events, top) for i, r in kept),
        x_ticks=_count_ticks(n_events),
        y_ticks=_size_ticks(top),
        capacity_y=_y(capacity, top) if is_inside and capacity is not None else None,
        capacity_label=f"capacity {format_size(capacity)}" if is_inside else "",
        n_left_out=len(told) - len(kept),
    )


def _curve(side: RunSide, number: int, n_events: int, top: float) -> RunCurve:
    curve = side.curve
    assert curve is not None  # noqa: S101 - chosen by the caller
    values = curve.allocated_bytes
    n = max(1, len(values))
    scale = curve.n_events / max(1, n_events) / n
    highest = max(range(len(values)), key=lambda i: values[i])
    x = _x(highest * scale)
    return RunCurve(
        letter=side.letter,
        number=min(number, MAX_RUNS - 1) if number else 0,
        allocated=_path(values, scale, top),
        reserved=_path(curve.reserved_bytes, scale, top),
        peak_x=x,
        peak_y=_y(values[highest], top),
        peak_label=f"{side.letter} {format_size(values[highest])}",
        is_label_left=x > WIDTH - 150,
    )


def _path(values: Sequence[int], scale: float, top: float) -> str:
    """Return a step line: each column's level lasts to the next one."""
    parts = []
    before = None
    for i, value in enumerate(values):
        y = f"{_y(value, top):.1f}"
        x = f"{_x(i * scale):.1f}"
        if before is None:
            parts.append(f"M{x} {y}")
        elif y != before:
            parts.append(f"H{x}V{y}")
        before = y
    parts.append(f"H{_x(len(values) * scale):.1f}")
    return "".join(parts)


def trend_chart(trend: Trend) -> TrendChart:
    """Return the values of a series with the line that was fitted."""
    x, values = list(trend.x), list(trend.values)
    low, high = x[0], x[-1]
    span = (high - low) or 1.0
    level = sorted(v - trend.slope_bytes * at for v, at in zip(values, x, strict=True))
    middle = level[len(level) // 2]
    ends = (middle + trend.slope_bytes * low, middle + trend.slope_bytes * high)
    top = max(*values, *ends, 1.0) * 1.06

    def place(at: float) -> float:
        return _x(0.02 + 0.94 * (at - low) / span)

    points = tuple(
        (place(at), _y(v, top), f"{at:g}: {format_size(v)}")
        for at, v in zip(x, values, strict=True)
    )
    shown = x if len(x) <= 12 else x[:: math.ceil(len(x) / 12)]
    return TrendChart(
        points=points,
        line=(place(low), _y(max(0.0, ends[0]), top), place(high), _y(max(0.0, ends[1]), top)),
        x_ticks=tuple(Tick(place(at), f"{at:g}") for at in shown),
        y_ticks=_size_ticks(top),
    )


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(n_bytes: float, top: float) -> float:
    return HEIGHT - BOTTOM - n_bytes / top * (HEIGHT - BOTTOM - TOP)


def _size_ticks(top: float) -> tuple[Tick, ...]:
    unit = next((u for u in (TIB, GIB, MIB, KIB) if top >= 2 * u), 1)
    names = {TIB: "TiB", GIB: "GiB", MIB: "MiB", KIB: "KiB", 1: "B"}
    step = _round_step(top / unit / 5)
    n = int(top / unit / step)
    return tuple(
        Tick(_y(i * step * unit, top), f"{i * step:g} {names[unit]}" if i else "0")
        for i in range(n + 1)
    )


def _count_ticks(n_events: int) -> tuple[Tick, ...]:
    step = max(1.0, _round_step(n_events / 7))
    n = int(n_events / step)
    return tuple(
        Tick(_x(i * step / max(1, n_events)), format_count(int(i * step))) for i in range(n + 1)
    )


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least as large."""
    if rough <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
