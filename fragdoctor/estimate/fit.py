"""Peak memory against batch size from several recordings, and the largest batch that follows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fragdoctor.errors import ConfigError
from fragdoctor.estimate.batch_replay import check_by_replay
from fragdoctor.estimate.batches import batches_of
from fragdoctor.estimate.fit_notes import warnings_of, why_not_linear
from fragdoctor.estimate.recordings import NO_LINE, LineKey, Recording, recording_of
from fragdoctor.estimate.scaling import F64, fit_curve
from fragdoctor.model.batch_fit import (
    BatchFit,
    BatchPoint,
    BatchSource,
    Curve,
    LineScaling,
    Moment,
    Prediction,
    ReplayCheck,
)
from fragdoctor.model.estimate import GpuModel
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Snapshot

MAX_RECORDINGS: Final = 64
MAX_LINES: Final = 10
# A bend far below the peak is not extrapolated: it would soon be above everything.
NEAR_PEAK: Final = 0.5
EXTRAPOLATED: Final = 2.0
CLOSE_REPLAY: Final = 0.02
MAX_LEFT_OUT: Final = 0.1
DOUBTFUL: Final = 0.05
ENDLESS_BATCH: Final = 1e9


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Room:
    """What PyTorch can have, and of what."""

    gpu: str
    total_bytes: int
    context_bytes: int
    headroom_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Bytes for PyTorch."""
        return max(0, self.total_bytes - self.context_bytes - self.headroom_bytes)


def fit_batches(snapshots: Sequence[tuple[str, Snapshot]], question: BatchQuestion) -> BatchFit:
    """Return the fit of peak memory against batch size, and the largest batch.

    Args:
        snapshots: name and snapshot, at two or more batch sizes.
        question: what is asked.

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
    return replace(fit, prediction=_predicted(fit, room, is_bound=is_bound))


def _points(
    recordings: Sequence[Recording], batches: Sequence[float], moments: Sequence[Moment]
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
            n_requests=int(np.count_nonzero(r.lifetimes.start >= 0)),
            n_steps=int(r.analysis.extras.get("n_steps", 0)),
        )
        for r, b in zip(recordings, batches, strict=True)
    )


def moments_of(recordings: Sequence[Recording], batches: F64, total: Curve) -> tuple[Moment, ...]:
    """Return the lines that hold the peak at some batch size, in order of batch.

    The peak is the highest of what is allocated while each line runs; each of these follows the
    batch more simply than their maximum does. Without lines there is one moment, the peak itself.
    """
    shared = set.intersection(*(set(r.moments) for r in recordings))
    covers = all(r.peak_key in shared for r in recordings)
    if not covers or not all(r.has_lines for r in recordings):
        return (Moment(None, total, True, None, None),)
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
        found.append(Moment(place, curves[key], True, low, high))
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


def envelope(moments: Sequence[Moment], batch: float) -> float:
    """Return the highest of the moments' curves at a batch size."""
    return max(m.curve.at(batch) for m in moments)


