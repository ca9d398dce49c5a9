"""The data behind the pictures of the text report."""

from __future__ import annotations

from builders import (
    BASE,
    MIB,
    alloc,
    block,
    columns,
    frame,
    free,
    oom,
    segment,
    segment_alloc,
    segment_free,
    snapshot,
)
from oom_snapshots import full

from fragdoctor.diagnosis.figures import MAX_COLUMNS
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis, TimelineStrip
from fragdoctor.report.base import RenderOptions, render

LIVE = "active_allocated"


def diagnosed(*segments: dict[str, object], events: list[dict[str, object]]) -> Diagnosis:
    return diagnose(Case(snapshot=columns(snapshot(*segments, events=events))))


def spiky(n: int, at: int) -> TimelineStrip:
    """Return the strip of n pairs of alloc and free of 2 MiB, but for one of 64 MiB."""
    events = [segment_alloc(BASE, 64 * MIB)]
    for i in range(n):
        size = (64 if i == at else 2) * MIB
        events += [alloc(BASE, size), *free(BASE, size)]
    strip = diagnosed(segment(BASE, block(64 * MIB)), events=events).timeline
    assert strip is not None
    return strip


def test_timeline_strip_keeps_a_peak_of_one_event() -> None:
    for at in (0, 1, 777, 998, 999):
        strip = spiky(1000, at)

        assert len(strip.allocated_bytes) == len(strip.reserved_bytes) == MAX_COLUMNS
        high = [i for i, n in enumerate(strip.allocated_bytes) if n > 2 * MIB]
        assert {strip.allocated_bytes[i] for i in high} == {64 * MIB}
        assert high[0] in range(at * MAX_COLUMNS // 1000 - 1, at * MAX_COLUMNS // 1000 + 2)
        assert strip.peak_bytes == (64 * MIB, 64 * MIB)


def test_timeline_strip_short_trace_is_kept_event_by_event() -> None:
    strip = diagnosed(
        segment(BASE, block(2 * MIB, LIVE), block(18 * MIB)),
        events=[segment_alloc(BASE, 20 * MIB), alloc(BASE, 2 * MIB)],
    ).timeline

    assert strip is not None
    assert strip.allocated_bytes == (0, 0, 2 * MIB)
    assert strip.reserved_bytes == (0, 20 * MIB, 20 * MIB)
    assert (strip.first_bytes, strip.last_bytes) == ((0, 0), (2 * MIB, 20 * MIB))


def test_timeline_strip_marks_stand_in_the_columns_of_their_events() -> None:
    strip = diagnosed(
        segment(BASE, block(20 * MIB, LIVE)),
        events=[
            segment_alloc(BASE, 20 * MIB),
            alloc(BASE, 20 * MIB),
            segment_alloc(BASE * 2, 20 * MIB),
            segment_free(BASE * 2, 20 * MIB),
            oom(64 * MIB, 8 * MIB),
        ],
    ).timeline

    assert strip is not None
    assert (strip.flush_columns, strip.n_flushes) == ((4,), 1)
    assert (strip.oom_columns, strip.n_ooms) == ((5,), 1)
    assert strip.capacity_bytes == 28 * MIB


def test_timeline_strip_is_of_the_device_of_the_verdict() -> None:
    diagnosis = diagnose(Case(snapshot=full(device=1)))

    assert diagnosis.timeline is not None
    assert diagnosis.timeline.device == diagnosis.verdict.device == 1
    assert diagnosis.timeline.n_ooms == len(diagnosis.timeline.oom_columns) == 1


def test_timeline_strip_without_a_trace_is_none() -> None:
    assert diagnosed(segment(BASE, block(2 * MIB, LIVE)), events=[]).timeline is None
    assert diagnose(Case()).timeline is None


def test_segment_reports_count_free_blocks_and_the_largest_hole() -> None:
    one, two = [frame(line=1)], [frame(line=2)]
    diagnosis = diagnosed(
        segment(
            BASE,
            block(MIB, LIVE, frames=one),
            block(MIB, LIVE, frames=one),
            block(2 * MIB),
            block(MIB, "active_pending_free", frames=two),
            block(15 * MIB),
        ),
        segment(BASE * 2, block(20 * MIB, LIVE, frames=two)),
        events=[],
    )

    (report,) = diagnosis.worst_segments

    assert diagnosis.n_stranded_segments == 1
    assert (report.total_bytes, report.free_bytes, report.largest_hole_bytes) == (
        20 * MIB,
        17 * MIB,
        15 * MIB,
    )


def test_blocks_without_a_python_frame_have_no_line_in_holders_and_stranders() -> None:
    engine = [
        frame("??", 0, "torch::unwind::unwind()"),
        frame("/build/clone3.S", 81, "clone3"),
    ]
    size = 64 * MIB
    stranded = segment(BASE, block(MIB, LIVE, frames=engine), block(size - MIB))
    refused = [segment_alloc(BASE, size), alloc(BASE, MIB, frames=engine), oom(size, 0)]

    diagnosis = diagnosed(stranded, events=refused)

    (holder,), (strander,) = diagnosis.holders, diagnosis.stranders
    assert (holder.now_bytes, holder.location) == (MIB, None)
    assert strander.location is None
    texts = [render("analyze", f, diagnosis, RenderOptions()) for f in ("text", "markdown", "html")]
    assert all("(no Python stack)" in shown for shown in texts)
    assert not any("unwind" in shown or "clone3" in shown for shown in texts[:2])
