"""Curves through memory against batch size, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.trend import pairwise_slopes
from fragdoctor.frozen import frozen
from fragdoctor.model.batch_fit import (
    BatchFit,
    BatchSource,
    Curve,
    PeakLine,
    Prediction,
    ReplayCheck,
    Scaling,
)
from fragdoctor.units import MIB

F64 = npt.NDArray[np.float64]

# What rounding of requests and of segments can do to a sum without any change of the program.
ROUNDING_BYTES: Final = 4 * MIB
STRAIGHT_SHARE: Final = 0.01
SAME_SHARE: Final = 0.002
# A larger spread is still no growth where it is mostly noise.
FIXED_SHARE: Final = 0.02
NOISE_SHARE: Final = 0.2
# Secant slopes that differ by more than this bend; below, they are noise.
BEND_SHARE: Final = 0.1


def fit_curve(batches: F64, n_bytes: F64) -> Curve:
    """Return the curve through memory at several batch sizes.

    The line is the median of the slopes between all pairs (Theil 1950, Sen 1968): one odd recording
    does not move it. Where the points bend up, a parabola replaces it, because a line would promise
    too much.

    Both are ``float64[n]``, with at least two distinct batches.
    """
    slope, fixed = robust_line(batches, n_bytes)
    residual = n_bytes - (fixed + slope * batches)
    worst = float(np.abs(residual).max())
    scaling = scaling_of(batches, n_bytes, worst)
    bend = 0.0
    r_squared = _r_squared(n_bytes, residual) if len(np.unique(batches)) > 2 else None
    if scaling is Scaling.FIXED:
        slope, fixed = 0.0, float(np.median(n_bytes))
    if scaling is Scaling.FASTER:
        bend, slope, fixed = (float(c) for c in np.polyfit(batches, n_bytes, 2))
    known, n = _by_batch(batches, n_bytes)
    last_slope = float((n[-1] - n[-2]) / (known[-1] - known[-2]))
    return Curve(
        fixed, slope, bend, worst, r_squared, scaling, float(known[-1]), float(n[-1]), last_slope
    )


def robust_line(batches: F64, n_bytes: F64) -> tuple[float, float]:
    """Return slope and intercept: the medians over all pairs and over all points."""
    slope = float(np.median(pairwise_slopes(batches, n_bytes)))
    return slope, float(np.median(n_bytes - slope * batches))


def scaling_of(batches: F64, n_bytes: F64, worst_residual: float) -> Scaling:
    """Return how memory follows the batch, by its secant slopes."""
    known, n = _by_batch(batches, n_bytes)
    top = float(n.max())
    spread = float(n.max() - n.min())
    if spread <= max(SAME_SHARE * top, min(ROUNDING_BYTES / 4, 0.1 * top)):
        return Scaling.FIXED
    if len(known) > 2 and spread <= FIXED_SHARE * top and worst_residual > NOISE_SHARE * spread:
        return Scaling.FIXED
    if len(known) < 3:
        return Scaling.UNTESTED
    if worst_residual <= max(STRAIGHT_SHARE * top, min(ROUNDING_BYTES, 0.05 * top)):
        return Scaling.LINEAR
    return _bend(np.diff(n) / np.diff(known))


def _bend(slopes: F64) -> Scaling:
    """Return how a curve that is not straight bends, by its slopes from point to point."""
    scale = float(np.abs(slopes).max())
    change = np.diff(slopes) / scale
    flat = np.abs(slopes) < BEND_SHARE * scale / 4
    if flat[1:].any() and not flat[-1]:
        return Scaling.STEPS
    if (change >= -BEND_SHARE / 2).all() and (change > BEND_SHARE / 2).any():
        return Scaling.FASTER
    if (change <= BEND_SHARE / 2).all() and (change < -BEND_SHARE / 2).any():
        return Scaling.SLOWER
    return Scaling.IRREGULAR if (np.abs(change) > BEND_SHARE).any() else Scaling.LINEAR


def _by_batch(batches: F64, n_bytes: F64) -> tuple[F64, F64]:
    """Return each batch once, ascending, with the mean of its points."""
    known, member = np.unique(batches, return_inverse=True)
    total = np.zeros(len(known))
    np.add.at(total, member.reshape(-1), n_bytes)
    return known, total / np.bincount(member.reshape(-1))


def _r_squared(n_bytes: F64, residual: F64) -> float:
    spread = float(((n_bytes - n_bytes.mean()) ** 2).sum())
    return 1.0 if spread == 0.0 else max(0.0, 1.0 - float((residual**2).sum()) / spread)


EXTRAPOLATED: Final = 2.0
CLOSE_REPLAY: Final = 0.02
MAX_LEFT_OUT: Final = 0.1
DOUBTFUL: Final = 0.05
ENDLESS_BATCH: Final = 1e9


@frozen
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


def envelope(moments: Sequence[PeakLine], batch: float) -> float:
    """Return the highest of the moments' curves at a batch size."""
    return max(m.curve.at(batch) for m in moments)


def last_below(curve: Callable[[float], float], limit: float, start: float) -> float:
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


def predicted(fit: BatchFit, room: Room, *, is_bound: bool) -> Prediction:
    """Return the largest batch that a fit and its replay give.

    ``is_bound``: the fit goes through runs that ended in an OOM.
    """
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


def _lower_envelope(moments: Sequence[PeakLine], batch: float) -> float:
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
    found = last_below(curve, capacity, start)
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
