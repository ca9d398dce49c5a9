"""The whole analysis of one device."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor._native._ext import return_free_memory
from fragdoctor.analysis.attribution import find_holders, frame_classes, user_frames
from fragdoctor.analysis.capture_quality import capture_quality
from fragdoctor.analysis.columns import DeviceColumns, device_columns
from fragdoctor.analysis.flushes import find_flushes
from fragdoctor.analysis.free_space import free_space
from fragdoctor.analysis.growth import GrowthResult, find_growth
from fragdoctor.analysis.layout import final_layout
from fragdoctor.analysis.ooms import find_ooms
from fragdoctor.analysis.phases import find_phases
from fragdoctor.analysis.pinned_segments import find_pinned_segments
from fragdoctor.analysis.pins import find_pins
from fragdoctor.analysis.result import DeviceAnalysis, OomEvent
from fragdoctor.analysis.sizes import size_diversity
from fragdoctor.analysis.steps import find_steps
from fragdoctor.analysis.timeline import Undone, undo
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import BlockState, Snapshot

# Columns of a trace as long as this leave tens of megabytes behind, worth the time to return them.
LONG_TRACE_EVENTS: Final = 1_000_000


def analyze_devices(
    snapshot: Snapshot, settings: AllocatorSettings | None = None
) -> tuple[DeviceAnalysis, ...]:
    """Return the analysis of every device of the snapshot, in their order."""
    return tuple(analyze_device(snapshot, device, settings) for device in snapshot.devices)


def analyze_device(
    snapshot: Snapshot,
    device: int,
    settings: AllocatorSettings | None = None,
    undone: Undone | None = None,
) -> DeviceAnalysis:
    """Return what the columns say about one device.

    Args:
        snapshot: the columns of a file.
        device: number of the device; one that the file does not know gives zeros.
        settings: what the allocator ran under; the recorded settings where None.
        undone: what undoing the trace tells, where the caller has it.
    """
    settings = snapshot.settings if settings is None else settings
    result = _analyzed(snapshot, device, settings, undone)
    if result.n_events >= LONG_TRACE_EVENTS:
        return_free_memory()
    return result


def _analyzed(
    snapshot: Snapshot, device: int, settings: AllocatorSettings, undone: Undone | None
) -> DeviceAnalysis:
    columns = device_columns(snapshot, device)
    undone = undo(columns, settings) if undone is None else undone
    layout = final_layout(columns, settings, undone)
    capture = capture_quality(snapshot, columns, undone)
    classes = frame_classes(snapshot)
    lines = user_frames(snapshot, classes)
    timeline = undone.timeline if capture.has_trace else None
    peak = None if timeline is None else int(timeline.allocated_bytes.argmax())
    ooms = find_ooms(snapshot, columns, settings, undone)
    flushes = find_flushes(columns, settings, undone)
    growth = GrowthResult((), 0, 0)
    if timeline is not None:
        steps = find_steps(snapshot, undone.lifetimes, columns.n_events, classes)
        growth = find_growth(undone.lifetimes, timeline, steps, lines, columns.first_row)
    pinned, n_pinned = find_pinned_segments(layout)
    state = columns.block_state
    active = int(columns.block_size[state != BlockState.INACTIVE].sum())
    requested = int(columns.block_requested[state != BlockState.INACTIVE].sum())
    return DeviceAnalysis(
        device=device,
        n_events=columns.n_events,
        n_segments=len(columns.seg_address),
        n_blocks=len(columns.block_address),
        reserved_bytes=int(columns.seg_size.sum()),
        allocated_bytes=int(columns.block_size[state == BlockState.ALLOCATED].sum()),
        active_bytes=active,
        requested_bytes=requested,
        expandable_bytes=int(columns.seg_size[columns.seg_is_expandable].sum()),
        free_space=free_space(layout, snapshot.pools, [int(s) for s in snapshot.streams]),
        capture=capture,
        timeline=timeline,
        peak_row=None if not peak else columns.first_row + peak - 1,
        pins=find_pins(layout, undone.lifetimes),
        holders=find_holders(layout, undone.lifetimes, peak, lines),
        growth=growth.lines,
        sizes=size_diversity(columns),
        ooms=ooms,
        flushes=flushes.runs,
        n_inferred_retries=flushes.n_retries,
        capacity_estimate_bytes=_capacity(ooms),
        requested_waste_bytes=_waste(columns, active, requested),
        extras={
            "n_steps": float(growth.n_steps),
            "floor_slope_bytes": float(growth.floor_slope_bytes),
        },
        pinned_segments=pinned,
        n_pinned_segments=n_pinned,
        phases=None if timeline is None else find_phases(snapshot, columns, undone, classes, lines),
    )


def _capacity(ooms: tuple[OomEvent, ...]) -> int | None:
    """Return what PyTorch could have, at the last OOM that says how much the driver had free."""
    for oom in reversed(ooms):
        if oom.device_free_bytes is not None:
            return oom.device_free_bytes + oom.reserved_bytes
    return None


def _waste(columns: DeviceColumns, active: int, requested: int) -> int | None:
    """Return active - requested bytes; None where the file has no requested sizes (before 2.0)."""
    if not len(columns.block_address) or not np.any(columns.block_requested):
        return None
    return max(0, active - requested)
