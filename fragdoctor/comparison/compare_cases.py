"""The whole way from several runs to one comparison, or for three or more in order, the growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.comparison.answer import find_notes, is_same, summarised
from fragdoctor.comparison.compared_run import (
    ComparedDevice,
    ComparedRun,
    all_figures,
    choose_devices,
    device_of,
    device_peaks,
    read_run,
    side,
)
from fragdoctor.comparison.explanation import likely_causes
from fragdoctor.comparison.lines import line_changes, line_tracks, merged
from fragdoctor.comparison.settings_proof import prove_settings, requests_equal, setting_changes
from fragdoctor.errors import ConfigError
from fragdoctor.model import trend as trends
from fragdoctor.model.case import Case
from fragdoctor.model.comparison import (
    Basis,
    Comparison,
    LineTrend,
    RunTrend,
    SettingsProof,
)
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB, format_size, plural

MIN_SLOPE_BYTES: Final = 1 * MIB
"""Smallest growth over the whole series: less is noise in any program."""


def fit_trend(  # noqa: PLR0913 - a series, by keyword
    *,
    figure: str,
    values: Sequence[int],
    x: Sequence[float],
    unit: str,
    tracks: Sequence[tuple[Location | None, Sequence[int]]] = (),
    capacity_bytes: int | None = None,
) -> RunTrend:
    """Return the growth over the runs, and when it will fill the capacity, if that is known.

    Args:
        figure: ID of the figure that is fitted.
        values: its value in each run, in time order.
        x: where each run is on the axis, strictly ascending.
        unit: ``step`` or ``snapshot``.
        tracks: lines with their bytes in each run.
        capacity_bytes: the limit that the growth runs into.
    """
    found = trends.trend_of(values, x)
    sure = confidence_of(found, x)
    growing = [
        LineTrend(place, tuple(track), trend.slope)
        for place, track in tracks
        if confidence_of(trend := trends.trend_of(track, x), x) is not None
    ]
    at, soonest, latest = None, None, None
    if capacity_bytes is not None and sure is not None:
        at, soonest, latest = _exhausted(values, x, found, capacity_bytes)
    series = RunTrend(
        figure=figure,
        x=tuple(x),
        unit=unit,
        values=tuple(values),
        slope_bytes=found.slope,
        slope_low_bytes=found.low,
        slope_high_bytes=found.high,
        p_value=found.p_rise,
        confidence=sure,
        lines=tuple(sorted(growing, key=lambda line: -line.slope_bytes)),
        capacity_bytes=capacity_bytes,
        exhausted_at=at,
        exhausted_from=soonest,
        exhausted_until=latest,
    )
    return replace(series, text=_series_text(series))


def confidence_of(found: trends.Trend, x: Sequence[float]) -> Confidence | None:
    """Return how certain the growth is, or None if there is no growth to speak of."""
    if not found.goes_on or found.slope * (x[-1] - x[0]) < MIN_SLOPE_BYTES:
        return None
    return Confidence.LIKELY if found.p_rise <= trends.LIKELY_P else Confidence.POSSIBLE


def _exhausted(
    values: Sequence[int], x: Sequence[float], found: trends.Trend, capacity: int
) -> tuple[float, float, float | None]:
    """Return the axis value at which the fitted line reaches the capacity, and its range."""
    middle = [v - found.slope * at for v, at in zip(values, x, strict=True)]
    level = float(np.median(middle))
    at = (capacity - level) / found.slope
    room = capacity - values[-1]
    if room <= 0:
        return x[-1], x[-1], x[-1]
    at = max(at, x[-1])
    soonest = min(x[-1] + room / found.high, at)
    latest = max(x[-1] + room / found.low, at) if found.low > 0 else None
    return at, soonest, latest


def _series_text(trend: RunTrend) -> str:
    """Return what the series says, in two sentences."""
    n, unit = len(trend.values), trend.unit
    what = "Peak allocated memory" if trend.figure == "peak_allocated" else "Live memory"
    if trend.confidence is None:
        first, last = format_size(trend.values[0]), format_size(trend.values[-1])
        return (
            f"{what} shows no steady growth over {plural(n, 'run')} ({first} first, {last} last): "
            "no forecast."
        )
    per = f"{format_size(trend.slope_bytes)} per {unit}"
    between = f"{format_size(trend.slope_low_bytes)} to {format_size(trend.slope_high_bytes)}"
    place = next((t.location.short for t in trend.lines if t.location is not None), "")
    where = f", most of it at {place}" if place else ""
    chance = "" if trend.confidence is Confidence.LIKELY else ": it may be chance"
    text = f"{what} grows by {per} ({between}; p = {trend.p_value:.2g}{chance}){where}."
    return text + _forecast(trend)


def _forecast(trend: RunTrend) -> str:
    unit = trend.unit
    if trend.capacity_bytes is None:
        return " It is unknown when it will run out: give --capacity."
    low, high = trend.exhausted_from, trend.exhausted_until
    if trend.exhausted_at is None or low is None:
        return ""
    capacity = format_size(trend.capacity_bytes)
    if trend.exhausted_at <= trend.x[-1]:
        return f" The capacity of {capacity} is reached."
    until = f"{high:,.0f}" if high is not None else "never"
    at = f"{trend.exhausted_at:,.0f}"
    between = "" if f"{low:,.0f}" == at == until else f"between {low:,.0f} and {until}; "
    word = "If this continues" if trend.confidence is Confidence.LIKELY else "If that is a trend"
    return (
        f" {word}, {capacity} is full at about {unit} {at} "
        f"({between}fragmentation and the memory outside PyTorch come on top)."
    )


def find_trend(
    comparison: Comparison,
    devices: Sequence[ComparedDevice | None],
    steps: Sequence[float] | None,
    capacity_bytes: int | None,
) -> RunTrend | None:
    """Return the growth over the runs, or None if a run lacks the figure that is tracked.

    Devices are None for runs without a snapshot; ``steps`` says where each run is on the axis, and
    ``capacity_bytes`` is the limit that the growth runs into: the last run's capacity if None.
    """
    held = [d for d in devices if d is not None]
    peak = comparison.basis is Basis.PEAK
    if comparison.basis is Basis.NONE:
        figure, values = _from_figures(comparison)
    else:
        figure = "peak_allocated" if peak else "allocated"
        values = [live_bytes(d, peak=peak) for d in held]
    if not values:
        return None
    x, unit = _axis(devices, steps)
    tracks = (
        [] if comparison.basis is Basis.NONE else line_tracks([d.lines for d in held], peak=peak)
    )
    if capacity_bytes is None:
        capacities = comparison.figure("capacity")
        capacity_bytes = None if capacities is None else capacities.values[-1]
    return fit_trend(
        figure=figure, values=values, x=x, unit=unit, tracks=tracks, capacity_bytes=capacity_bytes
    )


def live_bytes(device: ComparedDevice, *, peak: bool) -> int:
    """Return live bytes at the compared moment, from the trace or the blocks."""
    if peak and device.peak_allocated_bytes is not None:
        return device.peak_allocated_bytes
    return sum(use.now_bytes for use in device.lines)


def _from_figures(comparison: Comparison) -> tuple[str, list[int]]:
    """Return the first figure that every run reports, with its name."""
    for name in ("allocated", "peak_allocated"):
        figure = comparison.figure(name)
        if figure is not None:
            known = [v for v in figure.values if v is not None]
            if len(known) == len(figure.values):
                return name, known
    return "", []


def _axis(
    devices: Sequence[ComparedDevice | None], steps: Sequence[float] | None
) -> tuple[list[float], str]:
    """Return the axis: given steps, else step counts if they ascend, else 1, 2, 3, ..."""
    if steps is not None:
        return [float(s) for s in steps], "step"
    counts = [d.n_steps for d in devices if d is not None and not d.capture.is_truncated]
    recorded = [float(c) for c in counts if c]
    if len(recorded) == len(devices) and all(b > a for a, b in pairwise(recorded)):
        return recorded, "step"
    return [float(i + 1) for i in range(len(devices))], "snapshot"


MAX_LINES_SHOWN = 400


def compare_cases(
    cases: Iterable[tuple[str, Case]],
    *,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
    explores: bool = False,
) -> Comparison:
    """Return what changed between runs in time order; each run is a name and a case.

    Cases are read one after the other; only the first one's analyses are kept, and the peaks of
    every request of the first and the last. With ``explores``, both sides of a two-run comparison
    keep their analyses, so that a page can show them.

    Raises:
        ConfigError: if there are fewer than two runs, or steps that do not fit them.
    """
    compared: list[ComparedRun] = []
    for name, case in cases:
        run = read_run(case, name)
        if len(compared) > 1:
            # Only the first and the last run of a series need the totals of their traces.
            devices = {n: replace(d, totals=None) for n, d in compared[-1].devices.items()}
            compared[-1] = replace(compared[-1], devices=devices, analyses={})
        compared.append(run if explores or not compared else replace(run, analyses={}))
    comparison = compare_runs(compared, steps=steps, capacity_bytes=capacity_bytes)
    if not explores or len(compared) > 2:
        return comparison
    sides = zip(comparison.runs, compared, strict=True)
    runs = tuple(
        s if s.device is None else replace(s, analysis=r.analyses.get(s.device)) for s, r in sides
    )
    return replace(comparison, runs=runs)


def compare_runs(
    compared: Sequence[ComparedRun],
    *,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
) -> Comparison:
    """Return what changed between runs: the first against the last, and the trend of three or more.

    There must be at least two runs, in time order; ``steps`` says where each is on the axis of a
    trend, and ``capacity_bytes`` is the limit it runs into: the last run's own capacity if None.

    Raises:
        ConfigError: if there are fewer than two runs, or steps that do not fit them.
    """
    if len(compared) < 2:
        raise ConfigError("One run cannot be compared.", hint="Give at least two.")
    _check_steps(steps, len(compared))
    chosen, notes = choose_devices(compared)
    devices = [device_of(r, d) for r, d in zip(compared, chosen, strict=True)]
    known = [d for d in devices if d is not None]
    if len(known) < len(devices):
        basis = Basis.NONE
    else:
        has_peaks = all(d.peak_allocated_bytes is not None for d in known)
        basis = Basis.PEAK if has_peaks else Basis.NOW
    first, last = devices[0], devices[-1]
    comparison = Comparison(
        runs=tuple(side(r, i, d) for i, (r, d) in enumerate(zip(compared, chosen, strict=True))),
        summary="",
        basis=basis,
        figures=all_figures(compared, chosen),
        settings=setting_changes(compared[0].settings, compared[-1].settings),
        device_peaks=device_peaks(compared),
    )
    if first is not None and last is not None and basis is not Basis.NONE:
        comparison, more = _with_lines(comparison, compared, first, last)
        notes += more
    if len(compared) > 2:
        trend = find_trend(comparison, devices, steps, capacity_bytes)
        comparison = replace(comparison, trend=trend)
    comparison = replace(comparison, is_same=is_same(comparison))
    comparison = replace(comparison, notes=(*notes, *find_notes(comparison, compared)))
    return replace(comparison, summary=summarised(comparison))


def _check_steps(steps: Sequence[float] | None, n_runs: int) -> None:
    if steps is None:
        return
    if len(steps) != n_runs:
        raise ConfigError(
            f"There are {n_runs} runs and {len(steps)} steps.", hint="Give one step for each run."
        )
    if any(b <= a for a, b in pairwise(steps)):
        raise ConfigError("The steps do not ascend.", hint="Give the runs in time order.")


def _with_lines(
    comparison: Comparison,
    compared: Sequence[ComparedRun],
    first: ComparedDevice,
    last: ComparedDevice,
) -> tuple[Comparison, list[str]]:
    """Return the comparison with lines, reasons and causes, and notes about the replay."""
    peak = comparison.basis is Basis.PEAK
    old, new = first.lines, last.lines
    if not min(first.capture.has_stacks, last.capture.has_stacks):
        # A line that only one run has would seem new in the other.
        old, new = (merged(old),), (merged(new),)
    changes = line_changes(old, new, peak=peak)
    delta = live_bytes(last, peak=peak) - live_bytes(first, peak=peak)
    equal = requests_equal(first, last)
    proof: SettingsProof | None = None
    notes: list[str] = []
    settings = compared[-1].settings
    analysis = compared[0].analyses.get(first.device)
    if comparison.settings and analysis is not None and settings is not None:
        proof, why = prove_settings(
            analysis.trace, first, last, settings, equal, under=comparison.runs[-1].letter
        )
        if why:
            notes.append(f"The settings were not tried by replay: {why}")
    comparison = replace(
        comparison,
        delta_bytes=delta,
        explained_bytes=sum(c.delta_bytes for c in changes if c.place is not None),
        lines=changes,
        proof=proof,
        requests_equal=equal,
    )
    kept = changes[:MAX_LINES_SHOWN]
    return (
        replace(
            comparison,
            causes=likely_causes(comparison, first, last),
            lines=kept,
            n_lines_left_out=len(changes) - len(kept),
        ),
        notes,
    )
