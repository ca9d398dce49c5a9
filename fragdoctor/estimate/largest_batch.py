"""The largest batch that fits: from the replay of fitted requests, or from the fit of the peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.batch_fit import BatchFit, BatchSource, Moment, Prediction, ReplayCheck

EXTRAPOLATED: Final = 2.0
CLOSE_REPLAY: Final = 0.02
MAX_LEFT_OUT: Final = 0.1
DOUBTFUL: Final = 0.05
ENDLESS_BATCH: Final = 1e9


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


def envelope(moments: Sequence[Moment], batch: float) -> float:
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

    Args:
        fit: without the prediction.
        room: what PyTorch can have.
        is_bound: the fit goes through runs that ended in an OOM.
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
