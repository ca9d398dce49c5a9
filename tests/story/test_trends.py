"""The robust slope and how sure it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import Direction, TrialTrend
from fragdoctor.story.trends import with_slope

GIB = 1024**3


def fitted(points):
    return with_slope(TrialTrend("allocated", "trial", points))


def of(*points):
    return fitted([round(p * GIB) for p in points])


def test_two_points_are_too_few():
    assert of(1, 9).direction is Direction.TOO_FEW


def test_three_rising_points_are_possible_and_five_likely():
    assert (of(1, 2, 3).direction, of(1, 2, 3).confidence) == (Direction.GROWS, Confidence.POSSIBLE)
    assert of(1, 2, 3, 4, 5).confidence is Confidence.LIKELY


def test_one_outlier_does_not_move_the_slope():
    slope = of(1, 2, 3, 40, 5, 6, 7)

    assert slope.slope_bytes == pytest.approx(GIB)
    assert slope.low_bytes <= GIB <= slope.high_bytes


def test_warm_up_of_the_first_point_is_level():
    assert of(0.2, 4, 4, 4, 4, 4).direction is not Direction.GROWS


def test_points_that_jump_are_unclear():
    assert of(1, 9, 2, 8, 1, 9).direction is Direction.UNCLEAR


@given(st.lists(st.integers(0, 2**40), min_size=3, max_size=30))
def test_reversed_points_turn_the_slope_around(points):
    forward = fitted(points)
    backward = fitted(points[::-1])

    assert forward.slope_bytes == pytest.approx(-backward.slope_bytes)
    turned = {Direction.GROWS: Direction.FALLS, Direction.FALLS: Direction.GROWS}
    assert backward.direction is turned.get(forward.direction, forward.direction)
