"""A robust slope, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.slopes import kendall_deviation, pairwise_slopes, sen_bounds
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import Direction
from fragdoctor.units import MIB

MIN_POINTS: Final = 3
"""Two points make a line through anything."""

MAX_POINTS: Final = 300
"""The slopes of all pairs are looked at; more points are thinned evenly."""

MIN_RISE_BYTES: Final = 32 * MIB
"""GiB with two decimals are exact to 5 MiB; caches that settle move a little more than that."""

MIN_RISE_SHARE: Final = 0.03
LEVEL_SHARE: Final = 0.1
"""Points within a tenth of their median are level if nothing drives them one way."""

_POSSIBLE_Z: Final = 1.0
_LIKELY_Z: Final = 2.2


@dataclass(frozen=True, slots=True)
class Slope:
    """Slope per step with its bounds (None below 3 and 4 points) and what it amounts to."""

    bytes_per_step: float | None
    low: float | None
    high: float | None
    direction: Direction
    confidence: Confidence | None


def slope_of(points: npt.NDArray[np.float64]) -> Slope:
    """Return the Theil-Sen slope of evenly spaced points and its direction.

    The direction rests on Kendall's test (every pair votes up or down), its bounds on Sen's
    (P. K. Sen, 1968: Estimates of the regression coefficient based on Kendall's tau). Three points
    that all rise are "possible", five are "likely"; a rise below 32 MiB or 3 % in all is level.
    """
    n = len(points)
    if n < MIN_POINTS:
        return Slope(None, None, None, Direction.TOO_FEW, None)
    slopes = pairwise_slopes(np.arange(n, dtype=np.float64), points)
    slope = float(np.median(slopes))
    votes = int(np.sign(slopes).sum())
    z = max(0, abs(votes) - 1) / kendall_deviation(n)
    low, high = (None, None) if n == MIN_POINTS else sen_bounds(slopes, n)
    median = float(np.median(points))
    rise = abs(slope) * (n - 1)
    if z >= _POSSIBLE_Z and rise >= max(MIN_RISE_BYTES, MIN_RISE_SHARE * median):
        direction = Direction.GROWS if slope > 0 else Direction.FALLS
        confidence = Confidence.LIKELY if z >= _LIKELY_Z else Confidence.POSSIBLE
        return Slope(slope, low, high, direction, confidence)
    spread = float(np.subtract(*np.percentile(points, [90, 10])))
    if spread <= max(2 * MIN_RISE_BYTES, LEVEL_SHARE * median):
        confidence = Confidence.LIKELY if n >= 5 else Confidence.POSSIBLE
        return Slope(slope, low, high, Direction.LEVEL, confidence)
    return Slope(slope, low, high, Direction.UNCLEAR, None)
