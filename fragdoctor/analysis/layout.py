"""The device at one moment: segments, live blocks, and the free blocks between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.analysis.columns import SMALL_SEGMENT_BYTES, DeviceColumns
from fragdoctor.analysis.spans import mapped_ranges
from fragdoctor.analysis.timeline import Undone
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, I64, BlockState, Bools


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments, live blocks (allocated or pending) and free blocks, each sorted by address.

    Attributes:
        seg_is_private: the segment belongs to a private pool.
        page_bytes: page of each segment: what an expandable one returns piecewise; 0 for ordinary
            segments, which go as a whole.
        live_segment, free_segment: index of the segment.
        live_life: row of ``Lifetimes`` where it is known, else -1.
    """

    seg_address: I64
    seg_size: I64
    seg_stream: I32
    seg_pool: I32
    seg_is_small: Bools
    seg_is_private: Bools
    page_bytes: I64
    live_address: I64
    live_size: I64
    live_stack: I32
    live_is_pending: Bools
    live_segment: I64
    live_life: I64
    free_address: I64
    free_size: I64
    free_segment: I64

    @property
    def reserved_bytes(self) -> int:
        """Sum of the segments."""
        return int(self.seg_size.sum())


def final_layout(columns: DeviceColumns, settings: AllocatorSettings, undone: Undone) -> Layout:
    """Return the layout that the file holds."""
    live = np.flatnonzero(columns.block_state != BlockState.INACTIVE)
    free = np.flatnonzero(columns.block_state == BlockState.INACTIVE)
    life = np.full(len(columns.block_address), -1, np.int64)
    owners = undone.lifetimes.block
    found = np.flatnonzero(owners >= 0)
    life[owners[found]] = found
    return Layout(
        seg_address=columns.seg_address,
        seg_size=columns.seg_size,
        seg_stream=columns.seg_stream,
        seg_pool=columns.seg_pool,
        seg_is_small=columns.seg_is_small,
        seg_is_private=columns.seg_pool != columns.default_pool,
        page_bytes=_pages(columns.seg_is_expandable, columns.seg_is_small, settings),
        live_address=columns.block_address[live],
        live_size=columns.block_size[live],
        live_stack=columns.block_stack[live],
        live_is_pending=columns.block_state[live] == BlockState.PENDING_FREE,
        live_segment=columns.block_segment[live],
        live_life=life[live],
        free_address=columns.block_address[free],
        free_size=columns.block_size[free],
        free_segment=columns.block_segment[free],
    )


def layout_at(
    columns: DeviceColumns, settings: AllocatorSettings, undone: Undone, k: int
) -> Layout:
    """Return the layout after k events, from the undone trace."""
    spans, lives = undone.spans, undone.lifetimes
    there = np.flatnonzero((spans.start < k) & (spans.done >= k))
    mapped = mapped_ranges(columns, k, large_page_bytes(settings))
    join = np.concatenate
    address = join([spans.address[there], mapped.address])
    order = np.argsort(address, kind="stable")
    expandable = join([np.zeros(len(there), np.bool_), np.ones(len(mapped.address), np.bool_)])
    seg_address = address[order]
    seg_size = join([spans.size[there], mapped.size])[order]
    is_small = join([spans.is_small[there], mapped.is_small])[order]
    pool = join([spans.pool[there], mapped.pool])[order]
    live = lives.active_at(k)
    live, segment = _inside(lives.address[live], seg_address, seg_size, live)
    live_address, live_size = lives.address[live], lives.size[live]
    free_address, free_size, free_segment = _gaps(
        seg_address, seg_size, live_address, live_size, segment
    )
    return Layout(
        seg_address=seg_address,
        seg_size=seg_size,
        seg_stream=join([spans.stream[there], mapped.stream])[order],
        seg_pool=pool,
        seg_is_small=is_small,
        seg_is_private=pool != columns.default_pool,
        page_bytes=_pages(expandable[order], is_small, settings),
        live_address=live_address,
        live_size=live_size,
        live_stack=lives.stack[live],
        live_is_pending=lives.free[live] < k,
        live_segment=segment,
        live_life=live,
        free_address=free_address,
        free_size=free_size,
        free_segment=free_segment,
    )


def large_page_bytes(settings: AllocatorSettings) -> int:
    """Return the page of expandable segments in the large pool, within what can be computed."""
    return min(max(512, settings.large_segment_bytes), 2**40)


def _pages(is_expandable: Bools, is_small: Bools, settings: AllocatorSettings) -> I64:
    page = np.where(is_small, SMALL_SEGMENT_BYTES, large_page_bytes(settings))
    return np.where(is_expandable, page, 0).astype(np.int64)


def _inside(address: I64, seg_address: I64, seg_size: I64, rows: I64) -> tuple[I64, I64]:
    """Return the rows whose address lies in a segment, sorted by address, and their segments."""
    if not len(seg_address) or not len(rows):
        empty = np.zeros(0, np.int64)
        return empty, empty
    segment = np.searchsorted(seg_address, address, side="right") - 1
    fits = (segment >= 0) & (address < (seg_address + seg_size)[segment])
    rows, address, segment = rows[fits], address[fits], segment[fits]
    order = np.argsort(address, kind="stable")
    return rows[order], segment[order]


def _gaps(
    seg_address: I64, seg_size: I64, address: I64, size: I64, segment: I64
) -> tuple[I64, I64, I64]:
    """Return address, size and segment of the space between blocks, sorted by address.

    Each segment contributes the gap before each of its blocks and the one after the last.
    """
    n_segments = len(seg_address)
    of_gap = np.concatenate([segment, np.arange(n_segments)])
    stop = np.concatenate([address, seg_address + seg_size])
    order = np.lexsort((stop, of_gap))
    of_gap, stop = of_gap[order], stop[order]
    block_end = np.concatenate([address + size, np.zeros(n_segments, np.int64)])[order]
    start = np.empty(len(stop), np.int64)
    start[1:] = block_end[:-1]
    first = np.ones(len(stop), np.bool_)
    first[1:] = of_gap[1:] != of_gap[:-1]
    start[first] = seg_address[of_gap[first]]
    free = np.flatnonzero(stop > start)
    free = free[np.argsort(start[free], kind="stable")]
    return start[free], (stop - start)[free], of_gap[free]
