"""How much of the story the file holds, each shortcoming with its evidence."""

from __future__ import annotations

import numpy as np

from fragdoctor.analysis.result import CaptureQuality
from fragdoctor.model.snapshot import I32, Action, BlockState
from fragdoctor.trace.lives import BEFORE
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_count, format_size, plural


def capture_quality(trace: Trace) -> CaptureQuality:
    """Return what the file lacks, from what undoing the trace ran into."""
    has_trace = _has_trace(trace)
    lives = trace.lives
    initial = lives.start == BEFORE if has_trace else np.zeros(len(lives), np.bool_)
    initial_bytes = int(lives.size_bytes[initial].sum())
    missing = tuple(trace.missing) if has_trace else ()
    is_truncated, why = _truncation(trace) if has_trace else (False, "")
    tiling = _tiling_errors(trace)
    counts = dict(trace.contradictions)
    consistent = not counts
    counts.pop("completed_unrequested", None)
    n_bad = sum(counts.values()) if has_trace else 0
    share = _share_with_stacks(trace)
    notes = [
        *_stack_notes(trace, share),
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


def _has_trace(trace: Trace) -> bool:
    """Return whether there is a history; ``enabled="state"`` keeps a single event of it."""
    n_acts = int(np.count_nonzero(trace.events.action != Action.SNAPSHOT))
    if n_acts == 1 and trace.n_events == 1:
        return len(trace.lives) <= 1
    return n_acts > 0


def _truncation(trace: Trace) -> tuple[bool, str]:
    """Return whether the trace looks cut by a full ring buffer, and the evidence.

    A ring buffer keeps the newest events, so a cut trace begins in the middle of things: blocks
    live before it. A late start looks the same; what tells them apart is the number of events: of
    a full buffer it is what the user chose as ``max_entries``.
    """
    n = trace.n_events
    if not (trace.lives.start == BEFORE).any():
        return False, ""
    counts = np.diff(trace.snapshot.events.offsets)
    twins = int(np.count_nonzero(counts == n))
    if _is_round(n) or twins > 1:
        where = "" if _is_round(n) else f" on each of {twins} devices"
        return True, (
            f"The trace is probably cut: {format_count(n)} events{where} look like a full ring "
            "buffer."
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


def _share_with_stacks(trace: Trace) -> float:
    """Return the share of live blocks and alloc events that have a stack with a frame."""
    live = trace.blocks.stack[trace.blocks.state != BlockState.INACTIVE]
    allocs = trace.events.stack[trace.events.action == Action.ALLOC]
    stacks: I32 = np.concatenate([live, allocs])
    if not len(stacks):
        return 0.0
    depth = np.append(np.diff(trace.snapshot.stacks.offsets), 0)  # id -1 reads the 0
    return float(np.count_nonzero(depth[stacks] > 0)) / len(stacks)


def _stack_notes(trace: Trace, share: float) -> list[str]:
    if share == 0 and (len(trace.blocks) or trace.n_events):
        return ["No stacks were recorded: memory cannot be traced to source lines."]
    return []


def _tiling_errors(trace: Trace) -> int:
    """Return the number of segments whose blocks do not tile them."""
    segments, blocks = trace.segments, trace.blocks
    n = len(segments)
    if not n:
        return 0
    total, count = np.zeros(n, np.int64), np.bincount(blocks.segment, minlength=n)
    np.add.at(total, blocks.segment, blocks.size_bytes)
    bad = (total != segments.size_bytes) & (count > 0)
    order = np.lexsort((blocks.address, blocks.segment))
    segment, address = blocks.segment[order], blocks.address[order]
    expected = np.empty(len(order), np.uint64)
    expected[1:] = (address + blocks.size_bytes[order].view(np.uint64))[:-1]
    first = np.ones(len(order), np.bool_)
    first[1:] = segment[1:] != segment[:-1]
    expected[first] = segments.address[segment[first]]
    bad[segment[address != expected]] = True
    return int(np.count_nonzero(bad))
