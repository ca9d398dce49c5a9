"""Figures over trials and failures: what was allocated and cached when memory ran out or between.

Of each trial the lowest printed figure counts: what earlier trials left behind is in it, the
trial's own peak is not. Of the failures of one trial the first counts, as retries ask for less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.analysis.story.causes import Link
from fragdoctor.analysis.story.failures import Told
from fragdoctor.analysis.story.processes import Processes
from fragdoctor.analysis.story.slope import MAX_POINTS, slope_of
from fragdoctor.model.oom import OomMessage
from fragdoctor.model.story import Scene, SceneKind, Trend

_TABLE_LINES: Final = 6
"""Rows of one nvidia-smi table are at most so many lines apart."""

_MAX_TRENDS: Final = 12


@dataclass(frozen=True, slots=True)
class _Point:
    line: int
    n_bytes: int
    trial: str


def trends_at_failures(
    told: Sequence[Told], links: Sequence[Link], messages: Sequence[OomMessage]
) -> list[Trend]:
    """Return what was allocated, and cached without use, at the failures of each rank."""
    series: dict[tuple[int | None, int | None], list[tuple[Scene, OomMessage]]] = {}
    for one, link in zip(told, links, strict=True):
        scene = one.scene
        if scene.kind is SceneKind.OOM and scene.message is not None and link.cause is None:
            message = messages[scene.message]
            series.setdefault((scene.rank, message.device_index), []).append((scene, message))
    trends: list[Trend] = []
    for (rank, _), members in series.items():
        for figure in ("allocated", "unallocated"):
            points = [
                _Point(scene.line, n_bytes, scene.trial)
                for scene, message in members
                if (n_bytes := _at_failure(message, figure)) is not None
            ]
            trends.extend(_trend(figure, _first_of_trial(points), rank=rank))
    return trends


def _at_failure(message: OomMessage, figure: str) -> int | None:
    if figure == "allocated":
        return message.live_bytes
    return message.reserved_unallocated_bytes


def _first_of_trial(points: Iterable[_Point]) -> list[_Point]:
    kept: list[_Point] = []
    seen: set[str] = set()
    for point in points:
        if not point.trial or point.trial not in seen:
            kept.append(point)
            seen.add(point.trial)
    return kept


def trends_of_prints(scenes: Sequence[Scene], processes: Processes) -> list[Trend]:
    """Return printed figures over the trials, or over the prints of one process without trials."""
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
    trends: list[Trend] = []
    of_processes: dict[tuple[int | None, str, str], list[Trend]] = {}
    for (rank, _, name, label), points in series.items():
        lowest = _lowest_of_trials(points)
        if len(lowest) > 1:
            trends.extend(_trend(name, lowest, rank=rank, label=label))
        elif not any(p.trial for p in points):
            of_one = _trend(name, _one_process(points, processes), rank, label, "print")
            of_processes.setdefault((rank, name, label), []).extend(of_one)
    # of workers side by side the one that grows most
    steepest = (max(ts, key=lambda t: t.slope_bytes or 0.0) for ts in of_processes.values() if ts)
    return [*trends, *steepest]


def _lowest_of_trials(points: Iterable[_Point]) -> list[_Point]:
    lowest: dict[str, _Point] = {}
    for point in points:
        if point.trial and (
            point.trial not in lowest or point.n_bytes < lowest[point.trial].n_bytes
        ):
            lowest[point.trial] = point
    return list(lowest.values())


def _one_process(points: Sequence[_Point], processes: Processes) -> list[_Point]:
    """Return the prints of the process that printed most: a new one starts at nothing."""
    grouped: dict[int, list[_Point]] = {}
    for point in points:
        grouped.setdefault(processes.generation(point.line), []).append(point)
    return max(grouped.values(), key=len, default=[])


def _trend(
    figure: str, points: Sequence[_Point], rank: int | None = None, label: str = "", over: str = ""
) -> list[Trend]:
    if len(points) < 2:
        return []
    if len(points) > MAX_POINTS:
        chosen = np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)
        stride = (len(points) - 1) / (MAX_POINTS - 1)
        points = [points[i] for i in chosen.tolist()]
    else:
        stride = 1.0
    slope = slope_of(np.array([p.n_bytes for p in points], dtype=np.float64))
    is_over_trials = all(p.trial for p in points)
    return [
        Trend(
            figure=figure,
            over=over or ("trial" if is_over_trials else "oom"),
            points=tuple(p.n_bytes for p in points),
            lines=tuple(p.line for p in points),
            slope_bytes=_per(slope.bytes_per_step, stride),
            low_bytes=_per(slope.low, stride),
            high_bytes=_per(slope.high, stride),
            direction=slope.direction,
            confidence=slope.confidence,
            label=label,
            rank=rank,
        )
    ]


def _per(slope: float | None, stride: float) -> float | None:
    return None if slope is None else slope / stride


def kept(trends: Sequence[Trend]) -> tuple[Trend, ...]:
    """Return the trends that say most: a direction first, then many points."""
    ranked = sorted(
        range(len(trends)),
        key=lambda i: (trends[i].confidence is None, -len(trends[i].points), i),
    )
    return tuple(trends[i] for i in sorted(ranked[:_MAX_TRENDS]))
