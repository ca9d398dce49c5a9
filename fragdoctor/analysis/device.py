"""The whole analysis of one device: how complete its recording is, and why its cache was flushed.

A trace has no marker for a flush. Four things give memory back: a retry (the driver refused a new
segment, so the allocator returned everything free and asked again), the garbage collection of
``garbage_collection_threshold``, the oversize blocks that ``max_split_size_mb`` returns before a
full flush, and ``torch.cuda.empty_cache()``. A run of returned segments is classified like this:

- After a retry or a collection, the same malloc call goes on to a ``segment_alloc``, a
  ``segment_map`` or an ``oom``; after ``empty_cache()``, anything may follow.
- A retry means that the driver refused. If PyTorch held as much as was reserved before the run plus
  the new segment at another time in the same trace, the driver would not have refused, so the run
  was ``empty_cache()`` or a collection.
- A run that left whole free segments was a collection or, without a threshold but with a
  ``max_split_size``, the search for one large block; a retry returns every free segment.

An ``empty_cache()`` right before an allocation that needs a new segment on a nearly full device
looks exactly like a retry and is called one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.attribution import find_stranders
from fragdoctor.analysis.free_space import find_ooms, free_space
from fragdoctor.analysis.growth import StepEnds, find_growth
from fragdoctor.analysis.kept import find_idle_graph, find_kept
from fragdoctor.analysis.phase_memory import find_phases
from fragdoctor.analysis.result import (
    CaptureQuality,
    DeviceAnalysis,
    Flush,
    KeptPattern,
    OomEvent,
    SizeDiversity,
)
from fragdoctor.future.steps import Steps, evaluation_rounds
from fragdoctor.model.arrays import is_among, sum_by
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I32, I64, Action, BlockState, Bools, Snapshot
from fragdoctor.trace.lives import BEFORE
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace, return_free_memory
from fragdoctor.units import format_count, format_size, plural

NO_STACKS: Final = "No stacks were recorded: memory cannot be traced to source lines."


def capture_quality(trace: Trace) -> CaptureQuality:
    """Return what the file lacks, judging by the problems met while undoing the trace."""
    has_trace = _has_trace(trace)
    lives = trace.lives
    initial = lives.start == BEFORE if has_trace else np.zeros(len(lives), np.bool_)
    initial_bytes = int(lives.size_bytes[initial].sum())
    missing = tuple(trace.missing) if has_trace else ()
    why = _truncation(trace) if has_trace else ""
    tiling = _tiling_errors(trace)
    counts = dict(trace.contradictions)
    consistent = not counts
    counts.pop("completed_unrequested", None)
    n_bad = sum(counts.values()) if has_trace else 0
    share = _share_with_stacks(trace)
    notes = [
        *([NO_STACKS] if share == 0 and (len(trace.blocks) or trace.n_events) else []),
        *([] if has_trace else ["The file has no event trace: no peaks, no history, no replay."]),
        *([why] if why else []),
    ]
    if initial_bytes and not why:
        notes.append(
            f"Recording began late: {format_size(initial_bytes)} was live before the first event."
        )
    if missing:
        notes.append(f"Events are missing from the trace: {', '.join(missing)}.")
    if n_bad and not missing:
        events = plural(n_bad, "event contradicts", "events contradict")
        notes.append(f"{events} the final state.")
    if tiling:
        notes.append(
            f"In {plural(tiling, 'segment')} the blocks do not tile the segment: "
            "not written by the native allocator."
        )
    return CaptureQuality(
        has_trace=has_trace,
        has_stacks=share,
        is_late_start=bool(initial.any()),
        is_truncated=bool(why),
        missing_actions=missing,
        n_contradictions=n_bad,
        is_consistent=consistent,
        tiling_errors=tiling,
        initial_live_bytes=initial_bytes,
        notes=tuple(notes),
    )


def _has_trace(trace: Trace) -> bool:
    """Return whether there is a history; with ``enabled="state"``, a single event is kept."""
    n_acts = int(np.count_nonzero(trace.events.action != Action.SNAPSHOT))
    if n_acts == 1 and trace.n_events == 1:
        return len(trace.lives) <= 1
    return n_acts > 0


def _truncation(trace: Trace) -> str:
    """Return the evidence that the trace was cut by a full ring buffer, or "" without any.

    A ring buffer keeps the newest events, so a cut trace begins with blocks that are already live.
    A late start looks the same, but a full buffer holds exactly as many events as the user chose
    for ``max_entries``.
    """
    n = trace.n_events
    if not (trace.lives.start == BEFORE).any():
        return ""
    counts = np.diff(trace.snapshot.events.offsets)
    twins = int(np.count_nonzero(counts == n))
    if not _is_round(n) and twins < 2:
        return ""
    where = "" if _is_round(n) else f" on each of {twins} devices"
    return (
        f"The trace is probably cut: {format_count(n)} events{where} look like a full ring buffer."
    )


def _is_round(n: int) -> bool:
    """Return whether a person might choose this ``max_entries``: 8000, 100000, 65536."""
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


def _tiling_errors(trace: Trace) -> int:
    """Return the number of segments whose blocks do not tile them."""
    segments, blocks = trace.segments, trace.blocks
    n = len(segments)
    if not n:
        return 0
    count = np.bincount(blocks.segment, minlength=n)
    total = sum_by(blocks.segment, blocks.size_bytes, n)
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


RETRY, COLLECTION, EMPTY_CACHE, MAX_SPLIT = "retry", "gc", "empty_cache", "max_split"
MAX_FLUSHES: Final = 10_000
# The most flushes to check for whole free segments; each check goes through all segments.
MAX_CHECKED: Final = 200


def find_flushes(trace: Trace) -> tuple[tuple[Flush, ...], int]:
    """Return the runs of returned memory with their likely cause, oldest first, and the retries.

    Retries are counted as in ``num_alloc_retries``: one for each ``oom``, and one for each run with
    the cause ``retry`` that new memory follows. (A retry that had nothing to return and succeeded
    anyway leaves no trace.)
    """
    runs = _runs(trace)
    n_ooms = int(np.count_nonzero(trace.events.action == Action.OOM))
    if not len(runs.first):
        return (), n_ooms
    reserved = trace.totals.at(runs.first)[:, 2]
    refused = reserved + runs.next_bytes > trace.totals.peak_reserved_bytes
    is_partial = runs.is_new & _is_partial(trace, runs)
    is_retry = runs.is_oom | (runs.is_new & refused & ~is_partial)
    n_retries = n_ooms + int(np.count_nonzero(is_retry & runs.is_new))
    partial = COLLECTION if trace.settings.garbage_collection_threshold > 0 else MAX_SPLIT
    cause = np.where(is_retry, RETRY, np.where(is_partial, partial, EMPTY_CACHE))
    kept = range(max(0, len(cause) - MAX_FLUSHES), len(cause))
    flushes = (
        Flush(int(runs.first[i]), int(runs.last[i]), int(runs.released[i]), str(cause[i]))
        for i in kept
    )
    return tuple(flushes), n_retries


class _Runs(Struct, frozen=True):
    """Runs of releases: first and last row, bytes, and the kind and size of the next event."""

    first: I64
    last: I64
    released: I64
    is_new: Bools
    is_oom: Bools
    next_bytes: I64


def _runs(trace: Trace) -> _Runs:
    action, size = trace.events.action, trace.events.size_bytes
    rows = np.flatnonzero((action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP))
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = np.diff(rows) > 1
    first = rows[begins]
    last = rows[np.append(begins[1:], True)] if len(rows) else rows
    released = np.add.reduceat(size[rows], np.flatnonzero(begins)) if len(rows) else rows
    follows = np.minimum(last + 1, max(0, trace.n_events - 1))
    has_next = follows > last
    is_new = (action[follows] == Action.SEGMENT_ALLOC) | (action[follows] == Action.SEGMENT_MAP)
    return _Runs(
        first=first,
        last=last,
        released=released,
        is_new=has_next & is_new,
        is_oom=has_next & (action[follows] == Action.OOM),
        next_bytes=size[follows],
    )


def _is_partial(trace: Trace, runs: _Runs) -> Bools:
    """Return for each run whether it returned less than a full flush would have.

    Two things do that: a collection and, with ``max_split_size``, the search for blocks to return
    before the full flush, which starts with a single block that is large enough.
    """
    settings = trace.settings
    result = np.zeros(len(runs.first), np.bool_)
    if settings.max_split_bytes is not None:
        enough = np.maximum(runs.next_bytes, settings.max_split_bytes)
        result |= (runs.first == runs.last) & (runs.released >= enough)
    elif settings.garbage_collection_threshold <= 0:
        return result
    for i in np.flatnonzero(runs.is_new)[-MAX_CHECKED:].tolist():
        layout = trace.layout_at(int(runs.last[i]) + 1)
        is_free = layout.page_bytes == 0
        is_free[layout.live_segment] = False
        result[i] |= is_free.any()  # whole free segments were left
    return result


# Share of later large requests with a size that is new for their stack. It is 0 in programs with
# constant shapes and nearly 1 in programs with variable shapes.
DRIFT_SHARE: Final = 0.2
MIN_LATER_REQUESTS: Final = 4
MIN_EARLIER_REQUESTS: Final = 2
# Large blocks freed per large request; a program that only builds up frees none.
MIN_FREED_SHARE: Final = 0.1


def analyze_device(snapshot: Snapshot, device: int) -> DeviceAnalysis:
    """Return what the columns say about one device; one that is not in the file gives zeros."""
    return analyze_trace(Trace.of(snapshot, device))


def analyze_trace(trace: Trace) -> DeviceAnalysis:
    """Return what the trace and the final segments of a device say."""
    segments, blocks, layout = trace.segments, trace.blocks, trace.layout
    capture = capture_quality(trace)
    totals = trace.totals if capture.has_trace else None
    ooms = find_ooms(trace)
    flushes, n_retries = find_flushes(trace)
    steps = StepEnds.of(trace) if totals is not None else StepEnds(np.zeros(0, np.int64))
    growth = find_growth(trace, steps)
    phases = None if totals is None else find_phases(trace)
    active = int(blocks.size_bytes[blocks.state != BlockState.INACTIVE].sum())
    end = trace.n_events if trace.n_until_unwound is None else trace.n_until_unwound
    held = active if totals is None else int(totals.active_bytes[end])
    kept = None if totals is None else find_kept(trace, steps, growth, held, phases)
    gathered = idle_graph = None
    if totals is not None and kept is None:
        rounds = StepEnds(evaluation_rounds(trace), in_evaluation=True)
        lines = find_growth(trace, rounds)
        found = find_kept(trace, rounds, lines, held, phases)
        if found is not None and found.pattern is KeptPattern.EVALUATION:
            growth, kept = lines, found  # nobody gathers autograd graphs on purpose
        else:
            gathered = found
            idle_graph = find_idle_graph(trace) if found is None else None
    requested = int(blocks.requested_bytes[blocks.state != BlockState.INACTIVE].sum())
    result = DeviceAnalysis(
        trace=trace,
        device=trace.device,
        n_events=trace.n_events,
        n_segments=len(segments),
        n_blocks=len(blocks),
        reserved_bytes=int(segments.size_bytes.sum()),
        allocated_bytes=int(blocks.size_bytes[blocks.state == BlockState.ALLOCATED].sum()),
        active_bytes=active,
        requested_bytes=requested,
        free_space=free_space(layout),
        capture=capture,
        timeline=totals,
        stranders=find_stranders(trace, layout),
        growth=growth,
        kept=kept,
        gathered=gathered,
        idle_graph=idle_graph,
        sizes=size_diversity(trace),
        ooms=ooms,
        flushes=flushes,
        n_inferred_retries=n_retries,
        capacity_estimate_bytes=_capacity(ooms),
        n_steps=len(Steps.of(trace)) if totals is not None else 0,
        phases=phases,
    )
    return_free_memory(trace)
    return result


def _capacity(ooms: tuple[OomEvent, ...]) -> int | None:
    """Return how much PyTorch could have, by the last OOM that recorded the driver's free bytes."""
    for oom in reversed(ooms):
        if oom.device_free_bytes is not None:
            return oom.device_free_bytes + oom.reserved_bytes
    return None


