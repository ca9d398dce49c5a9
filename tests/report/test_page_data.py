from __future__ import annotations

import time

import numpy as np
import pytest
from builders import frame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oom_snapshots import full
from page_blob import decode, decode_array
from page_samples import MIB, frames, named, of_snapshot, tiny
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.model.snapshot import Annotation
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.page.blob import (
    LEFT_OUT,
    MAX_STRINGS,
    MAX_TEXT,
    BlobWriter,
    Sink,
    TextTables,
)
from fragdoctor.report.page.lives_data import groups_of, lives_data, segment_map_data
from fragdoctor.report.page.page import encode_payload, held_at
from fragdoctor.report.page.timeline_data import named_ranges, timeline_data
from fragdoctor.trace.stacks import Stacks
from fragdoctor.trace.trace import Trace


@given(st.lists(st.integers(-(2**52), 2**52)))
def test_blob_array_round_trip_is_exact(values):
    blob = BlobWriter()
    blob.add([7, 7, 7])
    where = blob.add(np.array(values, np.int64))

    head, body = decode(blob.encode({"a": where}))

    assert values == decode_array(body, head["a"]).tolist()


@given(st.text())
def test_blob_text_round_trip_keeps_text(text):
    head, _ = decode(BlobWriter().encode({"text": text}))

    assert text == head["text"]


def walk(n_events: int, seed: int = 1):
    """Return a snapshot of ``n_events`` allocations and frees of random blocks."""
    rng = np.random.default_rng(seed)
    live: list[tuple[int, int]] = []
    events = []
    while len(events) < n_events:
        if live and rng.random() < 0.45:
            address, size = live.pop(int(rng.integers(len(live))))
            event = {"addr": address, "size": size, "stream": 0}
            events += [event | {"action": a} for a in ("free_requested", "free_completed")]
        else:
            size = 512 * int(rng.integers(1, 5000))
            address = (len(events) + 1) * 4 * MIB
            live.append((address, size))
            event = {"action": "alloc", "addr": address, "size": size, "stream": 0}
            events.append(event | {"frames": frames(int(rng.integers(9)))})
    return from_python({"segments": [], "device_traces": [events]})


def timeline_of(snapshot, budget):
    sink = Sink.of(snapshot, Stacks(snapshot))
    analysis = analyze_device(snapshot, 0)
    data = timeline_data(analysis, sink, budget)
    _, body = decode(sink.blob.encode({}))
    return analysis, data, body


def test_timeline_within_budget_is_exact():
    analysis, data, body = timeline_of(walk(400), 1_000_000)

    assert data["bucket"] == 1
    np.testing.assert_array_equal(
        analysis.timeline.allocated_bytes, decode_array(body, data["allocated"])
    )


@pytest.mark.parametrize("budget", [12_000, 3_000, 500])
def test_timeline_beyond_budget_gets_coarser_and_keeps_the_peak(budget):
    analysis, data, body = timeline_of(walk(6000), budget)

    assert data["bucket"] > 1
    high = decode_array(body, data["allocated"])
    low = high - decode_array(body, data["allocated_drop"])
    curve = analysis.timeline.allocated_bytes
    assert curve.max() == high.max()
    assert curve.min() == low.min()
    assert curve[data["peak_state"]] == high[data["peak_state"] // data["bucket"]]


def test_timeline_marks_the_oom_after_its_event():
    snapshot = from_python(tiny())

    _, data, _ = timeline_of(snapshot, 1_000_000)

    assert data["ooms"] == [[8, 64 * MIB, 24 * MIB, ""]]


def test_timeline_names_the_line_of_the_oom():
    snapshot = full(frames=[frame("/a/train.py", 7, "step")])

    _, data, _ = timeline_of(snapshot, 1_000_000)

    assert [mark[3] for mark in data["ooms"]] == ["train.py:7 in step"]


def test_phases_are_found_by_time_and_nest():
    snapshot = from_python(tiny())
    start = 1_700_000_000_000_000
    marks = [(0, "step", "START"), (1500, "inner", "START"), (2500, "inner", "END"),
             (3500, "stray", "END"), (4500, "step", "END"), (5500, "open", "START")]  # fmt: skip
    marked = replace(
        snapshot, annotations=tuple(Annotation(0, start + t, n, s) for t, n, s in marks)
    )

    phases = {p.name: (p.first, p.last, p.depth) for p in named_ranges(marked, 0)}

    assert phases == {"step": (0, 5, 0), "inner": (2, 3, 1), "open": (6, 8, 0)}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10_000), st.sampled_from("ab"),
                          st.sampled_from(["START", "END", "?"])), max_size=40))  # fmt: skip
