"""Each out-of-memory event with the state of the device at that moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.analysis.columns import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, DeviceColumns
from fragdoctor.analysis.free_space import free_parts
from fragdoctor.analysis.layout import Layout, final_layout, large_page_bytes, layout_at
from fragdoctor.analysis.result import OomEvent
from fragdoctor.analysis.timeline import Undone
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Action, Snapshot
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


def find_ooms(
    snapshot: Snapshot, columns: DeviceColumns, settings: AllocatorSettings, undone: Undone
) -> tuple[OomEvent, ...]:
    """Return the last ``MAX_OOMS`` OOM events, oldest first.

    The last event of a file that was written at the OOM has the recorded layout; earlier ones have
    the undone one, the last ``MAX_LAYOUTS`` of them.
    """
    rows = np.flatnonzero(columns.action == Action.OOM)[-MAX_OOMS:]
    quiet = (Action.SNAPSHOT, Action.OOM, Action.ANNOTATE, Action.OTHER)
    acts = np.flatnonzero(~np.isin(columns.action, quiet))
    last_act = int(acts[-1]) if len(acts) else -1
    events = []
    for i, row in enumerate(rows.tolist()):
        is_final = row > last_act
        layout = None
        if is_final:
            layout = final_layout(columns, settings, undone)
        elif i >= len(rows) - MAX_LAYOUTS:
            layout = layout_at(columns, settings, undone, row)
        is_last = is_final and row == int(rows[-1])
        event = _event(snapshot, columns, undone, row, settings)
        if layout is not None:
            event = _with_layout(event, columns, row, layout)
        events.append(replace(event, is_last_row=is_last))
    return tuple(events)


def _event(
    snapshot: Snapshot,
    columns: DeviceColumns,
    undone: Undone,
    row: int,
    settings: AllocatorSettings,
) -> OomEvent:
    rounded = int(snapshot.events.size_bytes[columns.first_row + row])
    stream = int(columns.stream[row])
    timeline = undone.timeline
    return OomEvent(
        row=columns.first_row + row,
        rounded_bytes=rounded,
        segment_bytes=segment_bytes(rounded, settings, expandable=settings.expandable_segments),
        device_free_bytes=snapshot.oom_free_bytes.get(columns.first_row + row),
        allocated_bytes=int(timeline.allocated_bytes[row]),
        active_bytes=int(timeline.active_bytes[row]),
        reserved_bytes=int(timeline.reserved_bytes[row]),
        stack=int(columns.stack[row]),
        stream=int(snapshot.streams[stream]) if stream >= 0 else 0,
        is_last_row=False,
        message_bytes=segment_bytes(rounded, settings, expandable=False),
    )


def _with_layout(event: OomEvent, columns: DeviceColumns, row: int, layout: Layout) -> OomEvent:
    """Add what only the layout at that moment tells."""
    parts = free_parts(layout)
    private_free = int(parts.free_by_segment[layout.seg_is_private].sum())
    stream, pool = int(columns.stream[row]), int(columns.pool[row])
    return replace(
        event,
        largest_free_block_bytes=_largest_usable(layout, event.rounded_bytes, stream, pool),
        pinned_free_bytes=int(parts.free_by_segment.sum()) - parts.releasable_bytes - private_free,
    )


def _largest_usable(layout: Layout, rounded: int, stream: int, pool: int) -> int:
    """Return the largest free block of the request's pool, class and stream."""
    seg = layout.free_segment
    usable = (
        (layout.seg_is_small[seg] == (rounded <= SMALL_REQUEST_BYTES))
        & (layout.seg_stream[seg] == stream)
        & (layout.seg_pool[seg] == pool)
    )
    return int(layout.free_size[usable].max(initial=0))