def size_diversity(trace: Trace) -> SizeDiversity | None:
    """Return the diversity of request sizes, or None if there is no alloc event.

    ``drifting`` looks at the large requests in the second half of the trace, from stacks that made
    at least two in the first half: a fifth or more have a size that is new for their stack. It is
    False if hardly anything is freed, because then no old block waits for a request that fits.
    """
    report_progress("Analyzing: the sizes of requests")
    rows = np.flatnonzero(trace.events.action == Action.ALLOC)
    if not len(rows):
        return None
    size = trace.events.size_bytes[rows]
    large = np.flatnonzero(size > SMALL_REQUEST_BYTES)
    different, kind = np.unique(size[large], return_inverse=True)
    stack = trace.events.stack[rows[large]].astype(np.int64) + 1
    return SizeDiversity(
        n_large_allocs=len(large),
        n_distinct_large=len(different),
        drifting=_frees_enough(trace, len(large)) and _is_drifting(stack, kind),
    )


def _frees_enough(trace: Trace, n_large_allocs: int) -> bool:
    action = trace.events.action
    is_free = (action == Action.FREE_REQUESTED) | (action == Action.FREE_COMPLETED)
    freed = is_free & (trace.events.size_bytes > SMALL_REQUEST_BYTES)
    return bool(np.count_nonzero(freed) >= MIN_FREED_SHARE * n_large_allocs)


def _is_drifting(stack: I64, kind: I64) -> bool:
    """Return whether stacks go on to request other sizes (``kind``) than they did at first."""
    if len(stack) < MIN_LATER_REQUESTS:
        return False
    half = len(stack) // 2
    known = np.bincount(stack[:half], minlength=int(stack.max()) + 1) >= MIN_EARLIER_REQUESTS
    later = np.flatnonzero(known[stack[half:]]) + half
    if len(later) < MIN_LATER_REQUESTS:
        return False
    key = stack * (int(kind.max()) + 1) + kind
    is_new = ~is_among(key[later], key[:half])
    return bool(np.count_nonzero(is_new) >= max(MIN_LATER_REQUESTS, DRIFT_SHARE * len(later)))