def lines_of(
    recordings: Sequence[Recording], batches: F64, moments: Sequence[Moment]
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
    return int(recording.timeline.allocated_bytes.argmax())


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
        found = _last_below(lambda b: envelope(fit.moments, b), capacity, 1e-3)
        if not math.isinf(found):
            guess = min(max(found, float(batches.min())), 1e6)
    return check_by_replay(
        recordings,
        [float(b) for b in batches],
        capacity,
        guess,
        is_relative=fit.batch_source is BatchSource.TRACE,
    )


def _last_below(curve: Callable[[float], float], limit: float, start: float) -> float:
    """Return the largest batch at which a rising curve stays below a limit; inf = always."""
    if curve(start) > limit:
        return 0.0
    if curve(ENDLESS_BATCH) <= limit:
        return math.inf
    low, high = start, ENDLESS_BATCH
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if curve(middle) <= limit else (low, middle)
    return low


def _predicted(fit: BatchFit, room: Room, *, is_bound: bool) -> Prediction:
    capacity = room.capacity_bytes
    ratios = [p.peak_reserved_bytes / max(1, p.peak_allocated_bytes) for p in fit.points
              if not p.is_lower_bound] or [1.0]  # fmt: skip
    spread = _spread(fit)
    overhead, worst = float(np.median(ratios)), max(ratios)
    whole = fit.batch_source is not BatchSource.TRACE

    def largest_of(curve: Callable[[float], float]) -> float | None:
        return _largest(curve, capacity, whole=whole)

    low = largest_of(lambda b: envelope(fit.moments, b) * (1 + spread) * worst)
    high = largest_of(lambda b: _lower_envelope(fit.moments, b) * (1 - spread))
    largest = largest_of(lambda b: envelope(fit.moments, b) * overhead)
    replay = fit.replay if fit.replay is not None and _is_trusted(fit.replay) else None
    if replay is not None:
        # Requests are fitted one by one: that is closer than any curve through their sum.
        largest, low, high = replay.largest, replay.largest_without_flush, replay.ceiling
    if is_bound:
        largest, low = high, None
    is_unbounded = largest is not None and math.isinf(largest)
    top = max(p.batch for p in fit.points if not p.is_lower_bound or len(fit.points) < 3)
    is_far = largest is not None and largest > EXTRAPOLATED * top
    reasons, level = _confidence(fit, replay, largest, is_far=is_far)
    return Prediction(
        gpu=room.gpu,
        total_bytes=room.total_bytes,
        context_bytes=room.context_bytes,
        headroom_bytes=room.headroom_bytes,
        capacity_bytes=capacity,
        largest=None if is_unbounded else largest,
        low=None if low is None or math.isinf(low) else low,
        high=None if high is None or math.isinf(high) else high,
        method="fit" if replay is None else "replay",
        confidence=level,
        reasons=reasons,
        is_upper_bound=is_bound,
        is_extrapolated=is_far,
        is_unbounded=is_unbounded,
        bytes_at_largest=None if largest is None or is_unbounded
        else (replay.peak_bytes if replay is not None
              else round(envelope(fit.moments, largest))),
        overhead=overhead,
    )  # fmt: skip


def _is_trusted(replay: ReplayCheck) -> bool:
    """Return whether a replay says what the recordings say, and foretells one it has not seen."""
    return (
        replay.method == "fitted"
        and replay.worst_error <= CLOSE_REPLAY
        and abs(replay.left_out_error or 0.0) <= MAX_LEFT_OUT
    )


def _lower_envelope(moments: Sequence[Moment], batch: float) -> float:
    return max(m.curve.at_least(batch) for m in moments)


def _spread(fit: BatchFit) -> float:
    """Return the relative uncertainty of the fit: residuals, and how it foretold the largest."""
    known = [p for p in fit.points if not p.is_lower_bound]
    worst = max(
        (abs((p.fitted_bytes or 0) / max(1, p.peak_allocated_bytes) - 1) for p in known),
        default=0.0,
    )
    return min(0.5, max(worst, abs(fit.left_out_error or 0.0)))


def _largest(curve: Callable[[float], float], capacity: int, *, whole: bool) -> float | None:
    start = 1.0 if whole else 0.05
    found = _last_below(curve, capacity, start)
    if found == 0.0:
        return None
    if math.isinf(found):
        return found
    return float(math.floor(found + 1e-9)) if whole else math.floor(found * 20) / 20


def _confidence(
    fit: BatchFit, replay: ReplayCheck | None, largest: float | None, *, is_far: bool
) -> tuple[tuple[str, ...], str]:
    reasons = []
    score = 2
    n = len({p.batch for p in fit.points if not p.is_lower_bound})
    if n < 3:
        score -= 1
        reasons.append(
            f"{n or 'no'} complete recorded batch {'size' if n == 1 else 'sizes'} cannot show "
            "whether memory follows the batch in a straight line"
        )
    if replay is None:
        score -= 1
        reasons.append("no replay at other batch sizes confirms it")
    if is_far:
        score -= 1
        reasons.append("it lies beyond twice the largest recorded batch")
    error = fit.left_out_error if replay is None else replay.left_out_error
    if abs(error or 0.0) > DOUBTFUL:
        score -= 1
        reasons.append("without the largest recording the others would not have foretold it")
    if fit.warnings:
        score -= 1
        reasons.append("the recordings differ in more than the batch, see below")
    if largest is not None and any(p.is_lower_bound and p.batch <= largest for p in fit.points):
        score -= 1
        reasons.append("a recorded run at this batch or a smaller one ran out of memory")
    return tuple(reasons), ("low", "medium", "high")[max(0, score)]
