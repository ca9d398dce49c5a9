"""Figures over trials, failures and prints: their slopes, and what those add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.case import OomMessage
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import Direction, LogStory, Scene, SceneKind, TrialTrend
from fragdoctor.model.trend import LIKELY_P, MAX_POINTS, MIN_POINTS, POSSIBLE_P, trend_of
from fragdoctor.story.order import Processes
from fragdoctor.units import MIB, format_size, plural

STEPS: Final = {"trial": "trial", "oom": "failure", "print": "print"}
"""What the points of a trend are over, in words."""

MIN_RISE_BYTES: Final = 32 * MIB
"""GiB with two decimals are exact to 5 MiB; caches that settle move slightly more than that."""

MIN_RISE_SHARE: Final = 0.03
LEVEL_SHARE: Final = 0.1
"""Points within a tenth of their median are level unless something drives them in one direction."""


def with_slope(trend: TrialTrend, stride: float = 1.0) -> TrialTrend:
    """Return a trend with the Theil-Sen slope of its points and the direction that it shows.

    Three points that all rise are "possible", five are "likely"; a total rise below 32 MiB or 3%
    is level.

    Args:
        trend: the trend, with its points.
        stride: how many steps lie between two points.
    """
    n = len(trend.points)
    if n < MIN_POINTS:
        return trend
    points = np.array(trend.points, dtype=np.float64)
    found = trend_of(points)
    median = float(np.median(points))
    rise = abs(found.slope) * (n - 1)
    spread = float(np.subtract(*np.percentile(points, [90, 10])))
    direction, confidence = Direction.UNCLEAR, None
    if found.p_change <= POSSIBLE_P and rise >= max(MIN_RISE_BYTES, MIN_RISE_SHARE * median):
        direction = Direction.GROWS if found.slope > 0 else Direction.FALLS
        confidence = Confidence.LIKELY if found.p_change <= LIKELY_P else Confidence.POSSIBLE
    elif spread <= max(2 * MIN_RISE_BYTES, LEVEL_SHARE * median):
        direction = Direction.LEVEL
        confidence = Confidence.LIKELY if n >= 5 else Confidence.POSSIBLE
    has_bounds = n > MIN_POINTS
    return replace(
        trend,
        slope_bytes=round(found.slope / stride),
        low_bytes=round(found.low / stride) if has_bounds else None,
        high_bytes=round(found.high / stride) if has_bounds else None,
        direction=direction,
        confidence=confidence,
    )


_TABLE_LINES: Final = 6
"""Rows of one nvidia-smi table are at most this many lines apart."""

_MAX_TRENDS: Final = 12


_AT_FAILURE: Final = {"allocated": "live_bytes", "unallocated": "reserved_unallocated_bytes"}
"""Figure of a trend -> the field of a failure's message that has it."""


class _Point(Struct, frozen=True):
    line: int
    n_bytes: int
    trial: str


def trends_at_failures(scenes: Sequence[Scene], messages: Sequence[OomMessage]) -> list[TrialTrend]:
    """Return what was allocated, and what was cached but unused, at the failures of each rank."""
    series: dict[tuple[int | None, int | None], list[tuple[Scene, OomMessage]]] = {}
    for scene in scenes:
        is_own = scene.kind is SceneKind.OOM and scene.caused_by is None
        if is_own and scene.message is not None:
            message = messages[scene.message]
            series.setdefault((scene.rank, message.device_index), []).append((scene, message))
    trends: list[TrialTrend] = []
    for (rank, _), members in series.items():
        for figure, name in _AT_FAILURE.items():
            points = [
                _Point(scene.line, n_bytes, scene.trial)
                for scene, message in members
                if (n_bytes := getattr(message, name)) is not None
            ]
            trends.extend(_trend(figure, _first_of_trial(points), rank=rank))
    return trends


def _first_of_trial(points: Iterable[_Point]) -> list[_Point]:
    first: dict[str | int, _Point] = {}
    for point in points:
        first.setdefault(point.trial or point.line, point)
    return list(first.values())


def trends_of_prints(scenes: Sequence[Scene], processes: Processes) -> list[TrialTrend]:
    """Return printed figures over the trials, or without trials, over the prints of one process."""
    series: dict[tuple[int | None, int | None, str, str], list[_Point]] = {}
    smi_line, smi_row = -1, 0
    for scene in scenes:
        for figure in scene.figures:
            label = figure.label
            if label == "nvidia-smi":  # one row for each GPU
                smi_row = smi_row + 1 if scene.line - smi_line <= _TABLE_LINES else 0
                smi_line = scene.line
                label = f"nvidia-smi row {smi_row}"
            point = _Point(scene.line, figure.n_bytes, scene.trial)
            pid = None if scene.trial else scene.pid
            series.setdefault((scene.rank, pid, figure.name, label), []).append(point)
    trends: list[TrialTrend] = []
    of_processes: dict[tuple[int | None, str, str], list[TrialTrend]] = {}
    for (rank, _, name, label), points in series.items():
        lowest = _lowest_of_trials(points)
        if len(lowest) > 1:
            trends.extend(_trend(name, lowest, rank=rank, label=label))
        elif not any(p.trial for p in points):
            of_one = _trend(name, _one_process(points, processes), rank, label, "print")
            of_processes.setdefault((rank, name, label), []).extend(of_one)
    # among workers side by side, the one that grows most
    steepest = (max(ts, key=lambda t: t.slope_bytes or 0) for ts in of_processes.values() if ts)
    return [*trends, *steepest]


