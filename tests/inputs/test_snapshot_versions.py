"""The version estimate: what each key of a schema proves, and what its absence does."""

from __future__ import annotations

from typing import Any

import pytest
from builders import BASE, alloc, block, event, frame, pickled, segment, settings, small, snapshot

from fragdoctor.inputs.snapshot_reader import estimate_versions, read_snapshot


def versions(data: Any) -> tuple[str, str]:
    provenance = read_snapshot(pickled(data)).provenance
    return provenance.version_low, provenance.version_high


def without(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in keys} for row in rows]


def test_nothing_seen_leaves_both_ends_open():
    shapes = ("top", "segment", "block", "event", "frame")
    tables = {"keys_seen": {s: [] for s in shapes}, "settings": None, "actions_seen": 0}

    assert estimate_versions(tables) == ("", "")


def test_events_with_a_pool_are_2_12_or_later_and_have_no_host_memory_yet():
    assert versions(small()) == ("2.12", "2.14")


def test_host_segments_are_2_15_or_later():
    assert versions(small() | {"host_segments": [], "host_traces": []}) == ("2.15", "")


def test_events_without_a_pool_but_with_metadata_are_2_10_or_2_11():
    data = snapshot(events=without([alloc(BASE, 1)], "pool_id"))

    assert versions(data) == ("2.10", "2.11")


def test_events_without_time_are_older_than_2_2():
    keys = ("time_us", "compile_context", "user_metadata", "pool_id")
    data = snapshot(events=without([alloc(BASE, 1)], *keys))
    for key in ("external_annotations", "allocator_settings"):
        del data[key]

    assert versions(data) == ("2.0", "2.1")


def test_blocks_with_a_history_are_2_0_or_older():
    history = [{"addr": BASE, "real_size": 500, "frames": [frame()]}]
    row = segment(BASE, block(512, "active_allocated", history=history))
    row["blocks"] = without(row["blocks"], "address", "frames", "requested_size")
    rows = without([row], "requested_size", "is_expandable", "segment_pool_id", "frames")

    assert versions(rows) == ("1.12", "1.13")


def test_mapped_ranges_are_2_1_or_later():
    keys = ("time_us", "compile_context", "user_metadata", "pool_id")
    data = snapshot(events=without([event("segment_map", BASE, 1)], *keys))
    for key in ("external_annotations", "allocator_settings"):
        del data[key]

    assert versions(data) == ("2.1", "2.1")


@pytest.mark.parametrize(
    ("key", "low"), [("graph_capture_record_stream_reuse", "2.10"), ("max_round_threshold", "2.15")]
)
def test_settings_prove_a_version(key, low):
    conf = {k: v for k, v in settings().items() if k != "graph_capture_record_stream_reuse"}
    data = snapshot(conf=conf | {key: 1})

    assert versions(data)[0] == low


def test_contradiction_keeps_the_lower_end():
    """A file that nobody's PyTorch writes: the newest key seen is believed."""
    data = snapshot(events=without([alloc(BASE, 1)], "time_us"), host_segments=[])

    low, high = versions(data)

    assert (low, high) == ("2.15", "")
