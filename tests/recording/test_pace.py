from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.recording.record_options import Pace


def test_pace_allows_the_first_and_then_one_in_an_interval() -> None:
    pace = Pace(3, 60.0, 20)

    allowed = [pace.allows(t) for t in (0.0, 0.1, 0.2, 0.3, 60.1, 60.2, 61.0, 120.2)]

    assert [True, True, True, False, False, True, False, True] == allowed


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(0, 5))
def test_pace_allows_never_more_than_the_first_and_one_an_interval(times, keep_first) -> None:
    pace = Pace(keep_first, 60.0, 1000)
    times = sorted(times)

    n_allowed = sum(pace.allows(t) for t in times)

    span = times[-1] - times[0] if times else 0.0
    assert n_allowed <= keep_first + span / 60.0 + 1


def test_pace_ends_after_a_number_in_all() -> None:
    pace = Pace(3, 60.0, 5)

    assert 5 == sum(pace.allows(100.0 * n) for n in range(50))
