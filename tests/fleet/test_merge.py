from __future__ import annotations

import fleets
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.fleet.engine import fleet_of, merge
from fragdoctor.model.fleet import FleetSummary, RankSummary


@st.composite
def summaries(draw: st.DrawFn) -> RankSummary:
    """Return summaries of few paths, so that they meet: read, unread, replayed, different."""
    rank = draw(st.integers(0, 4))
    if draw(st.booleans()):
        return fleets.unread(rank, draw(st.sampled_from(["It ends.", "It is empty."])))
    made = fleets.summary(rank, {10: draw(st.integers(1, 3))})
    said = draw(st.sampled_from(["", "a", "\u20ac"]))
    return replace(made, is_replayed=draw(st.booleans()), summary=said)


FLEETS = st.lists(summaries(), max_size=6).map(fleet_of)


@given(FLEETS, FLEETS, FLEETS)
def test_merge_is_associative(a: FleetSummary, b: FleetSummary, c: FleetSummary) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(c, merge(a, b))


@given(FLEETS, FLEETS)
def test_merge_is_commutative(a: FleetSummary, b: FleetSummary) -> None:
    assert merge(a, b) == merge(b, a)


@given(FLEETS)
def test_merge_is_idempotent_and_empty_is_neutral(a: FleetSummary) -> None:
    assert merge(a, a) == a == merge(a, FleetSummary())


@given(FLEETS, FLEETS)
def test_merge_keeps_each_path_once_in_order(a: FleetSummary, b: FleetSummary) -> None:
    paths = [r.path for r in merge(a, b).ranks]

    assert paths == sorted({r.path for r in (*a.ranks, *b.ranks)})


def test_rank_that_was_read_wins_over_the_try_that_failed() -> None:
    good, bad = fleets.summary(3), fleets.unread(3)

    assert merge(fleet_of([good]), fleet_of([bad])).ranks == (good,)


def test_replayed_summary_wins_over_the_quick_one() -> None:
    quick = fleets.summary(3)
    tested = replace(quick, is_replayed=True)

    assert merge(fleet_of([tested]), fleet_of([quick])).ranks == (tested,)
