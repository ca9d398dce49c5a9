"""Peak memory against batch size from several recordings, and the largest batch that follows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.batch_curves import F64, Room, envelope, fit_curve, last_below, predicted
from fragdoctor.estimation.batch_replay import check_by_replay
from fragdoctor.estimation.fit_notes import warnings_of, why_not_linear
from fragdoctor.estimation.recordings import NO_LINE, LineKey, Recording, batches_of, recording_of
from fragdoctor.frozen import frozen
from fragdoctor.model.batch_fit import (
    BatchFit,
    BatchPoint,
    BatchSource,
    Curve,
    LineScaling,
    PeakLine,
    ReplayCheck,
)
from fragdoctor.model.finding import Location
from fragdoctor.model.memory_estimate import GpuModel
from fragdoctor.model.snapshot import Snapshot

MAX_RECORDINGS: Final = 64
# A bend far below the peak is not extrapolated: it would soon be above everything.
NEAR_PEAK: Final = 0.5


@frozen
class BatchQuestion:
    """What the user asked.

    Attributes:
        batches: of each recording, in their order; None = by name or by the traces.
        gpu: to predict for.
        capacity_bytes: what PyTorch can have, instead of a GPU.
        context_bytes, headroom_bytes: of the GPU; None = what is typical, and none.
    """

    batches: Sequence[float] | None = None
    gpu: GpuModel | None = None
    capacity_bytes: int | None = None
    context_bytes: int | None = None
    headroom_bytes: int | None = None


def fit_batches(snapshots: Sequence[tuple[str, Snapshot]], question: BatchQuestion) -> BatchFit:
    """Return the fit of peak memory against batch size, and the largest batch.

    Raises:
        ConfigError: too few or too many recordings, one without a trace, or batch sizes that are
            not known.
    """
    if not 2 <= len(snapshots) <= MAX_RECORDINGS:
        raise ConfigError(
            f"A trend needs 2 to {MAX_RECORDINGS} recordings; {len(snapshots)} given.",
            hint="Give recordings of the same program at different batch sizes.",
        )
    recordings = [recording_of(name, snapshot) for name, snapshot in snapshots]
    batches, source = batches_of(recordings, question.batches)
    order = sorted(range(len(batches)), key=lambda i: batches[i])
    return _fit([recordings[i] for i in order], [batches[i] for i in order], source, question)


def _fit(
    recordings: list[Recording], batches: list[float], source: BatchSource, question: BatchQuestion
) -> BatchFit:
    complete = [i for i, r in enumerate(recordings) if not r.ran_out]
    is_bound = len({batches[i] for i in complete}) < 2
    used = list(range(len(recordings))) if is_bound else complete
    chosen, at = [recordings[i] for i in used], np.array([batches[i] for i in used])
    allocated, active, reserved = (
        fit_curve(at, np.array([r.peaks[k] for r in chosen], np.float64)) for k in range(3)
    )
    moments = moments_of(chosen, at, allocated)
    lines, line_batches = lines_of(chosen, at, moments)
    fit = BatchFit(
        batch_source=source,
        points=_points(recordings, batches, moments),
        allocated=allocated,
        active=active,
        reserved=reserved,
        moments=moments,
        lines=lines,
        line_batches=line_batches,
        why=(),
        left_out_error=_left_out_error(chosen, at),
        rest_bytes=_rest(chosen),
        replay=None,
        prediction=None,
        warnings=warnings_of(recordings, is_bound=is_bound),
    )
    room = room_of(question, recordings)
    check = _checked(fit, chosen, at, room, is_bound=is_bound)
    if isinstance(check, str):
        fit = replace(fit, warnings=(*fit.warnings, f"Nothing was replayed: {check}."))
    else:
        fit = replace(fit, replay=check)
    fit = replace(fit, why=why_not_linear(fit))
    if room is None:
        return fit
    return replace(fit, prediction=predicted(fit, room, is_bound=is_bound))


def _points(
    recordings: Sequence[Recording], batches: Sequence[float], moments: Sequence[PeakLine]
) -> tuple[BatchPoint, ...]:
    return tuple(
        BatchPoint(
            source=r.source,
            batch=b,
            peak_allocated_bytes=r.peaks[0],
            peak_active_bytes=r.peaks[1],
            peak_reserved_bytes=r.peaks[2],
            fitted_bytes=round(envelope(moments, b)),
            is_lower_bound=r.ran_out,
            rest_bytes=None if r.ran_out else r.analysis.allocated_bytes,
            peak_line=r.locations.get(r.peak_key),
            n_requests=int(np.count_nonzero(r.lives.start >= 0)),
            n_steps=r.analysis.n_steps,
        )
        for r, b in zip(recordings, batches, strict=True)
    )


def moments_of(recordings: Sequence[Recording], batches: F64, total: Curve) -> tuple[PeakLine, ...]:
    """Return the lines that hold the peak at some batch size, in order of batch.

    The peak is the highest of what is allocated while each line runs; each of these follows the
    batch more simply than their maximum does. Without lines there is one moment, the peak itself.
    """
    shared = set.intersection(*(set(r.moments) for r in recordings))
    covers = all(r.peak_key in shared for r in recordings)
    if not covers or not all(r.has_lines for r in recordings):
        return (PeakLine(None, total, None, None),)
    curves = {
        key: fit_curve(batches, np.array([r.moments[key][0] for r in recordings], np.float64))
        for key in sorted(shared)
    }
    near = {
        key
        for key in curves
        if any(r.moments[key][0] >= NEAR_PEAK * r.peaks[0] for r in recordings)
    }
    curves = {k: c for k, c in curves.items() if k in near or not c.bend_bytes}
    reigns = _reigns(curves, float(batches.max()))
    found = []
    for key, low, high in reigns:
        place = next((r.locations[key] for r in recordings if key in r.locations), None)
        found.append(PeakLine(place, curves[key], low, high))
    return tuple(found)


def _reigns(
    curves: dict[LineKey, Curve], largest: float
) -> list[tuple[LineKey, float | None, float | None]]:
    """Return which curve is highest, from a small batch to far beyond the largest recorded one."""
    keys = list(curves)
    grid = np.geomspace(min(1.0, largest / 64), largest * 64, 1500)
    values = np.array([[curves[k].at(b) for b in grid] for k in keys])
    best = values.argmax(axis=0)
    changes = np.flatnonzero(np.diff(best)) + 1
    edges = [0, *changes.tolist(), len(grid)]
    return [
        (
            keys[int(best[low])],
            None if low == 0 else float(grid[low]),
            None if high == len(grid) else float(grid[high]),
        )
        for low, high in itertools.pairwise(edges)
    ]


def lines_of(
    recordings: Sequence[Recording], batches: F64, moments: Sequence[PeakLine]
) -> tuple[tuple[LineScaling, ...], tuple[float, ...]]:
    """Return what each line holds when the line that matters at large batches is at its peak.

    Empty where fewer than two recordings reach their peak there, or none has lines.
    """
    last = _key_of(moments[-1].line) if len(moments) > 1 else None
    # Where another line holds the peak, this one's highest moment may be another moment.
    there = [i for i, r in enumerate(recordings) if last is None or r.peak_key == last]
    if len({float(batches[i]) for i in there}) < 2 or not all(r.has_lines for r in recordings):
        return (), ()
    recordings, batches = [recordings[i] for i in there], batches[there]
    tables = [
        r.held_at(_peak_state(r) if last is None or last not in r.moments else r.moments[last][1])
        for r in recordings
    ]
    keys = sorted(set().union(*tables))
    rows = [
        LineScaling(
            line=next((r.locations[key] for r in recordings if key in r.locations), None),
            curve=fit_curve(batches, np.array([t.get(key, 0) for t in tables], np.float64)),
            n_bytes=tuple(t.get(key, 0) for t in tables),
        )
        for key in keys
    ]
    rows.sort(key=lambda row: -max(row.n_bytes))
    return tuple(rows), tuple(float(b) for b in batches)


def _key_of(place: Location | None) -> LineKey:
    if place is None:
        return NO_LINE
    name = place.filename.replace("\\", "/").rsplit("/", 1)[-1]
    return name, place.line, place.function


def _peak_state(recording: Recording) -> int:
    return recording.totals.peak_allocated_state


def _rest(recordings: Sequence[Recording]) -> int | None:
    held = [r.analysis.allocated_bytes for r in recordings if not r.ran_out]
    return int(np.median(held)) if held else None


def _left_out_error(recordings: Sequence[Recording], batches: F64) -> float | None:
    """Return how far the fit of the others misses the largest recording."""
    others = batches < batches.max()
    if len(np.unique(batches[others])) < 2:
        return None
    kept = [r for r, keep in zip(recordings, others, strict=True) if keep]
    total = fit_curve(batches[others], np.array([r.peaks[0] for r in kept], np.float64))
    guess = envelope(moments_of(kept, batches[others], total), float(batches.max()))
    true = max(r.peaks[0] for r, keep in zip(recordings, others, strict=True) if not keep)
    return guess / true - 1


# ---- the largest batch -----------------------------------------------------------------------


def room_of(question: BatchQuestion, recordings: Sequence[Recording]) -> Room | None:
    """Return what PyTorch can have, as asked, or as a failed run shows it; None = not known."""
    headroom = question.headroom_bytes or 0
    if question.capacity_bytes is not None:
        return Room("the capacity given", question.capacity_bytes, 0, headroom)
    if question.gpu is not None:
        gpu = question.gpu
        context = gpu.context_bytes if question.context_bytes is None else question.context_bytes
        return Room(gpu.name, gpu.total_bytes, context, headroom)
    shown = [c for r in recordings if (c := r.analysis.capacity_estimate_bytes) is not None]
    if not shown or max(shown) != min(shown):
        return None
    return Room("the GPU of the run that failed", shown[0], 0, headroom)


def _checked(
    fit: BatchFit,
    recordings: Sequence[Recording],
    batches: F64,
    room: Room | None,
    *,
    is_bound: bool,
) -> ReplayCheck | str:
    if is_bound:
        return "runs that ended in an OOM do not show what a whole run asks for"
    capacity = None if room is None else room.capacity_bytes
    guess = float(batches.max())
    if capacity is not None:
        found = last_below(lambda b: envelope(fit.moments, b), capacity, 1e-3)
        if not math.isinf(found):
            guess = min(max(found, float(batches.min())), 1e6)
    return check_by_replay(
        recordings,
        [float(b) for b in batches],
        capacity,
        guess,
        is_relative=fit.batch_source is BatchSource.TRACE,
    )
