"""Undoing a trace gives the state before it: cut a complete trace, and nothing may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import without_oldest
from stock import from_python

from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

BASE = 0x7000_0000_0000
INCOMPLETE = {"skip_actions", "no_history", "state_only", "empty"}


def event(action: str, offset: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": BASE + offset, "size": size, "stream": 0}


def segment(*blocks: tuple[int, int, str], kind: str = "large") -> dict[str, Any]:
    return {
        "device": 0,
        "address": BASE,
        "total_size": sum(size for size, _, _ in blocks),
        "stream": 0,
        "segment_type": kind,
        "blocks": [{"size": s, "requested_size": r, "state": state} for s, r, state in blocks],
    }


def snapshot(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> Snapshot:
    return from_python({"segments": segments, "device_traces": [events]})


def undo(given: Snapshot, device: int) -> Trace:
    return Trace.of(given, device)


def totals(trace: Trace) -> list[tuple[int, int, int]]:
    """Return allocated, active and reserved bytes after each event."""
    t = trace.totals
    columns = (t.allocated_bytes[1:], t.active_bytes[1:], t.reserved_bytes[1:])
    return list(zip(*(c.tolist() for c in columns), strict=True))


def recorded_totals(trace: Trace) -> list[int]:
    """Return allocated, active and reserved bytes as the segments of the file say."""
    blocks = trace.blocks
    return [
        int(blocks.size_bytes[blocks.state == BlockState.ALLOCATED].sum()),
        int(blocks.size_bytes[blocks.state != BlockState.INACTIVE].sum()),
        int(trace.segments.size_bytes.sum()),
    ]


def test_undo_alloc_and_free_of_old_block_restores_it() -> None:
    old_freed = [event("free_requested", 0, 3 * MIB), event("free_completed", 0, 3 * MIB)]
    new = event("alloc", 5 * MIB, 4 * MIB - 100)
    given = snapshot(
        [segment((5 * MIB, 0, "inactive"), (4 * MIB, 4 * MIB - 100, "active_allocated"),
                 (11 * MIB, 0, "inactive"))],
        [*old_freed, new],
    )  # fmt: skip

    undone = undo(given, 0)

    assert list(
        zip(
            undone.initial["block_address"].tolist(),
            undone.initial["block_bytes"].tolist(),
            strict=True,
        )
    ) == [(BASE, 3 * MIB)]
    assert undone.initial["block_size_is_known"].tolist() == [False]
    assert totals(undone) == [
        (0, 3 * MIB, 20 * MIB),
        (0, 0, 20 * MIB),
        (4 * MIB, 4 * MIB, 20 * MIB),
    ]
    assert undone.contradictions == {}


def test_undo_old_large_block_with_small_rest_keeps_the_rest() -> None:
    """should_split leaves up to 1 MiB with a block: here the neighbour shows where it ended."""
    given = snapshot(
        [segment((19 * MIB, 0, "inactive"), (MIB, 0, "inactive"))],
        [
            event("alloc", 3 * MIB + 512 * 1024, 4 * MIB),
            event("free_requested", 0, 3 * MIB),
            event("free_completed", 0, 3 * MIB),
            event("free_requested", 3 * MIB + 512 * 1024, 4 * MIB),
            event("free_completed", 3 * MIB + 512 * 1024, 4 * MIB),
        ],
    )

    undone = undo(given, 0)

    assert undone.initial["block_bytes"].tolist() == [3 * MIB + 512 * 1024]
    assert undone.contradictions == {}


def test_undo_segments_that_came_and_went_are_there_when_they_were() -> None:
    given = snapshot(
        [],
        [
            event("segment_free", 0, 20 * MIB),
            event("segment_alloc", 0, 2 * MIB),
            event("segment_free", 0, 2 * MIB),
        ],
    )

    undone = undo(given, 0)

    assert undone.initial["segment_bytes"].tolist() == [20 * MIB]
    assert undone.totals.reserved_bytes[1:].tolist() == [0, 2 * MIB, 0]
    assert undone.contradictions == {}


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([("alloc", 0, 512), ("alloc", 0, 512)], "alloc_over_live"),
        ([("free_requested", 0, 512), ("free_requested", 0, 512)], "free_of_free"),
        ([("alloc", 0, 512), ("free_completed", 0, 512)], "completed_unrequested"),
        ([("segment_free", 0, MIB), ("segment_free", 0, MIB)], "segment_overlap"),
        ([("segment_alloc", 0, MIB)], "segment_absent"),
        ([("free_requested", 0, 512), ("free_completed", 0, 512)], "block_outside_segments"),
        ([("alloc", 0, 512)], "end_differs"),
        ([("alloc", 0, 2**63)], "bad_size"),
    ],
)
def test_undo_contradiction_is_counted(events: list[tuple[str, int, int]], kind: str) -> None:
    undone = undo(snapshot([], [event(*e) for e in events]), 0)

    assert kind in undone.contradictions


def summed(trace: Trace) -> dict[str, list[int]]:
    """Return the totals in every state, summed up from the blocks and segments that lived."""
    lives, segments, n = trace.lives, trace.segment_lives, trace.n_events
    there = {
        "allocated_bytes": (lives.start, lives.free, lives.size_bytes),
        "active_bytes": (lives.start, lives.done, lives.size_bytes),
        "reserved_bytes": (segments.start, segments.done, segments.size_bytes),
    }
    sums = {}
    for name, (first, last, size) in there.items():
        change = np.zeros(n + 2, np.uint64)  # unsigned: the totals of nonsense wrap as well
        with np.errstate(over="ignore"):
            np.add.at(change, np.minimum(first, n) + 1, size.view(np.uint64))
            np.subtract.at(change, np.minimum(last, n) + 1, size.view(np.uint64))
            sums[name] = np.cumsum(change)[: n + 1].view(np.int64).tolist()
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_undo_nonsense_is_survived(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
             "segment_map", "segment_unmap", "oom", "snapshot", "annotate"]  # fmt: skip
    places = [0, 1, 512, 2**20, 2**63, 2**64 - 1 - BASE, 7 * 2**20]
    events = [
        event(names[rng.integers(10)], places[rng.integers(7)], 2 ** int(rng.integers(62)) + 7)
        for _ in range(300)
    ]  # fmt: skip
    given = snapshot([segment((2**60, 1, "active_allocated"), (5, 5, "inactive"))], events)

    undone = undo(given, 0)

    assert undone.contradictions
    assert {name: getattr(undone.totals, name).tolist() for name in summed(undone)} == (
        summed(undone)
    )


@pytest.mark.shared
def test_undo_recording_agrees_with_its_segments(shared: Path) -> None:
    for path in sorted((shared / "snapshots").glob("*/snapshot.pickle")):
        whole = read_snapshot(path)
        for device in whole.devices:
            undone = undo(whole, device)

            end = undone.totals.at([undone.n_events])[0].tolist()
            assert end == recorded_totals(undone), path.parent.name
            if path.parent.name != "skip_actions":
                assert undone.contradictions == {}, path.parent.name


@pytest.mark.shared
def test_undo_cut_trace_has_the_totals_of_the_whole_one(shared: Path) -> None:
    """Block sizes of lost allocations are bounded: one block may be off by less than 1 MiB."""
    for path in sorted((shared / "snapshots").glob("*/snapshot.pickle")):
        if path.parent.name in INCOMPLETE:
            continue
        whole = read_snapshot(path)
        for device in whole.devices:
            expected = undo(whole, device)
            n = expected.n_events
            for n_lost in {n // 4, n // 2, max(0, n - 3)}:
                cut = undo(without_oldest(whole, device, n_lost), device)

                whole_totals, cut_totals = expected.totals, cut.totals
                reserved = whole_totals.reserved_bytes[n_lost:]
                assert reserved.tolist() == cut_totals.reserved_bytes.tolist()
                error = np.abs(whole_totals.active_bytes[n_lost:] - cut_totals.active_bytes)
                assert error.max() <= MIB, (path.parent.name, n_lost)
                assert cut.contradictions == {}
