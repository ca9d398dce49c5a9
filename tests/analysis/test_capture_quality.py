from __future__ import annotations

import pytest
from analysis.recordings import recording
from builders import BASE, MIB, block, segment, snapshot
from stock import from_python
from toy_allocator import random_run

from fragdoctor.analysis.device import analyze_device


def quality(data):
    return analyze_device(from_python(data), 0).capture


def test_capture_quality_complete_trace_has_nothing_to_say():
    got = quality(random_run(3, 60).data())

    assert got.has_trace
    assert got.is_consistent
    assert (
        got.is_late_start,
        got.is_truncated,
        got.missing_actions,
        got.n_contradictions,
        got.tiling_errors,
        got.notes,
    ) == (False, False, (), 0, 0, ())


def test_capture_quality_second_half_is_a_late_start():
    toy = random_run(3, 60)

    got = quality(toy.data(first_event=len(toy.events) // 2 + 1))

    assert got.is_late_start
    assert got.initial_live_bytes > 0
    assert got.is_consistent


def test_capture_quality_last_five_hundred_events_look_cut():
    toy = random_run(3, 500)

    got = quality(toy.data(first_event=len(toy.events) - 500))

    assert got.is_truncated
    assert "500 events" in got.notes[-1]


@pytest.mark.parametrize("action", ["alloc", "free_requested", "free_completed"])
def test_capture_quality_skipped_action_is_named(action):
    data = random_run(3, 60).data()
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["action"] != action]

    got = quality(data)

    assert action in got.missing_actions
    assert not got.is_consistent


def test_capture_quality_blocks_that_do_not_tile_are_counted():
    data = snapshot(segment(BASE, block(MIB), block(MIB)))
    data["segments"][0]["blocks"][1]["address"] += 512

    assert quality(data).tiling_errors == 1


def test_capture_quality_no_trace_says_so():
    got = quality(snapshot(segment(BASE, block(2 * MIB))))

    assert not got.has_trace
    assert any("no event trace" in note for note in got.notes)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("healthy_gpt", (True, False, False, ())),
        ("ring_overflow", (True, True, True, ())),
        ("frag_gpt_long_truncated", (True, True, True, ())),
        ("late_start", (True, True, False, ())),
        ("skip_actions", (True, False, False, ("free_requested",))),
        ("state_only", (False, False, False, ())),
        ("no_history", (False, False, False, ())),
    ],
)
def test_capture_quality_recording_is_judged_right(shared, name, expected):
    result = recording(shared / "snapshots" / name)[1][0]

    got = result.capture

    assert expected == (got.has_trace, got.is_late_start, got.is_truncated, got.missing_actions)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["no_context", "no_history"])
def test_capture_quality_recording_without_stacks_has_none(shared, name):
    result = recording(shared / "snapshots" / name)[1][0]

    assert result.capture.has_stacks == 0