def test_phases_of_any_annotations_stay_inside_the_trace(marks):
    snapshot = from_python(tiny())
    annotations = tuple(Annotation(0, 1_700_000_000_000_000 + t, n, s) for t, n, s in marks)

    for phase in named_ranges(replace(snapshot, annotations=annotations), 0):
        assert 0 <= phase.first < phase.last <= len(snapshot.events)
        assert phase.depth >= 0


def test_held_at_counts_live_blocks_at_both_moments():
    snapshot = from_python(tiny())
    lives = Trace.of(snapshot, 0).lives

    assert held_at(lives, 3).n_bytes.sum() == 14 * MIB
    assert held_at(lives, 8).n_bytes.sum() == 6 * MIB
    assert held_at(lives, 8).n_blocks.tolist() == [1, 1]


def test_segment_map_marks_stranders_ages_and_stacks():
    snapshot = from_python(tiny())
    sink = Sink.of(snapshot, Stacks(snapshot))

    data = segment_map_data(analyze_device(snapshot, 0), sink, 1000)

    _, body = decode(sink.blob.encode({}))
    read = {k: decode_array(body, v).tolist() for k, v in data.items() if k not in {
        "n_hidden", "hidden_bytes", "n_events", "groups"}}  # fmt: skip
    assert read["block_start"] == [0, 3, 5]
    assert read["state"] == [0, 1, 0, 1, 0]
    assert read["stranders"] == [0, 1, 0, 1, 0]
    assert read["alloc_row"] == [-1, 2, -1, 6, -1]
    assert data["groups"] == [{"kind": "large", "pool": None, "stream": "default"}]


def test_segment_map_over_its_cap_leaves_out_the_least_interesting_and_says_so():
    snapshot = from_python(tiny())
    sink = Sink.of(snapshot, Stacks(snapshot))

    data = segment_map_data(analyze_device(snapshot, 0), sink, 4)

    assert (data["n_hidden"], data["hidden_bytes"]) == (1, 20 * MIB)


@given(st.text(max_size=2000))
def test_text_table_strings_are_short_and_visible(text):
    tables = TextTables()
    tables.string(text.replace("\ud800", ""))

    (shown,) = tables._strings

    assert len(shown) <= MAX_TEXT
    assert shown == escape.visible(shown)


def test_text_tables_that_fill_up_keep_lines_then_say_what_is_left_out():
    event = {"action": "alloc", "size": 512, "stream": 0}
    events = [event | {"addr": 4 * MIB * i, "frames": frames(i, f"{i}.py")} for i in range(60)]
    snapshot = from_python({"segments": [], "device_traces": [events]})
    sink = Sink.of(snapshot, Stacks(snapshot), scale=50 / MAX_STRINGS)
    ids = [sink.stacks.page_stack(int(s)) for s in snapshot.events.stack]

    head = sink.tables.encode(sink.blob)

    _, body = decode(sink.blob.encode({}))
    start = decode_array(body, head["stack_start"])
    depths = np.diff(start)
    assert set(depths.tolist()) == {3, 1}
    assert len(set(ids)) == len(depths)
    assert head["strings"][-2] == LEFT_OUT
    assert ids[-1] == ids[-2] != ids[0]


@pytest.mark.slow
def test_page_of_many_random_events_stays_below_three_megabytes():
    page = render("analyze", "html", of_snapshot(walk(120_000)), RenderOptions())

    assert len(page.encode()) < 3_000_000


