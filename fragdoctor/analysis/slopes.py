"""Robust slopes: those between all pairs of points, and how far apart chance leaves them.

The median of them is the slope of Theil (1950) and Sen (1968): up to three points in ten may be odd
without moving it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_NORMAL_90: Final = 1.645


def pairwise_slopes(x: F64, y: F64) -> F64:
    """Return the slopes between all pairs of points that differ in x, ascending.

    Args:
        x: ``float64[n]``.
        y: ``float64[n]``.
    """
    first, second = np.triu_indices(len(x), 1)
    across = x[second] - x[first]
    apart = across != 0
    return np.sort((y[second] - y[first])[apart] / across[apart])


def kendall_deviation(n: int) -> float:
    """Return the standard deviation of Kendall's score of n values in random order."""
    return math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def sen_bounds(slopes: F64, n: int) -> tuple[float, float]:
    """Return Sen's interval of 90 %: what Kendall's deviation leaves out on either side.

    Args:
        slopes: of all pairs, ascending.
        n: how many points they are of.
    """
    width = _NORMAL_90 * kendall_deviation(n)
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return float(slopes[low]), float(slopes[high])
