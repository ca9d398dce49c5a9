"""Slopes between all pairs of points."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.analysis.slopes import kendall_deviation, pairwise_slopes, sen_bounds

POINTS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(-(2**40), 2**40)), min_size=2, max_size=12
)


@given(POINTS)
def test_slopes_are_those_of_each_pair_that_differs_ascending(points):
    x, y = (np.array(column, np.float64) for column in zip(*points, strict=True))

    expected = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]
    )

    assert expected == pairwise_slopes(x, y).tolist()


def test_bounds_hold_the_median_and_the_line_has_no_width():
    x = np.arange(8, dtype=np.float64)
    odd = 3.0 * x
    odd[2] += 5

    low, high = sen_bounds(pairwise_slopes(x, odd), 8)

    assert low <= 3.0 <= high
    assert sen_bounds(pairwise_slopes(x, 3.0 * x), 8) == (3.0, 3.0)


def test_kendall_deviation_is_the_formula_of_its_variance():
    assert math.isclose(kendall_deviation(5), math.sqrt(5 * 4 * 15 / 18))
