"""The whole analysis of one device."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor._native._ext import return_free_memory
from fragdoctor.analysis.attribution import find_holders
from fragdoctor.analysis.capture_quality import capture_quality
from fragdoctor.analysis.flushes import find_flushes
from fragdoctor.analysis.free_space import free_space
from fragdoctor.analysis.growth import GrowthResult, find_growth
from fragdoctor.analysis.kept import find_kept
from fragdoctor.analysis.ooms import find_ooms
from fragdoctor.analysis.phases import find_phases
from fragdoctor.analysis.pins import find_pinned_segments, find_pins
from fragdoctor.analysis.result import DeviceAnalysis, OomEvent
from fragdoctor.analysis.sizes import size_diversity
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.trace.steps import Steps
from fragdoctor.trace.trace import Trace

# Columns of a trace as long as this leave tens of megabytes behind, worth the time to return them.
LONG_TRACE_EVENTS: Final = 1_000_000


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
