"""Whether figures grow: the one test, with a robust slope and its p-value.

The slope is the median slope between all pairs of points (Theil, 1950; Sen, 1968): up to three
points in ten may be outliers without moving it. The test is the one of Mann (1945) and Kendall
(1938): every pair votes up or down, and the p-value is the chance of at least that many votes in
random order. Growth goes on only if the points keep reaching new heights until the end, about as
often as before: a window or cache that has filled up no longer grows. Neither does memory that was
freed once, like the results of an epoch. The caller decides how many bytes count as growth.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.model.arrays import median

F64 = npt.NDArray[np.float64]

_NORMAL_90: Final = 1.645
_EXACT_UP_TO: Final = 60
"""The most points for exact p-values; above, the normal approximation is good to 0.002."""


MIN_POINTS: Final = 3
"""Two points make a line through anything."""

MAX_POINTS: Final = 300
"""More points are thinned evenly to this many, because all pairs of points are compared."""

POSSIBLE_P: Final = 1 / 6
"""The p-value of three points that all rise: a recording may have only a few steps or trials."""

LIKELY_P: Final = 1 / 72
"""Five points that all rise have a lower p-value; four do not."""

MAX_PAUSE: Final = 2
"""The longest stay below the last height, in multiples of the longest pause between two heights."""

LET_GO: Final = 0.5
"""A fall by more than this share of the whole rise shows that what grows is also freed."""


class Trend(Struct, frozen=True):
    """Theil-Sen slope and Mann-Kendall test of points in order.

    Attributes:
        n: number of points.
        slope: median slope, per unit of x.
        low, high: Sen's 90% interval around the slope.
        score: Kendall's score: the number of pairs that rise minus the number that fall.
        reaches_new: whether the points keep reaching new heights until the end.
    """

    n: int
    slope: float
    low: float
    high: float
    score: int
    reaches_new: bool

    @property
    def goes_on(self) -> bool:
        """Whether the points rise, and did so until the end."""
        return self.n >= MIN_POINTS and self.p_rise <= POSSIBLE_P and self.reaches_new

    @property
    def p_rise(self) -> float:
        """The chance of a score at least as high as this one for values in random order."""
        return mann_kendall(self.n, self.score)

    @property
    def p_change(self) -> float:
        """The chance of a score at least as extreme as this one, in the direction of its sign."""
        return mann_kendall(self.n, abs(self.score))


def trend_of(values: npt.ArrayLike, at: npt.ArrayLike | None = None) -> Trend:
    """Return the trend of values over their positions ``at``, by default 0, 1, 2, ...

    There must be at least two different positions.
    """
    y = np.asarray(values, np.float64)
    x = np.arange(len(y), dtype=np.float64) if at is None else np.asarray(at, np.float64)
    chosen = np.linspace(0, len(y) - 1, min(len(y), MAX_POINTS)).round().astype(np.int64)
    x, y = x[chosen], y[chosen]
    slopes = pairwise_slopes(x, y)
    low, high = sen_bounds(slopes, len(x))
    score = int(np.sign(slopes).sum())
    return Trend(len(x), median(slopes), low, high, score, _reaches_new(y))


def _reaches_new(y: F64) -> bool:
    """Return whether points keep reaching new heights until the end, and never fall far below."""
    highest = np.maximum.accumulate(y)
    heights = np.flatnonzero(np.diff(highest) > 0) + 1
    if len(heights) < MIN_POINTS - 1:
        return False
    pause, fall = len(y) - 1 - heights[-1], (highest - y).max()
    return bool(pause <= MAX_PAUSE * np.diff(heights).max() and fall <= LET_GO * (y[-1] - y[0]))


def pairwise_slopes(x: F64, y: F64) -> F64:
    """Return the slopes between all pairs of points that differ in x, ascending."""
    first, second = np.triu_indices(len(x), 1)
    across = x[second] - x[first]
    apart = across != 0
    return np.sort((y[second] - y[first])[apart] / across[apart])


def sen_bounds(slopes: F64, n: int) -> tuple[float, float]:
    """Return Sen's 90% interval around the median slope, from Kendall's standard deviation.

    ``slopes`` has the slopes of all pairs of n points, ascending.
    """
    width = _NORMAL_90 * kendall_deviation(n)
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return float(slopes[low]), float(slopes[high])


def kendall_deviation(n: int) -> float:
    """Return the standard deviation of Kendall's score of n values in random order."""
    return math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def mann_kendall(n: int, score: int) -> float:
    """Return the chance that n values in random order have at least this Kendall score."""
    n_pairs = n * (n - 1) // 2
    if n <= _EXACT_UP_TO:
        counts = _inversions(n)
        # score = pairs - 2 * inversions, so a score of at least s has at most (pairs - s) / 2.
        most = (n_pairs - score) // 2
        return sum(counts[: most + 1]) / math.factorial(n)
    return 0.5 * math.erfc((score - 1) / kendall_deviation(n) / math.sqrt(2))


@cache
def _inversions(n: int) -> tuple[int, ...]:
    """Return how many permutations of n values have 0, 1, 2, ... inversions."""
    counts = [1]
    for size in range(2, n + 1):
        longer = [0] * (len(counts) + size - 1)
        for at, count in enumerate(counts):
            for k in range(size):
                longer[at + k] += count
        counts = longer
    return tuple(counts)
