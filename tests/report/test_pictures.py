"""The picture of the timeline in the text report, and the table of the worst segments."""

from __future__ import annotations

import re

import diagnoses
import pytest
from attacks import ATTACKS, assert_all_seen
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.model.diagnosis import (
    Cause,
    Diagnosis,
    TimelineStrip,
)
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.report.pictures import N_ROWS, resampled, top_bytes
from fragdoctor.units import MIB

ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (60, 80, 120)


def section(text: str, title: str) -> list[str]:
    """Return the lines below a heading, up to the next blank line; [] without it."""
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(title)), None)
    if at is None:
        return []
    end = next((i for i in range(at, len(lines)) if not lines[i]), len(lines))
    return lines[at + 1 : end]


def report(diagnosis: Diagnosis, **options: object) -> str:
    look = RenderOptions(**{"verbosity": Verbosity.FULL, **options})  # type: ignore[arg-type]
    return render("analyze", "text", diagnosis, look)


def picture(diagnosis: Diagnosis, title: str, **options: object) -> list[str]:
    return section(report(diagnosis, **options), title)


def area(lines: list[str]) -> list[str]:
    """Return the cells of the timeline, top line first."""
    axis = re.compile(r"^.*?[|│]")
    return [axis.sub("", line) for line in lines if axis.match(line)]


def with_strip(strip: TimelineStrip | None) -> Diagnosis:
    return replace(diagnoses.fragmentation(), timeline=strip)


def spike(at: int, n: int = 240) -> TimelineStrip:
    """Memory that is at 200 MiB but for one column at 1000 MiB."""
    values = [200 * MIB] * n
    values[at] = 1000 * MIB
    peak = (1000 * MIB, 1000 * MIB)
    return replace(
        diagnoses.strip(),
        allocated_bytes=values,
        reserved_bytes=values,
        peak_bytes=peak,
        capacity_bytes=None,
        oom_columns=(),
        flush_columns=(),
        n_ooms=0,
        n_flushes=0,
    )


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=300), st.integers(1, 120))
def test_resampled_keeps_the_peak_and_every_value_is_real(values: list[int], n: int) -> None:
    shown = resampled(values, n)

    assert len(shown) == n
    assert max(shown) == max(values)
    assert set(shown) <= set(values)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize("at", [0, 1, 119, 120, 238, 239])
def test_timeline_single_spike_reaches_the_top(at: int, unicode: bool, width: int) -> None:
    rows = area(picture(with_strip(spike(at)), "Timeline", width=width, unicode=unicode))

    assert len(rows) == N_ROWS
    full = "█" if unicode else "#"
    top = rows[0]
    assert 1 <= top.count(full) <= 2
    # To scale along the trace, too.
    room = max(len(row) for row in rows)
    assert abs(top.index(full) - at * room / 240) <= 1


@pytest.mark.parametrize("width", WIDTHS)
def test_picture_uses_the_width_and_stays_within_it(width: int) -> None:
    for unicode in (False, True):
        lines = picture(diagnoses.fragmentation(), "Timeline", width=width, unicode=unicode)

        longest = max(len(line) for line in lines)
        assert width - 4 <= longest <= width


@pytest.mark.parametrize("title", ["Timeline", "Segments"])
def test_picture_without_colour_has_no_escape_and_the_same_cells(title: str) -> None:
    plain = picture(diagnoses.fragmentation(), title, unicode=True)
    coloured = report(diagnoses.fragmentation(), unicode=True, color=True)

    assert plain
    assert "\x1b" not in "".join(plain)
    assert section(ANSI.sub("", coloured), title) == plain


@pytest.mark.parametrize("attack", ATTACKS)
def test_pictures_hostile_names_are_all_seen_and_change_no_cell(attack: str) -> None:
    calm = diagnoses.fragmentation()
    hostile = diagnoses.planted(calm, attack)

    text = report(hostile, unicode=True)

    assert_all_seen(text.replace("\n", ""))
    assert len(section(text, "Timeline")) == len(picture(calm, "Timeline", unicode=True))


@pytest.mark.parametrize(
    "strip",
    [
        None,
        replace(diagnoses.strip(), n_events=20),
        replace(diagnoses.strip(), peak_bytes=(0, 0)),
    ],
    ids=["no trace", "few events", "no memory"],
)
def test_timeline_that_says_nothing_is_left_out(strip: TimelineStrip | None) -> None:
    assert picture(with_strip(strip), "Timeline") == []


def test_timeline_marks_stand_below_their_columns() -> None:
    lines = picture(diagnoses.fragmentation(), "Timeline")

    marks = lines[N_ROWS]
    assert marks.strip().replace(" ", "") == "^x"
    assert marks.rstrip().endswith("x")
    assert len(marks) == max(len(line) for line in lines[:N_ROWS])
    assert lines[-1].split()[-6:] == ["x", "1", "OOM", "^", "1", "flush"]


def test_timeline_key_names_the_peaks() -> None:
    lines = picture(diagnoses.fragmentation(), "Timeline")

    assert "# allocated (peak 3.03 GiB)  : reserved (peak 3.33 GiB)" in lines[-1]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (None, 3408 * MIB),
        (3896 * MIB, 3896 * MIB),
        # A curve on the floor of a large device shows nothing; an estimate below the peak is wrong.
        (80 * 1024 * MIB, 3408 * MIB),
        (3000 * MIB, 3408 * MIB),
    ],
)
def test_picture_ends_at_the_capacity_where_that_is_near(
    capacity: int | None, expected: int
) -> None:
    assert top_bytes(replace(diagnoses.strip(), capacity_bytes=capacity)) == expected


def test_pictures_quiet_shows_none() -> None:
    assert report(diagnoses.fragmentation(), verbosity=Verbosity.QUIET).count("\n") == 2


def test_segments_with_little_beside_the_worst_get_no_row() -> None:
    one = diagnoses.fragmentation()
    little = replace(one.worst_segments[1], stranded_bytes=3 * MIB)

    lines = picture(replace(one, worst_segments=(one.worst_segments[0], little)), "Segments")

    assert [line.split() for line in lines[1:]] == [
        ["512.00", "MiB", "412.00", "MiB", "210.00", "MiB"]
    ]


def many(n: int) -> Diagnosis:
    one = diagnoses.fragmentation()
    return replace(one, worst_segments=one.worst_segments[:1] * n, n_stranded_segments=n)


def test_segments_shows_the_five_worst() -> None:
    assert len(picture(many(12), "Segments")) == 1 + 5
    assert picture(many(12), "Segments", verbosity=Verbosity.NORMAL) == []


@pytest.mark.parametrize(
    ("cause", "also", "stranded", "is_shown"),
    [
        (Cause.FRAGMENTATION, (), 1, True),
        (Cause.CAPACITY, (), 662 * MIB, True),
        (Cause.CAPACITY, (Cause.FRAGMENTATION,), 12 * MIB, False),
        (Cause.HEALTHY, (), 12 * MIB, False),
        (Cause.HEALTHY, (Cause.FRAGMENTATION,), 662 * MIB, True),
    ],
)
def test_segments_only_where_stranded_memory_matters(
    cause: Cause, also: tuple[Cause, ...], stranded: int, is_shown: bool
) -> None:
    one = diagnoses.fragmentation()
    diagnosis = replace(
        one,
        verdict=replace(one.verdict, cause=cause, also=also),
        devices=(replace(one.devices[0], stranded_free_bytes=stranded),),
    )

    assert bool(picture(diagnosis, "Segments")) is is_shown
