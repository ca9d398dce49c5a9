from __future__ import annotations

import pytest

from fragdoctor.gate.judgement import JudgedGrowth, has_grown, judge_growth
from fragdoctor.model.comparison import Basis, Comparison, DevicePeaks
from fragdoctor.units import MIB, parse_amount

Pair = tuple[int | None, int | None]


def judged(
    accepted: str, allocated: Pair = (100, 100), active: Pair = (100, 100), ooms: Pair = (0, 0)
) -> tuple[JudgedGrowth, ...]:
    def sized(pair: Pair) -> Pair:
        a, b = pair
        return (None if a is None else a * MIB, None if b is None else b * MIB)

    peaks = DevicePeaks(0, sized(allocated), sized(active), ooms)
    return judge_growth(
        Comparison((), "", Basis.NONE, device_peaks=(peaks,)), parse_amount(accepted)
    )


@pytest.mark.parametrize(
    ("accepted", "after", "expected"),
    [("2%", 102, False), ("2%", 103, True), ("5MiB", 105, False), ("5MiB", 106, True)],
)
def test_growth_beyond_what_is_accepted_fails(accepted: str, after: int, expected: bool) -> None:
    assert has_grown(judged(accepted, allocated=(100, after))) is expected


def test_active_memory_is_judged_too() -> None:
    assert has_grown(judged("2%", active=(100, 150)))


def test_less_memory_passes() -> None:
    result = judged("0", allocated=(100, 50))

    assert not has_grown(result)
    assert "did not grow" in result[0].text


def test_new_failure_fails_whatever_the_peak() -> None:
    result = judged("50%", allocated=(100, 90), ooms=(0, 1))

    assert has_grown(result)
    assert "rose from 0 to 1" in result[-1].text


def test_failures_that_were_there_before_do_not_count() -> None:
    assert not has_grown(judged("2%", ooms=(1, 1)))


def test_unknown_peaks_are_not_judged() -> None:
    assert judged("2%", allocated=(None, 100), active=(100, None)) == ()


@pytest.mark.parametrize(("common", "expected"), [((100, 101), False), ((100, 110), True)])
def test_where_one_run_failed_only_what_both_made_is_judged(common: Pair, expected: bool) -> None:
    pair = (common[0] * MIB, common[1] * MIB)
    peaks = DevicePeaks(0, pair, (None, None), (1, 0), 40)
    comparison = Comparison((), "", Basis.NONE, device_peaks=(peaks,))

    result = judge_growth(comparison, parse_amount("2%"))

    assert has_grown(result) is expected
    assert "over the first 40 requests" in result[0].text
