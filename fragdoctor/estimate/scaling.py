"""Curves through memory against batch size: a robust line, and how far from straight it is."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.slopes import pairwise_slopes
from fragdoctor.model.batch_fit import Curve, Scaling
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

    Args:
        batches: ``float64[n]``, at least two distinct values.
        n_bytes: ``float64[n]``.
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
