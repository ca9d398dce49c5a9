"""Free cached memory, split by whether the allocator can give it back by itself.

A flush (before an OOM is raised, and in ``empty_cache()``) returns ordinary segments without a
live block, and in expandable segments the whole pages inside free blocks: 2 MiB pages in the small
pool, 20 MiB pages (``large_segment_size``) in the large pool. A free block's start is rounded up to
a page and its end down. Source: CUDACachingAllocator.cpp (``release_blocks``, ``unmap_block``).

A mapped range begins on a page boundary of its reservation, because pages are mapped and unmapped
whole; so its start anchors the page grid.

Segments of private pools (CUDA graphs, ``MemPool``) are returned only once nobody uses the pool,
and no snapshot shows that. Their free bytes are counted separately, never as releasable.

The state of the device at each out-of-memory event is worked out the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.result import FreeSpace, OomEvent
from fragdoctor.model.arrays import sum_by
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Action, Bools
from fragdoctor.trace.columns import SMALL_SEGMENT_BYTES
from fragdoctor.trace.lives import Layout
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace
from fragdoctor.units import MIB

MIN_LARGE_BYTES: Final = 10 * MIB
ROUND_LARGE_BYTES: Final = 2 * MIB
# Rebuilding a layout takes time proportional to the number of blocks. A program that catches its
# OOMs in a loop has thousands of them, and only the last ones explain the end.
MAX_LAYOUTS: Final = 8
MAX_OOMS: Final = 1000
QUIET: Final = (Action.SNAPSHOT, Action.OOM, Action.ANNOTATE, Action.OTHER)
"""Actions that change nothing."""


def free_space(layout: Layout) -> FreeSpace:
    """Return the free memory of a layout."""
    n = len(layout.segment_address)
    free = layout.free_of_segment
    page = layout.page_bytes[layout.free_segment]
    low = layout.free_offset
    high = low + layout.free_bytes
    paged = page > 0
    unit = np.where(paged, page, 1)
    whole = np.maximum(0, high // unit * unit - -(-low // unit) * unit)
    releasable = sum_by(layout.free_segment[paged], whole[paged], n)
    is_whole = layout.page_bytes == 0
    is_whole[layout.live_segment] = False
    releasable[is_whole] = free[is_whole]
    private: Bools = layout.is_private
    releasable[private] = 0
    private_free = _free_in_pools(layout)
    return FreeSpace(
        free_cached_bytes=int(free.sum()),
        releasable_bytes=int(releasable.sum()),
        stranded_free_bytes=int(free.sum() - releasable.sum()) - private_free,
        private_pools_free_bytes=private_free,
        private_pools_reserved_bytes=int(layout.segment_bytes[private].sum()),
        pending_free_bytes=int(layout.live_bytes[layout.live_is_pending].sum()),
        largest_free_block_bytes=int(layout.free_bytes.max(initial=0)),
    )


def segment_bytes(rounded: int, settings: AllocatorSettings) -> int:
    """Return the size of a new segment for a rounded request, unless segments are expandable.

    ``get_allocation_size`` in CUDACachingAllocator.cpp.
    """
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < MIN_LARGE_BYTES:
        return settings.large_segment_bytes
    return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def find_ooms(trace: Trace) -> tuple[OomEvent, ...]:
    """Return the last ``MAX_OOMS`` OOM events, oldest first.

    If the file was written at the OOM, its last OOM event has the recorded layout. The layout at an
    earlier event is rebuilt by undoing later events, for the last ``MAX_LAYOUTS`` OOMs only.
    """
    rows = trace.oom_rows[-MAX_OOMS:]
    acts = np.flatnonzero(~np.isin(trace.events.action, QUIET)) if len(rows) else rows
    last_act = int(acts[-1]) if len(acts) else -1
    totals = trace.totals.at(rows).tolist()
    events = []
    for i, row in enumerate(rows.tolist()):
        layout = None
        if row > last_act:
            layout = trace.layout
        elif i >= len(rows) - MAX_LAYOUTS:
            layout = trace.layout_at(row)
        events.append(_event(trace, row, totals[i], layout))
    return tuple(events)


def _event(trace: Trace, row: int, totals: Sequence[int], layout: Layout | None) -> OomEvent:
    in_file = trace.first_row + row  # which keeps absurd sizes as they are
    rounded = int(trace.snapshot.events.size_bytes[in_file])
    allocated, active, reserved = totals
    return OomEvent(
        row=row,
        rounded_bytes=rounded,
        segment_bytes=segment_bytes(rounded, trace.settings),
        device_free_bytes=trace.snapshot.oom_free_bytes.get(in_file),
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        stack=int(trace.events.stack[row]),
        largest_free_block_bytes=None if layout is None else _largest_usable(trace, row, layout),
        private_pools_free_bytes=0 if layout is None else _free_in_pools(layout),
    )


def _free_in_pools(layout: Layout) -> int:
    return int(layout.free_bytes[layout.is_private[layout.free_segment]].sum())


def _largest_usable(trace: Trace, row: int, layout: Layout) -> int:
    """Return the size of the largest free block in the pool, size class and stream of a request."""
    segment, events = layout.free_segment, trace.events
    usable = (
        (layout.is_small[segment] == (events.size_bytes[row] <= SMALL_REQUEST_BYTES))
        & (layout.segment_stream[segment] == events.stream[row])
        & (layout.segment_pool[segment] == events.pool[row])
    )
    return int(layout.free_bytes[usable].max(initial=0))
