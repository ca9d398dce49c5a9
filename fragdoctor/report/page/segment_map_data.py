"""The segment map for the page: every segment as its blocks, in address order, to scale."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.frozen import frozen
from fragdoctor.model.snapshot import BlockState
from fragdoctor.report.page.text_tables import Sink
from fragdoctor.trace.lives import Layout
from fragdoctor.trace.trace import Trace

I64 = npt.NDArray[np.int64]

MAX_BLOCKS: Final = 120_000
"""Blocks on one page (all devices): about 0.4 MB compressed."""


@frozen
class MapBlocks:
    """Blocks of the segments that a map shows, by segment and address.

    Attributes:
        segment: index of each block's segment among those shown.
        row: row of ``Lives``, -1 for free blocks.
        stack: stack id of the allocation, -1 for free blocks and where it was not recorded.
        state: of ``BlockState``.
    """

    segment: I64
    address: npt.NDArray[np.uint64]
    size_bytes: I64
    row: I64
    stack: I64
    state: I64


def shown_segments(layout: Layout, max_blocks: int) -> I64:
    """Return the segments to show, in address order: those with most free space stay first.

    All of them, unless they have more than ``max_blocks`` blocks together.
    """
    n = len(layout.segment_address)
    free = np.zeros(n, np.int64)
    np.add.at(free, layout.free_segment, layout.free_bytes)
    counts = np.bincount(layout.live_segment, minlength=n)
    counts += np.bincount(layout.free_segment, minlength=n)
    by_interest = np.lexsort((-layout.segment_bytes, -free))
    return np.sort(by_interest[np.cumsum(counts[by_interest]) <= max_blocks])


def blocks_of(layout: Layout, segments: I64) -> MapBlocks:
    """Return the blocks of some segments of a layout, live and free ones together."""
    n_free = len(layout.free_segment)
    nothing = np.full(n_free, -1, np.int64)
    pending = layout.live_is_pending
    live_state = np.where(pending, BlockState.PENDING_FREE, BlockState.ALLOCATED)
    segment = np.concatenate((layout.live_segment, layout.free_segment)).astype(np.int64)
    offset = np.concatenate((layout.live_offset, layout.free_offset))
    kept = np.flatnonzero(np.isin(segment, segments))
    kept = kept[np.lexsort((offset[kept], segment[kept]))]
    return MapBlocks(
        segment=np.searchsorted(segments, segment[kept]),
        address=layout.segment_address[segment[kept]] + offset[kept].view(np.uint64),
        size_bytes=np.concatenate((layout.live_bytes, layout.free_bytes))[kept],
        row=np.concatenate((layout.live_row, nothing))[kept],
        stack=np.concatenate((layout.live_stack, nothing))[kept].astype(np.int64),
        state=np.append(live_state, np.full(n_free, BlockState.INACTIVE))[kept].astype(np.int64),
    )


def segment_map_data(
    analysis: DeviceAnalysis, sink: Sink, max_blocks: int
) -> dict[str, Any] | None:
    """Return the JSON part of one device's segment map; None without segments."""
    trace, layout, blob = analysis.trace, analysis.trace.layout, sink.blob
    rows = shown_segments(layout, max_blocks)
    if len(rows) == 0:
        return None
    blocks = blocks_of(layout, rows)
    address = layout.segment_address[rows]
    pools = np.where(layout.is_private[rows], layout.segment_pool[rows], -1)
    keys = group_keys(pools, layout.is_small[rows], layout.segment_stream[rows])
    groups = sorted(set(keys), key=lambda k: (k[0] >= 0, k[0], not k[1], k[2]))
    pinning = np.array([a for pin in analysis.pins for a in pin.addresses], np.uint64)
    counts = np.bincount(blocks.segment, minlength=len(rows))
    lives, known = trace.lives, blocks.row >= 0
    row = np.where(known, blocks.row, 0)
    total = layout.segment_bytes
    return {
        "n_hidden": len(total) - len(rows),
        "hidden_bytes": int(total.sum()) - int(total[rows].sum()),
        "n_events": trace.n_events,
        "groups": describe_groups(trace, groups),
        "group": blob.add([groups.index(key) for key in keys]),
        "address_high": blob.add((address >> np.uint64(32)).astype(np.int64)),
        "address_low": blob.add((address & np.uint64(0xFFFFFFFF)).astype(np.int64)),
        "total": blob.add(total[rows]),
        "page": blob.add(layout.page_bytes[rows]),
        "block_start": blob.add(np.concatenate(([0], np.cumsum(counts)))),
        "size": blob.add(blocks.size_bytes),
        "requested": blob.add(np.where(known, _taken(lives.requested_bytes, row), 0)),
        "state": blob.add(blocks.state),
        "stack": blob.add(sink.stacks.page_stacks(blocks.stack, blocks.size_bytes)),
        "alloc_row": blob.add(np.where(known, _taken(lives.start, row), -1)),
        "pins": blob.add(np.isin(blocks.address, pinning).astype(np.int64)),
    }


def _taken(column: npt.NDArray[Any], rows: I64) -> I64:
    return column[rows].astype(np.int64) if len(column) else np.zeros(len(rows), np.int64)


def group_keys(
    pools: npt.NDArray[Any], is_small: npt.NDArray[np.bool_], streams: npt.NDArray[np.int32]
) -> list[tuple[int, bool, int]]:
    """Return (private pool or -1, is small, stream) of segments: no block moves between these."""
    return list(zip(pools.tolist(), is_small.tolist(), streams.tolist(), strict=True))


def describe_groups(trace: Trace, groups: list[tuple[int, bool, int]]) -> list[dict[str, Any]]:
    """Return what the page says of groups of segments."""
    return [_group(trace, key) for key in groups]


def _group(trace: Trace, key: tuple[int, bool, int]) -> dict[str, Any]:
    pool, is_small, stream = key
    ids = None if pool < 0 else [int(i) for i in trace.snapshot.pools[pool]]
    handle = int(trace.snapshot.streams[stream]) if stream >= 0 else None
    return {
        "kind": "small" if is_small else "large",
        "pool": None if ids is None else f"({ids[0]}, {ids[1]})",
        "stream": "unknown" if handle is None else "default" if handle == 0 else f"{handle:#x}",
    }
