from __future__ import annotations

import itertools
import random
import time
from unittest import mock

import fleets
import pytest
from builders import MIB
from fleets import WALL_US, summary, unread
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.fleet import groups as grouping
from fragdoctor.fleet.conclusions import conclude, group_id
from fragdoctor.fleet.engine import fleet_of
from fragdoctor.fleet.groups import TOLERANCE, are_alike, find_groups, profiles_of
from fragdoctor.fleet.summary import MAX_HOLDERS
from fragdoctor.model.diagnosis import Cause, DeviceFigures
from fragdoctor.model.fleet import DifferenceKind, FleetReport, RankGroup, RankSummary


def report(*ranks: RankSummary) -> FleetReport:
    return conclude(fleet_of(ranks))


def odd_group(result: FleetReport) -> RankGroup:
    return next(group for group in result.groups if group.is_odd)


def groups(result: FleetReport) -> list[tuple[str, ...]]:
    return [g.labels for g in result.groups]


def failed(rank: int, held: dict[int, int], **changes: object) -> RankSummary:
    return summary(
        rank,
        held,
        has_failed=True,
        cause=Cause.CAPACITY,
        summary="It does not fit.",
        failed_us=WALL_US,
        **changes,
    )


def test_alike_ranks_are_one_group_and_no_one_is_odd() -> None:
    result = report(*(summary(i) for i in range(8)))

    assert groups(result) == [tuple(f"rank {i}" for i in range(8))]
    assert result.odd == ()
    assert result.verdict.summary == (
        "All 8 ranks are healthy and alike, with a peak of 112.00 MiB."
    )


def test_rank_that_holds_more_at_one_line_is_odd_by_that_line() -> None:
    odd = failed(5, {10: 3264, 20: 32, 30: 16})
    result = report(*(summary(i) for i in range(8) if i != 5), odd)

    assert [o.label for o in result.odd] == ["rank 5"]
    first = odd_group(result).differences[0]
    assert (first.kind, first.delta_bytes) == (DifferenceKind.LINE, 3200 * MIB)
    assert first.line is not None
    assert first.line.key == ("train.py", 10, "f10")
    assert result.verdict.cause is Cause.CAPACITY
    assert result.verdict.first_failed == "rank 5"
    assert result.verdict.summary == (
        "Rank 5 is odd: 3.12 GiB more at train.py:10 in f10 (3.19 GiB against 64.00 MiB). It runs "
        "out of memory, the others do not. The 7 others are healthy and alike, with a peak of "
        "112.00 MiB."
    )


def test_line_that_others_lack_is_named_so() -> None:
    result = report(*(summary(i) for i in range(4)), summary(4, {**fleets.USUAL, 77: 50}))

    assert odd_group(result).differences[0].text == (
        "50.00 MiB more at train.py:77 in f77, a line that holds nothing on the others"
    )


def test_setting_that_differs_makes_a_rank_odd() -> None:
    odd = summary(2, settings=(("max_split_size_mb", "128"),))
    result = report(*(summary(i) for i in range(4) if i != 2), odd)

    assert [o.label for o in result.odd] == ["rank 2"]
    assert [d.text for d in odd_group(result).differences] == [
        "another setting: max_split_size_mb is 128, not the default"
    ]


def test_other_request_sizes_are_another_shape() -> None:
    usual = [summary(i, large_sizes=((24 * MIB, 10), (8 * MIB, 3))) for i in range(4)]
    odd = summary(4, {10: 200}, large_sizes=((96 * MIB, 10),))

    texts = [d.text for d in odd_group(report(*usual, odd)).differences]

    assert (
        "another shape: it asks for 96.00 MiB where the others ask for 24.00 MiB, 8.00 MiB" in texts
    )


def test_pipeline_stages_are_groups_and_nobody_is_odd() -> None:
    first = [summary(i, {1: 300, 2: 100}) for i in range(4)]
    middle = [summary(i, {2: 100}) for i in range(4, 12)]
    last = [summary(i, {2: 100, 3: 500}) for i in range(12, 16)]

    result = report(*first, *middle, *last)

    assert [len(g.labels) for g in result.groups] == [8, 4, 4]
    assert result.odd == ()
    assert [g.reference for g in result.groups] == ["", "A", "A"]
    assert "in 3 groups" in result.verdict.summary


def test_odd_rank_is_compared_with_the_group_nearest_to_it() -> None:
    first = [summary(i, {1: 300, 2: 100}) for i in range(4)]
    other = [summary(i, {3: 500, 2: 100}) for i in range(4, 12)]
    odd = summary(12, {1: 400, 2: 100})

    result = report(*first, *other, odd)

    assert odd_group(result).reference == "B"
    assert odd_group(result).differences[0].delta_bytes == 100 * MIB


