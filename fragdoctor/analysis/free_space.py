"""Free cached memory, split by whether the allocator can give it back by itself.

A flush (before an OOM is raised, and in ``empty_cache()``) returns ordinary segments without a
live block, and in expandable segments the whole pages inside free blocks: 2 MiB pages in the small
pool, 20 MiB ones (``large_segment_size``) in the large pool, the start rounded up and the end
rounded down. Source: CUDACachingAllocator.cpp (``release_blocks``, ``unmap_block``).

A mapped range begins on a page boundary of its reservation, because pages are mapped and unmapped
whole; so its start anchors the page grid.

Segments of private pools (CUDA graphs, ``MemPool``) return only when nobody uses the pool any more,
which no snapshot says: their free bytes are counted apart, never as releasable.

At each out-of-memory event the state of the device at that moment is worked out the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.analysis.result import FreeSpace, OomEvent, PoolFree
from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import sum_by
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I64, Action, Bools
from fragdoctor.trace.columns import SMALL_SEGMENT_BYTES
from fragdoctor.trace.lives import Layout
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace, large_page_bytes
from fragdoctor.units import MIB

MAX_POOLS: Final = 200

MIN_LARGE_BYTES: Final = 10 * MIB
ROUND_LARGE_BYTES: Final = 2 * MIB
# Rebuilding a layout takes time in the number of blocks; a program that catches its OOMs in a loop
# has thousands, and only the last ones explain the end.
MAX_LAYOUTS: Final = 8
MAX_OOMS: Final = 1000


@frozen
class FreeParts:
    """Free bytes by fate. ``releasable_by_segment`` is aligned with the layout's segments."""

    releasable_by_segment: I64
    free_by_segment: I64

    @property
    def releasable_bytes(self) -> int:
        """What a flush returns."""
        return int(self.releasable_by_segment.sum())


def free_parts(layout: Layout) -> FreeParts:
    """Return for each segment its free bytes and those that a flush would return."""
    n = len(layout.segment_address)
    free = np.zeros(n, np.int64)
    np.add.at(free, layout.free_segment, layout.free_bytes)
    page = layout.page_bytes[layout.free_segment]
    low = layout.free_offset
    high = low + layout.free_bytes
    paged = page > 0
    unit = np.where(paged, page, 1)
    whole = np.maximum(0, high // unit * unit - -(-low // unit) * unit)
    releasable = np.zeros(n, np.int64)
    np.add.at(releasable, layout.free_segment[paged], whole[paged])
    is_live = np.zeros(n, np.bool_)
    is_live[layout.live_segment] = True
    ordinary = layout.page_bytes == 0
    releasable[ordinary & ~is_live] = free[ordinary & ~is_live]
    releasable[layout.is_private] = 0
    return FreeParts(releasable, free)


def free_space(layout: Layout, pools: I64, streams: list[int]) -> FreeSpace:
    """Return the free memory of a layout, with its totals per pool and stream.

    ``pools`` and ``streams`` (as plain integers) are those of the snapshot.
    """
    parts = free_parts(layout)
    private: Bools = layout.is_private
    free = int(parts.free_by_segment.sum())
    private_free = int(parts.free_by_segment[private].sum())
    return FreeSpace(
        free_cached_bytes=free,
        releasable_bytes=parts.releasable_bytes,
        stranded_free_bytes=free - parts.releasable_bytes - private_free,
        private_pools_free_bytes=private_free,
        private_pools_reserved_bytes=int(layout.segment_bytes[private].sum()),
        pending_free_bytes=int(layout.live_bytes[layout.live_is_pending].sum()),
        largest_free_block_bytes=int(layout.free_bytes.max(initial=0)),
        by_pool=_by_pool(layout, pools, streams),
    )


def _by_pool(layout: Layout, pools: I64, streams: list[int]) -> tuple[PoolFree, ...]:
    """Return free memory per (pool, class, stream), largest total first."""
    if not len(layout.free_bytes):
        return ()
    seg = layout.free_segment
    keys = np.stack(
        [
            layout.segment_pool[seg].astype(np.int64),
            layout.is_small[seg].astype(np.int64),
            layout.segment_stream[seg].astype(np.int64),
        ],
        axis=1,
    )
    groups, member = np.unique(keys, axis=0, return_inverse=True)
    member = member.reshape(-1)
    total = sum_by(member, layout.free_bytes, len(groups))
    largest = np.zeros(len(groups), np.int64)
    np.maximum.at(largest, member, layout.free_bytes)
    order = np.argsort(-total, kind="stable")[:MAX_POOLS]
    return tuple(
        PoolFree(
            pool_id=_pool_id(pools, int(groups[i, 0])),
            is_small=bool(groups[i, 1]),
            stream=streams[int(groups[i, 2])],
            free_bytes=int(total[i]),
            largest_free_block_bytes=int(largest[i]),
        )
        for i in order
    )


def _pool_id(pools: I64, index: int) -> tuple[int, int]:
    return (int(pools[index, 0]), int(pools[index, 1])) if index >= 0 else (0, 0)


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
        stranded_free_bytes=int(parts.free_by_segment.sum())
        - parts.releasable_bytes
        - private_free,
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