def test_blocks_over_time_are_all_there_within_the_budget():
    analysis = analyze_device(walk(4000), 0)
    sink = Sink.of(analysis.trace.snapshot, Stacks(analysis.trace.snapshot))

    data = lives_data(analysis, sink, 1_000_000)

    assert data["complete"]
    assert data["n_left_out"] == 0
    _, body = decode(sink.blob.encode({}))
    born = decode_array(body, data["born"])
    freed = born + decode_array(body, data["kept"])
    size = decode_array(body, data["size"])
    for state in (0, 1, 1000, 3999, 4000):
        is_there = (born <= state) & (state < freed)
        assert size[is_there].sum() == analysis.timeline.allocated_bytes[state]


def test_blocks_beyond_the_budget_lose_the_smallest_and_say_so():
    analysis = analyze_device(walk(4000), 0)
    sink = Sink.of(analysis.trace.snapshot, Stacks(analysis.trace.snapshot))

    data = lives_data(analysis, sink, 4000)

    _, body = decode(sink.blob.encode({}))
    size = decode_array(body, data["size"])
    sizes = np.sort(analysis.trace.lives.size_bytes)
    assert not data["complete"]
    assert data["n_left_out"] == len(sizes) - len(size) > 0
    assert np.sort(size).tolist() == sizes[-len(size) :].tolist()


def test_blocks_that_do_not_add_up_to_the_totals_are_called_incomplete():
    snapshot = tiny()
    events = snapshot["device_traces"][0]
    # The page counts to 2**53 exactly, so it has the size of this block cut, but not the totals.
    events.insert(7, {**events[1], "addr": events[1]["addr"] + 40 * MIB, "size": 2**54})
    analysis = analyze_device(from_python(snapshot), 0)
    sink = Sink.of(analysis.trace.snapshot, Stacks(analysis.trace.snapshot))

    data = lives_data(analysis, sink, 1_000_000)

    assert data["n_left_out"] == 0
    assert not data["complete"]


def test_groups_are_numbered_in_time_that_grows_with_segments_alone():
    """Each CUDA graph may have a pool of its own; looked up one by one, these took a minute."""
    n = 60_000
    start = time.process_time()

    groups, group = groups_of(np.arange(n)[::-1], np.zeros(n, bool), np.zeros(n, np.int32))

    assert time.process_time() - start < 3
    assert len(groups) == n
    assert [groups[number][0] for number in group[:3]] == [n - 1, n - 2, n - 3]


def names_of(diagnosis):
    """Return which name each block of a page has, by kind, and the sizes of the blocks."""
    head, body = decode(encode_payload(diagnosis))
    lives = head["devices"]["0"]["lives"]
    found = {
        kind: [
            ".".join(names["paths"][at - 1]) if at else None
            for at in decode_array(body, names["of"]).tolist()
        ]
        for kind, names in lives["names"].items()
    }
    return found, (decode_array(body, lives["size"]) // MIB).tolist()


def test_each_block_has_its_module_and_its_owner():
    found, sizes = names_of(named())

    assert dict(zip(sizes, found["module"], strict=True)) == {
        12: "layers.6.mlp", 2: "layers.1.mlp", 4: None,
    }  # fmt: skip
    owners = dict(zip(sizes, found["owner"], strict=True))
    assert owners == {12: None, 2: "agent.buffer (list of 3)", 4: None}


def test_names_that_were_not_recorded_are_not_there():
    assert names_of(of_snapshot(from_python(tiny())))[0] == {}


def test_names_of_a_stranger_are_shown_as_they_are_written():
    found, _ = names_of(named("\u202e\x1b[31m"))

    for text in (*found["module"], *found["owner"]):
        assert text is None or (text.isprintable() and "\\u202e" in text)


def test_further_names_are_one(monkeypatch):
    monkeypatch.setattr("fragdoctor.report.page.lives_data.MAX_MODULES", 1)

    found, sizes = names_of(named())

    assert dict(zip(sizes, found["module"], strict=True)) == {
        12: "layers.6.mlp", 2: "further names", 4: None,
    }  # fmt: skip
