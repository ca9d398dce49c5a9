"""Which figure is followed over three or more runs, along which axis, into which capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fragdoctor.comparison.evidence import place_text
from fragdoctor.comparison.reading import DeviceReading
from fragdoctor.comparison.series import Series, fit_trend, trend_text
from fragdoctor.comparison.tracks import line_tracks
from fragdoctor.model.comparison import Basis, Comparison, Trend


def find_trend(
    comparison: Comparison,
    devices: Sequence[DeviceReading | None],
    steps: Sequence[float] | None,
    capacity_bytes: int | None,
) -> Trend | None:
    """Return the growth over the runs; None where a run does not tell what is followed.

    Args:
        comparison: with the figures of all runs.
        devices: of each run, None where it has no snapshot.
        steps: where each run stands on the axis.
        capacity_bytes: what the growth runs into; the last run's capacity where None.
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
        told = comparison.figure("capacity")
        capacity_bytes = None if told is None else told.values[-1]
    trend = fit_trend(Series(figure, values, x, unit, tracks), capacity_bytes)
    top = next((t.place for t in trend.lines if t.place is not None), None)
    return replace(trend, text=trend_text(trend, "" if top is None else place_text(top)))


def live_bytes(device: DeviceReading, *, peak: bool) -> int:
    """Return live bytes at the compared moment, as the trace or the blocks say."""
    if peak and device.timeline is not None:
        return device.timeline.peak_allocated_bytes
    return sum(use.now_bytes for use in device.lines)


def _from_figures(comparison: Comparison) -> tuple[str, list[int]]:
    """Return the first figure that every run tells, by name."""
    for name in ("allocated", "peak_allocated"):
        figure = comparison.figure(name)
        if figure is not None:
            known = [v for v in figure.values if v is not None]
            if len(known) == len(figure.values):
                return name, known
    return "", []


def _axis(
    devices: Sequence[DeviceReading | None], steps: Sequence[float] | None
) -> tuple[list[float], str]:
    """Return the axis: given steps, else step counts that ascend, else 1, 2, 3, ..."""
    if steps is not None:
        return [float(s) for s in steps], "step"
    counts = [d.n_steps for d in devices if d is not None and not d.capture.is_truncated]
    told = [float(c) for c in counts if c]
    if len(told) == len(devices) and all(b > a for a, b in pairwise(told)):
        return told, "step"
    return [float(i + 1) for i in range(len(devices))], "snapshot"
