from __future__ import annotations

import pytest

from fragdoctor.comparison.compare_cases import fit_trend
from fragdoctor.model.comparison import RunTrend
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import GIB, MIB

PLACE = Location("train.py", 50, "step")


def fitted(*mib: int, capacity: int | None = None) -> RunTrend:
    values = [v * MIB for v in mib]
    x = [float(10 * (i + 1)) for i in range(len(mib))]
    return fit_trend(
        figure="peak_allocated", values=values, x=x, unit="step", tracks=[(PLACE, values)],
        capacity_bytes=capacity,
    )  # fmt: skip


def test_one_odd_run_does_not_move_the_slope() -> None:
    straight = fitted(100, 110, 120, 130, 140, 150, 160)
    odd = fitted(100, 110, 120, 900, 140, 150, 160)

    assert odd.slope_bytes == pytest.approx(straight.slope_bytes, rel=0.05)


def test_steady_growth_is_likely_and_has_an_end() -> None:
    trend = fitted(100, 200, 301, 400, 500, capacity=1 * GIB)

    assert trend.confidence is Confidence.LIKELY
    assert trend.slope_bytes == pytest.approx(10 * MIB, rel=0.01)
    assert trend.exhausted_at == pytest.approx(102.4, rel=0.01)
    assert [t.location for t in trend.lines] == [PLACE]


def test_three_runs_that_rise_are_possible_only() -> None:
    trend = fitted(100, 200, 300, capacity=1 * GIB)

    assert trend.confidence is Confidence.POSSIBLE
    assert trend.p_value > 0.05
    assert "it may be chance" in trend.text


FILLED_CACHE = (100, 200, 300, 400, 400, 400, 400, 400, 400)


@pytest.mark.parametrize(
    "mib", [(100, 300, 120), (100, 100, 100), (300, 200, 100), (5, 9, 3, 8), FILLED_CACHE]
)
def test_what_does_not_grow_steadily_gets_no_forecast(mib: tuple[int, ...]) -> None:
    trend = fitted(*mib, capacity=1 * GIB)

    assert trend.confidence is None
    assert trend.exhausted_at is None
    assert "no forecast" in trend.text


def test_growth_that_is_over_the_capacity_is_said_so() -> None:
    trend = fitted(100, 200, 300, 400, capacity=300 * MIB)

    assert "is reached" in trend.text


def test_unknown_capacity_is_asked_for() -> None:
    assert "--capacity" in fitted(100, 200, 300, 400).text


def test_noise_below_a_mebibyte_is_no_growth() -> None:
    values = [100 * MIB + i * 1000 for i in range(6)]
    trend = fit_trend(figure="allocated", values=values, x=[1.0, 2, 3, 4, 5, 6], unit="snapshot")

    assert trend.confidence is None