def test_continuum_of_peaks_is_one_group_and_a_rank_beyond_the_gap_is_odd() -> None:
    spread = [summary(i, {10: 1000 + 30 * i}) for i in range(20)]
    far = summary(20, {10: 2500})

    result = report(*spread, far)

    assert [len(g.labels) for g in result.groups] == [20, 1]
    assert [o.label for o in result.odd] == ["rank 20"]


def test_first_to_fail_is_told_by_the_clock() -> None:
    ranks = [replace(failed(i, fleets.USUAL), failed_us=WALL_US - i) for i in range(4)]

    result = report(*ranks)

    assert result.verdict.first_failed == "rank 3"
    assert result.verdict.summary == (
        "All 4 ranks run out of memory. The first is rank 3: It does not fit."
    )


@pytest.mark.parametrize("time", [None, 12345])
def test_first_to_fail_stays_open_without_a_common_clock(time: int | None) -> None:
    ranks = [replace(failed(i, fleets.USUAL), failed_us=time) for i in range(4)]

    assert report(*ranks).verdict.first_failed == ""


def test_unwell_ranks_among_ranks_that_all_differ_are_counted_in_a_sentence() -> None:
    leaking = {"cause": Cause.LEAK, "summary": "A line keeps memory."}
    ranks = [summary(i, {10 + i: 100}, **(leaking if i > 5 else {})) for i in range(8)]

    assert report(*ranks).verdict.summary == (
        "No rank ran out of memory, but 2 of them show: leak."
    )


def test_two_ranks_of_which_one_fails() -> None:
    result = report(summary(0), failed(1, {10: 500}))

    assert [o.label for o in result.odd] == ["rank 1"]
    assert "The other rank is healthy" in result.verdict.summary


def test_two_ranks_that_merely_differ_are_told_to_and_neither_is_odd() -> None:
    result = report(summary(0, {10: 100}), summary(1, {10: 500}))

    assert result.odd == ()
    assert result.verdict.summary == (
        "Both ranks are healthy, with peaks of 100.00 MiB to 500.00 MiB. They differ, and neither "
        "is odd: rank 1 against rank 0: 400.00 MiB more at train.py:10 in f10 (500.00 MiB against "
        "100.00 MiB)."
    )


def test_two_ranks_of_which_one_leaks_are_that_and_neither_is_odd_by_its_peak() -> None:
    leaking = summary(0, {10: 100}, cause=Cause.LEAK, summary="A line keeps memory.")

    result = report(leaking, summary(1, {10: 500}))

    assert (result.odd, result.verdict.cause) == ((), Cause.LEAK)


def test_halves_of_equal_size_differ_and_neither_is_odd() -> None:
    result = report(*(summary(i, {10: 100 if i < 4 else 500}) for i in range(8)))

    assert result.odd == ()
    assert result.verdict.summary.endswith(
        "Two groups of equal size differ, and neither is odd: ranks 4-7 against ranks 0-3: 400.00 "
        "MiB more at train.py:10 in f10 (500.00 MiB against 100.00 MiB)."
    )


def test_failing_minority_that_is_alike_is_odd_as_a_group() -> None:
    result = report(*(summary(i) for i in range(6)), failed(6, {10: 500}), failed(7, {10: 500}))

    assert [o.label for o in result.odd] == ["rank 6", "rank 7"]
    assert "Ranks 6 and 7 are odd" in result.verdict.summary


def test_rank_that_fails_with_the_memory_of_the_others_is_said_to() -> None:
    result = report(*(summary(i) for i in range(4)), failed(4, fleets.USUAL))

    assert result.verdict.summary.startswith(
        "Rank 4 is odd: it fails with the same memory as the others."
    )


def test_unreadable_rank_is_a_row_and_is_counted() -> None:
    result = report(*(summary(i) for i in range(3)), unread(3))

    assert [(row.label, row.group) for row in result.rows] == [
        ("rank 0", "A"),
        ("rank 1", "A"),
        ("rank 2", "A"),
        ("rank 3", ""),
    ]
    assert result.verdict.summary.endswith("1 rank could not be read.")


def test_skew_is_exact_and_names_the_rank() -> None:
    result = report(*(summary(i, {10: 100}) for i in range(3)), summary(3, {10: 150}))

    peak = result.skew[0]
    assert (peak.name, peak.n, peak.median, peak.maximum) == (
        "peak_allocated_bytes",
        4,
        100 * MIB,
        150 * MIB,
    )
    assert (peak.over_median, peak.label, peak.n_highest) == (1.5, "rank 3", 1)


def test_ranks_without_any_figure_are_grouped_by_their_verdict() -> None:
    ranks = [
        RankSummary(path=f"{i}.log", rank=i, cause=Cause.CAPACITY, has_failed=True)
        for i in range(3)
    ]

    assert groups(report(*ranks)) == [("rank 0", "rank 1", "rank 2")]


