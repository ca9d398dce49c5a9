"""The trend test: the slope is the median of all pairs, the chance that of all orders."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.model.trend import (
    kendall_deviation,
    mann_kendall,
    pairwise_slopes,
    sen_bounds,
    trend_of,
)

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


@pytest.mark.parametrize(
    ("values", "goes_on"),
    [
        ([1, 2, 3], True),
        ([0, 0, 0, 0, 0, 0, 0, 1, 2, 3], True),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3], True),
        ([0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6], False),  # it has filled up
        ([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], True),
        ([0, 1, 2, 3, 0, 1, 2, 3, 4, 5], False),  # it was let go of
        ([0, 3, 2, 5, 4, 7, 6, 9, 8], True),
    ],
)
def test_growth_goes_on_where_points_reach_new_heights_and_never_fell_far(values, goes_on):
    trend = trend_of(values)

    assert trend.goes_on == goes_on


def score_of(values: tuple[int, ...]) -> int:
    return sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_chance_is_that_of_all_orders_counted(n: int) -> None:
    scores = [score_of(p) for p in itertools.permutations(range(n))]

    for score in set(scores):
        expected = sum(s >= score for s in scores) / len(scores)
        assert mann_kendall(n, score) == pytest.approx(expected)


def test_chance_of_many_points_continues_that_of_few() -> None:
    exact, approximate = mann_kendall(60, 400), mann_kendall(61, 400)

    assert approximate == pytest.approx(exact, abs=0.002)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=12))
def test_slope_is_the_median_of_all_pairs_within_its_range(values: list[int]) -> None:
    x = [float(i) for i in range(len(values))]

    trend = trend_of(values, x)

    pairs = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2)]
    assert trend.slope == pytest.approx(statistics.median(pairs))
    assert trend.low <= trend.slope <= trend.high
    assert trend.score == score_of(tuple(values))
    assert trend.p_rise == mann_kendall(len(values), trend.score)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=12))
def test_change_is_as_likely_in_either_direction(values: list[int]) -> None:

    forward, backward = (trend_of(v) for v in (values, values[::-1]))

    assert forward.p_change == backward.p_change == min(forward.p_rise, backward.p_rise)
