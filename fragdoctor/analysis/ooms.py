"""Each out-of-memory event with the state of the device at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.analysis.free_space import free_parts
from fragdoctor.analysis.result import OomEvent
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.columns import SMALL_SEGMENT_BYTES
from fragdoctor.trace.lives import Layout
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace, large_page_bytes
from fragdoctor.units import MIB

MIN_LARGE_BYTES: Final = 10 * MIB
ROUND_LARGE_BYTES: Final = 2 * MIB
# Rebuilding a layout takes time in the number of blocks; a program that catches its OOMs in a loop
# has thousands, and only the last ones explain the end.
MAX_LAYOUTS: Final = 8
MAX_OOMS: Final = 1000


def segment_bytes(rounded: int, settings: AllocatorSettings, *, expandable: bool) -> int:
    """Return what the driver is asked for to serve a rounded request by new memory.

    ``get_allocation_size`` of CUDACachingAllocator.cpp; with expandable segments whole pages.
    """
    if expandable:
        small = rounded <= SMALL_REQUEST_BYTES
        page = SMALL_SEGMENT_BYTES if small else large_page_bytes(settings)
        return -(-rounded // page) * page
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < MIN_LARGE_BYTES:
        return settings.large_segment_bytes
    return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def find_ooms(trace: Trace) -> tuple[OomEvent, ...]:
    """Return the last ``MAX_OOMS`` OOM events, oldest first.

    The last event of a file that was written at the OOM has the recorded layout; earlier ones have
    the undone one, the last ``MAX_LAYOUTS`` of them.
    """
    rows = trace.oom_rows[-MAX_OOMS:]
    quiet = (Action.SNAPSHOT, Action.OOM, Action.ANNOTATE, Action.OTHER)
    acts = np.flatnonzero(~np.isin(trace.events.action, quiet)) if len(rows) else rows
    last_act = int(acts[-1]) if len(acts) else -1
    totals = trace.totals.at(rows).tolist()
    events = []
    for i, row in enumerate(rows.tolist()):
        is_final = row > last_act
        layout = None
        if is_final:
            layout = trace.layout
        elif i >= len(rows) - MAX_LAYOUTS:
            layout = trace.layout_at(row)
        is_last = is_final and row == int(rows[-1])
        event = _event(trace, row, totals[i])
        if layout is not None:
            event = _with_layout(event, trace, row, layout)
        events.append(replace(event, is_last_row=is_last))
    return tuple(events)


def _event(trace: Trace, row: int, totals: Sequence[int]) -> OomEvent:
    snapshot, settings = trace.snapshot, trace.settings
    rounded = int(snapshot.events.size_bytes[trace.first_row + row])
    stream = int(trace.events.stream[row])
    allocated, active, reserved = totals
    return OomEvent(
        row=trace.first_row + row,
        rounded_bytes=rounded,
        segment_bytes=segment_bytes(rounded, settings, expandable=settings.expandable_segments),
        device_free_bytes=snapshot.oom_free_bytes.get(trace.first_row + row),
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        stack=int(trace.events.stack[row]),
        stream=int(snapshot.streams[stream]) if stream >= 0 else 0,
        is_last_row=False,
        message_bytes=segment_bytes(rounded, settings, expandable=False),
    )


def _with_layout(event: OomEvent, trace: Trace, row: int, layout: Layout) -> OomEvent:
    """Add what only the layout at that moment tells."""
    parts = free_parts(layout)
    private_free = int(parts.free_by_segment[layout.is_private].sum())
    stream, pool = int(trace.events.stream[row]), int(trace.events.pool[row])
    return replace(
        event,
        largest_free_block_bytes=_largest_usable(layout, event.rounded_bytes, stream, pool),
        pinned_free_bytes=int(parts.free_by_segment.sum()) - parts.releasable_bytes - private_free,
    )


def _largest_usable(layout: Layout, rounded: int, stream: int, pool: int) -> int:
    """Return the largest free block of the request's pool, class and stream."""
    segment = layout.free_segment
    usable = (
        (layout.is_small[segment] == (rounded <= SMALL_REQUEST_BYTES))
        & (layout.segment_stream[segment] == stream)
        & (layout.segment_pool[segment] == pool)
    )
    return int(layout.free_bytes[usable].max(initial=0))