def _lowest_of_trials(points: Iterable[_Point]) -> list[_Point]:
    lowest: dict[str, _Point] = {}
    for point in (p for p in points if p.trial):
        known = lowest.setdefault(point.trial, point)
        lowest[point.trial] = min(known, point, key=lambda p: p.n_bytes)
    return list(lowest.values())


def _one_process(points: Sequence[_Point], processes: Processes) -> list[_Point]:
    """Return the prints of the process that printed most: a new process starts from zero."""
    grouped: dict[int, list[_Point]] = {}
    for point in points:
        grouped.setdefault(processes.generation(point.line), []).append(point)
    return max(grouped.values(), key=len, default=[])


def _trend(
    figure: str, points: Sequence[_Point], rank: int | None, label: str = "", over: str = ""
) -> list[TrialTrend]:
    if len(points) < 2:
        return []
    stride = 1.0
    if len(points) > MAX_POINTS:
        chosen = np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)
        stride = (len(points) - 1) / (MAX_POINTS - 1)
        points = [points[i] for i in chosen.tolist()]
    trend = TrialTrend(
        figure=figure,
        over=over or ("trial" if all(p.trial for p in points) else "oom"),
        points=tuple(p.n_bytes for p in points),
        lines=tuple(p.line for p in points),
        label=label,
        rank=rank,
    )
    return [with_slope(trend, stride)]


def kept(trends: Sequence[TrialTrend]) -> tuple[TrialTrend, ...]:
    """Return the most telling trends: first those with a direction, then by number of points."""
    ranked = sorted(
        range(len(trends)),
        key=lambda i: (trends[i].confidence is None, -len(trends[i].points), i),
    )
    return tuple(trends[i] for i in sorted(ranked[:_MAX_TRENDS]))


_OVER_TRIALS: Final = ("trial", "oom")
_RUN_RISE_SHARE: Final = 0.1
"""Within one run, printed memory must rise by a tenth: steps differ more than trials."""


def memory_over_trials(story: LogStory) -> TrialTrend | None:
    """Return the trend that shows whether memory accumulates, or None if none does.

    Figures printed between trials say more than what was allocated when memory ran out, since that
    also depends on the size of the trial.
    """
    printed = [t for t in story.trends if t.label and t.over == "trial" and _is_printed(t)]
    for figure in ("allocated", "reserved", "used"):
        best = _best([t for t in printed if t.figure == figure])
        if best is not None:
            return best
    at_failures = [
        t for t in story.trends if not t.label and t.figure == "allocated" and _is_printed(t)
    ]
    return _best(at_failures)


def accumulation(story: LogStory | None) -> TrialTrend | None:
    """Return the trend of memory that grows over trials, failures, or the prints of one run.

    If each trial has a process of its own, nothing can pile up between them: any growth there comes
    from the trials asking for more.
    """
    if story is None:
        return None
    trend = memory_over_trials(story)
    if trend is not None and trend.has_process_each:
        return None
    if trend is not None:
        return trend if trend.direction is Direction.GROWS else None
    runs = [
        t
        for t in story.trends
        if t.over == "print"
        and t.figure == "allocated"
        and t.direction is Direction.GROWS
        and t.confidence is Confidence.LIKELY
        and rise_bytes(t) >= _RUN_RISE_SHARE * t.points[-1]
    ]
    return _best(runs)


def rise_bytes(trend: TrialTrend) -> int:
    """Return how much a figure rose from the first to the last point along its slope."""
    if trend.slope_bytes is None:
        return 0
    if trend.lines and trend.over == "print":
        return trend.points[-1] - trend.points[0]
    return trend.slope_bytes * (len(trend.points) - 1)


def growth_sentence(trend: TrialTrend) -> str:
    """Return how a figure grows, in one sentence with its numbers."""
    what = {"unallocated": "Reserved but unallocated memory"}.get(
        trend.figure, f"{trend.figure.capitalize()} memory"
    )
    where = " at the failures" if trend.over == "oom" or not trend.label else ""
    bounds = f" ({trend.bounds})" if trend.bounds else ""
    return (
        f"{what}{where} grows from {format_size(trend.points[0])} to "
        f"{format_size(trend.points[-1])} over {plural(len(trend.points), STEPS[trend.over])}, "
        f"{format_size(trend.slope_bytes)} a {STEPS[trend.over]}{bounds}."
    )


def has_process_each(story: LogStory) -> bool:
    """Return whether every trial whose process is printed ran in a process of its own."""
    of_trial: dict[str, set[int]] = {}
    for event in story.events:
        if event.trial and event.pid is not None:
            of_trial.setdefault(event.trial, set()).add(event.pid)
    pids = [pid for group in of_trial.values() for pid in group]
    return len(of_trial) > 1 and len(pids) == len(set(pids))


def _is_printed(trend: TrialTrend) -> bool:
    return trend.over in _OVER_TRIALS and trend.slope_bytes is not None


def _best(trends: list[TrialTrend]) -> TrialTrend | None:
    return max(
        trends,
        key=lambda t: (t.direction is Direction.GROWS, t.confidence is not None, len(t.points)),
        default=None,
    )
