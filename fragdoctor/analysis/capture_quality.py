"""How much of the story the file holds, each shortcoming with its evidence."""

from __future__ import annotations

import numpy as np

from fragdoctor.analysis.columns import DeviceColumns
from fragdoctor.analysis.lifetimes import BEFORE
from fragdoctor.analysis.result import CaptureQuality
from fragdoctor.analysis.timeline import Undone
from fragdoctor.model.snapshot import I32, Action, BlockState, Snapshot
from fragdoctor.units import format_count, format_size, plural

_IMPLIED = ("alloc", "free_requested", "free_completed")


def capture_quality(snapshot: Snapshot, columns: DeviceColumns, undone: Undone) -> CaptureQuality:
    """Return what the file lacks, from what undoing the trace ran into."""
    has_trace = _has_trace(columns, undone)
    lives = undone.lifetimes
    initial = lives.start == BEFORE if has_trace else np.zeros(len(lives), np.bool_)
    initial_bytes = int(lives.size[initial].sum())
    missing = _missing_actions(undone) if has_trace else ()
    is_truncated, why = _truncation(snapshot, columns, undone, has_trace)
    tiling = _tiling_errors(columns)
    n_bad = (lives.n_contradictions + undone.spans.n_contradictions) if has_trace else 0
    timeline = undone.timeline
    negative = any(
        int(a.min()) < 0
        for a in (timeline.allocated_bytes, timeline.active_bytes, timeline.reserved_bytes)
    )
    consistent = n_bad == 0 and not missing and not negative and not columns.n_clipped
    share = _share_with_stacks(snapshot, columns)
    notes = [
        *_stack_notes(columns, share),
        *([] if has_trace else ["The file has no event trace: no peaks, no history, no replay."]),
        *([why] if why else []),
    ]
    if initial_bytes and not is_truncated:
        notes.append(
            f"Recording began late: {format_size(initial_bytes)} were live before the first event."
        )
    if missing:
        notes.append(f"Events are missing from the trace: {', '.join(missing)}.")
    if n_bad and not missing:
        verb = "contradicts" if n_bad == 1 else "contradict"
        notes.append(f"{plural(n_bad, 'event')} {verb} the final state.")
    if tiling:
        notes.append(
            f"In {plural(tiling, 'segment')} the blocks do not tile the segment: "
            "not written by the native allocator."
        )
    if not undone.is_exact:
        notes.append("Block sizes are approximate: too many blocks crowd the same addresses.")
    return CaptureQuality(
        has_trace=has_trace,
        has_stacks=share,
        is_late_start=bool(initial.any()),
        is_truncated=is_truncated,
        missing_actions=missing,
        n_contradictions=n_bad,
        is_consistent=consistent,
        tiling_errors=tiling,
        initial_live_bytes=initial_bytes,
        notes=tuple(notes),
    )


def _has_trace(columns: DeviceColumns, undone: Undone) -> bool:
    """Return whether there is a history; ``enabled="state"`` keeps a single event of it."""
    n_acts = int(np.count_nonzero(columns.action != Action.SNAPSHOT))
    if n_acts == 1 and columns.n_events == 1:
        return len(undone.lifetimes) <= 1
    return n_acts > 0


def _missing_actions(undone: Undone) -> tuple[str, ...]:
    implied = zip(_IMPLIED, undone.lifetimes.n_missing, strict=True)
    return tuple(name for name, n in implied if n)


def _truncation(
    snapshot: Snapshot, columns: DeviceColumns, undone: Undone, has_trace: bool
) -> tuple[bool, str]:
    """Return whether the trace looks cut by a full ring buffer, and the evidence.

    A ring buffer keeps the newest events, so a cut trace begins in the middle of things: blocks
    live before it. A late start looks the same; what tells them apart is the number of events: of
    a full buffer it is what the user chose as ``max_entries``.
    """
    n = columns.n_events
    if not has_trace or not (undone.lifetimes.start == BEFORE).any():
        return False, ""
    counts = np.diff(snapshot.events.offsets)
    twins = int(np.count_nonzero(counts == n))
    if _is_round(n) or twins > 1:
        how = "a round number" if _is_round(n) else f"the same on {twins} devices"
        return True, (
            f"The trace is probably cut: {format_count(n)} events ({how}) look like a full ring "
            "buffer, and blocks were live before the first of them."
        )
    return False, ""


def _is_round(n: int) -> bool:
    """Return whether a person would write this as ``max_entries``: 8000, 100000, 65536."""
    if n < 100:
        return False
    if n & (n - 1) == 0:
        return True
    digits = str(n).rstrip("0")
    return len(digits) <= 2 and n % 100 == 0


def _share_with_stacks(snapshot: Snapshot, columns: DeviceColumns) -> float:
    """Return the share of live blocks and alloc events that have a stack with a frame."""
    live = columns.block_stack[columns.block_state != BlockState.INACTIVE]
    allocs = columns.stack[columns.action == Action.ALLOC]
    stacks: I32 = np.concatenate([live, allocs])
    if not len(stacks):
        return 0.0
    depth = np.append(np.diff(snapshot.stacks.offsets), 0)  # id -1 reads the 0
    return float(np.count_nonzero(depth[stacks] > 0)) / len(stacks)


def _stack_notes(columns: DeviceColumns, share: float) -> list[str]:
    if not len(columns.block_address) and not columns.n_events:
        return []
    if share == 0:
        return ["No stacks were recorded: memory cannot be traced to source lines."]
    return []


def _tiling_errors(columns: DeviceColumns) -> int:
    """Return the number of segments whose blocks do not tile them."""
    n = len(columns.seg_address)
    if not n:
        return 0
    segment = columns.block_segment
    total, count = np.zeros(n, np.int64), np.bincount(segment, minlength=n)
    np.add.at(total, segment, columns.block_size)
    bad = (total != columns.seg_size) & (count > 0)
    order = np.lexsort((columns.block_address, segment))
    address, size, seg = columns.block_address[order], columns.block_size[order], segment[order]
    expected = np.empty(len(order), np.int64)
    expected[1:] = (address + size)[:-1]
    first = np.ones(len(order), np.bool_)
    first[1:] = seg[1:] != seg[:-1]
    expected[first] = columns.seg_address[seg[first]]
    bad[seg[address != expected]] = True
    return int(np.count_nonzero(bad))