def test_same_rank_twice_is_told_apart_by_its_path() -> None:
    result = report(
        replace(summary(0), path="iter1/rank0.pickle"),
        replace(summary(0), path="iter2/rank0.pickle"),
    )

    assert [row.label for row in result.rows] == [
        "rank 0 (iter1/rank0.pickle)",
        "rank 0 (iter2/rank0.pickle)",
    ]


def test_group_ids_go_on_after_z() -> None:
    assert [group_id(i) for i in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]


@st.composite
def jobs(draw: st.DrawFn) -> list[RankSummary]:
    """Return jobs of a few shapes, with gaps and continua between the ranks."""
    ranks: list[RankSummary] = []
    for i in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 9)) == 0:
            ranks.append(unread(i))
            continue
        held = {line: draw(st.sampled_from([0, 30, 31, 64, 500])) for line in (10, 20)}
        made = summary(i, {k: v for k, v in held.items() if v})
        if draw(st.integers(0, 4)) == 0:
            made = replace(made, cause=Cause.CAPACITY, has_failed=True, failed_us=WALL_US + i % 2)
        ranks.append(made)
    return ranks


@given(jobs(), st.integers(0, 1000))
def test_report_does_not_depend_on_the_order(ranks: list[RankSummary], seed: int) -> None:
    shuffled = random.Random(seed).sample(ranks, len(ranks))

    assert conclude(fleet_of(shuffled)) == conclude(fleet_of(ranks))


@given(jobs())
def test_each_read_rank_is_in_one_group_and_not_all_are_odd(ranks: list[RankSummary]) -> None:
    result = conclude(fleet_of(ranks))

    grouped = [path for g in result.groups for path in g.paths]
    assert sorted(grouped) == sorted(r.path for r in ranks if r.is_read)
    assert {o.rank.path for o in result.odd} == {row.rank.path for row in result.rows if row.is_odd}
    assert not result.groups or not all(g.is_odd for g in result.groups)
    assert all(g.reference for g in result.groups if g.is_odd)
    assert (result.verdict.n_ranks, result.verdict.n_read) == (len(ranks), len(grouped))


def test_capacity_that_differs_is_told() -> None:
    def on(rank: int, gib: int) -> RankSummary:
        made = failed(rank, fleets.USUAL)
        figures = DeviceFigures(0, peak_allocated_bytes=made.peak_bytes, capacity_bytes=gib << 30)
        return replace(made, figures=figures)

    usual = [replace(on(i, 80), has_failed=False, cause=Cause.HEALTHY) for i in range(4)]

    kinds = [d.kind for d in odd_group(report(*usual, on(4, 40))).differences]
    assert DifferenceKind.CAPACITY in kinds


@st.composite
def ragged(draw: st.DrawFn) -> list[RankSummary]:
    """Return ranks whose lines are few or beyond the list, even or dominated by one."""
    ranks = []
    for i in range(draw(st.integers(2, 9))):
        n = draw(st.sampled_from([2, 3, 6, MAX_HOLDERS + 1]))
        held = {k: draw(st.sampled_from([20, 21, 24, 400])) for k in range(1, n)}
        ranks.append(summary(i, held))
    return ranks


def are_near(low: int | None, high: int | None) -> bool:
    if low is None or high is None:
        return low is high
    return high - low <= max(1, TOLERANCE * high)


@given(ragged(), st.sampled_from([1, 3, grouping.MAX_COLUMNS]))
def test_groups_are_what_comparing_all_pairs_finds(ranks: list[RankSummary], width: int) -> None:
    profiles = sorted(profiles_of(ranks), key=lambda s: (-1 if s.peak is None else s.peak, s.paths))
    parent = list(range(len(profiles)))
    for i, j in itertools.combinations(range(len(profiles)), 2):
        if (
            profiles[i].kind == profiles[j].kind
            and are_near(profiles[i].peak, profiles[j].peak)
            and are_alike(profiles[i], profiles[j])
        ):
            parent = [parent[i] if p == parent[j] else p for p in parent]
    by_all_pairs = {
        frozenset(
            path for s, p in zip(profiles, parent, strict=True) if p == root for path in s.paths
        )
        for root in parent
    }

    with mock.patch.object(grouping, "MAX_COLUMNS", width):
        found = find_groups(ranks)

    assert {frozenset(g) for g in found} == by_all_pairs


@pytest.mark.slow
@pytest.mark.parametrize("n_lines", [8, 400])
def test_thousands_of_ranks_that_all_differ_are_concluded_in_seconds(n_lines: int) -> None:
    rng = random.Random(1)
    lines = range(1, n_lines)
    ranks = [
        summary(i, {k: rng.randrange(20, 300) for k in rng.sample(lines, 7)}) for i in range(3000)
    ]
    start = time.process_time()

    result = report(*ranks)

    assert len(result.groups) > 100
    assert time.process_time() - start < 6
