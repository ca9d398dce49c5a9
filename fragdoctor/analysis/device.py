"""The whole analysis of one device."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor._native._ext import return_free_memory
from fragdoctor.analysis.attribution import find_holders, find_pinned_segments, find_pins
from fragdoctor.analysis.capture_quality import capture_quality
from fragdoctor.analysis.flushes import find_flushes
from fragdoctor.analysis.free_space import find_ooms, free_space
from fragdoctor.analysis.growth import GrowthResult, find_growth
from fragdoctor.analysis.kept import find_kept
from fragdoctor.analysis.phases import find_phases
from fragdoctor.analysis.result import DeviceAnalysis, OomEvent, SizeDiversity
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I64, Action, BlockState, Snapshot
from fragdoctor.trace.steps import Steps
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace

# Columns of a trace as long as this leave tens of megabytes behind, worth the time to return them.
LONG_TRACE_EVENTS: Final = 1_000_000

# Share of later large requests with a size that their stack had never asked for before. Programs
# with constant shapes show 0, those with variable ones nearly 1.
DRIFT_SHARE: Final = 0.2
MIN_LATER_REQUESTS: Final = 4
MIN_EARLIER_REQUESTS: Final = 2
# Large blocks freed per large request; a program that only builds up frees none.
MIN_FREED_SHARE: Final = 0.1


def analyze_device(
    snapshot: Snapshot, device: int, settings: AllocatorSettings | None = None
) -> DeviceAnalysis:
    """Return what the columns say about one device.

    Args:
        snapshot: the columns of a file.
        device: number of the device; one that the file does not know gives zeros.
        settings: what the allocator ran under; the recorded settings where None.
    """
    return analyze_trace(Trace.of(snapshot, device, settings))


def analyze_trace(trace: Trace) -> DeviceAnalysis:
    """Return what the trace of a device, and its final segments, say."""
    result = _analyzed(trace)
    if trace.n_events >= LONG_TRACE_EVENTS:
        return_free_memory()
    return result


def _analyzed(trace: Trace) -> DeviceAnalysis:
    segments, blocks, layout = trace.segments, trace.blocks, trace.layout
    capture = capture_quality(trace)
    totals = trace.totals if capture.has_trace else None
    peak = None if totals is None else totals.peak_allocated_state
    ooms = find_ooms(trace)
    flushes = find_flushes(trace)
    growth = GrowthResult((), 0, 0)
    if totals is not None:
        growth = find_growth(trace, Steps.of(trace))
    phases = None if totals is None else find_phases(trace)
    pinned, n_pinned = find_pinned_segments(layout)
    active = int(blocks.size_bytes[blocks.state != BlockState.INACTIVE].sum())
    requested = int(blocks.requested_bytes[blocks.state != BlockState.INACTIVE].sum())
    streams = [int(s) for s in trace.snapshot.streams]
    return DeviceAnalysis(
        trace=trace,
        device=trace.device,
        n_events=trace.n_events,
        n_segments=len(segments),
        n_blocks=len(blocks),
        reserved_bytes=int(segments.size_bytes.sum()),
        allocated_bytes=int(blocks.size_bytes[blocks.state == BlockState.ALLOCATED].sum()),
        active_bytes=active,
        requested_bytes=requested,
        expandable_bytes=int(segments.size_bytes[segments.is_expandable].sum()),
        free_space=free_space(layout, trace.snapshot.pools, streams),
        capture=capture,
        timeline=totals,
        peak_row=None if not peak else trace.first_row + peak - 1,
        pins=find_pins(trace),
        holders=find_holders(trace, peak),
        growth=growth.lines,
        kept=None if totals is None else find_kept(trace, growth.lines, active, phases),
        sizes=size_diversity(trace),
        ooms=ooms,
        flushes=flushes.runs,
        n_inferred_retries=flushes.n_retries,
        capacity_estimate_bytes=_capacity(ooms),
        requested_waste_bytes=_waste(trace, active, requested),
        n_steps=growth.n_steps,
        floor_slope_bytes=growth.floor_slope_bytes,
        pinned_segments=pinned,
        n_pinned_segments=n_pinned,
        phases=phases,
    )


def _capacity(ooms: tuple[OomEvent, ...]) -> int | None:
    """Return what PyTorch could have, at the last OOM that says how much the driver had free."""
    for oom in reversed(ooms):
        if oom.device_free_bytes is not None:
            return oom.device_free_bytes + oom.reserved_bytes
    return None


def _waste(trace: Trace, active: int, requested: int) -> int | None:
    """Return active - requested bytes; None where the file has no requested sizes (before 2.0)."""
    if not len(trace.blocks) or not np.any(trace.blocks.requested_bytes):
        return None
    return max(0, active - requested)


def size_diversity(trace: Trace) -> SizeDiversity | None:
    """Return the diversity of request sizes, None without any alloc event.

    ``drifting``: of the large requests in the second half of the trace, from stacks that had made
    at least two in the first half, a fifth or more have a size that is new for their stack. Where
    hardly anything is freed no old block waits for a fitting request: that drifts nowhere.
    """
    report_progress("Analysing: the sizes of requests")
    rows = np.flatnonzero(trace.events.action == Action.ALLOC)
    if not len(rows):
        return None
    size = trace.events.size_bytes[rows]
    large = np.flatnonzero(size > SMALL_REQUEST_BYTES)
    return SizeDiversity(
        n_allocs=len(rows),
        n_distinct=len(np.unique(size)),
        n_large_allocs=len(large),
        n_distinct_large=len(np.unique(size[large])),
        drifting=_frees_enough(trace, len(large)) and _is_drifting(trace, rows[large]),
    )


def _frees_enough(trace: Trace, n_large_allocs: int) -> bool:
    action = trace.events.action
    is_free = (action == Action.FREE_REQUESTED) | (action == Action.FREE_COMPLETED)
    freed = is_free & (trace.events.size_bytes > SMALL_REQUEST_BYTES)
    return bool(np.count_nonzero(freed) >= MIN_FREED_SHARE * n_large_allocs)


def _is_drifting(trace: Trace, rows: I64) -> bool:
    if len(rows) < MIN_LATER_REQUESTS:
        return False
    stack = trace.events.stack[rows].astype(np.int64) + 1
    size = trace.events.size_bytes[rows]
    half = len(rows) // 2
    known = np.bincount(stack[:half], minlength=int(stack.max()) + 1) >= MIN_EARLIER_REQUESTS
    later = np.flatnonzero(known[stack[half:]]) + half
    if len(later) < MIN_LATER_REQUESTS:
        return False
    _, kind = np.unique(size, return_inverse=True)
    key = stack * (int(kind.max()) + 1) + kind.reshape(-1)
    is_new = ~np.isin(key[later], key[:half])
    return bool(np.count_nonzero(is_new) >= max(MIN_LATER_REQUESTS, DRIFT_SHARE * len(later)))
