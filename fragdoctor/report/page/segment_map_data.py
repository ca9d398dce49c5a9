"""The segment map for the page: every segment as its blocks, in address order, to scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.snapshot import Action, BlockState, SegmentType, Snapshot
from fragdoctor.report.page.sink import Sink
from fragdoctor.trace.columns import SMALL_SEGMENT_BYTES

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_BLOCKS: Final = 120_000
"""Blocks on one page (all devices): about 0.4 MB compressed."""

KIND_NAMES: Final = {SegmentType.SMALL: "small", SegmentType.LARGE: "large"}


@dataclass(frozen=True, slots=True)
class SegmentSelection:
    """Segment rows of one device that the map shows, and what it leaves out."""

    rows: I64
    n_hidden: int
    hidden_bytes: int


def free_bytes_by_segment(snapshot: Snapshot) -> I64:
    """Return the free bytes of each segment, by its blocks."""
    blocks = snapshot.blocks
    is_free = blocks.state == BlockState.INACTIVE
    free = np.zeros(len(snapshot.segments), np.int64)
    np.add.at(free, blocks.segment[is_free], blocks.size_bytes[is_free].astype(np.int64))
    return free


def select_segments(snapshot: Snapshot, device: int, max_blocks: int) -> SegmentSelection:
    """Return the segments of a device in address order, those with most free space first to stay.

    All of them, unless they have more than ``max_blocks`` blocks together.
    """
    segments = snapshot.segments
    rows = np.nonzero(segments.device == device)[0]
    counts = np.diff(segments.block_offsets)[rows]
    free = free_bytes_by_segment(snapshot)[rows]
    total = segments.total_bytes[rows].astype(np.int64)
    by_interest = np.lexsort((-total, -free))
    fits = np.cumsum(counts[by_interest]) <= max_blocks
    kept, hidden = by_interest[fits], by_interest[~fits]
    kept = kept[np.argsort(segments.address[rows[kept]], kind="stable")]
    return SegmentSelection(rows[kept].astype(np.int64), len(hidden), int(total[hidden].sum()))


def last_alloc_rows(snapshot: Snapshot, device: int, addresses: npt.NDArray[np.uint64]) -> I64:
    """Return the event row (from the device's first) that allocated each address last, or -1."""
    rows = snapshot.events.device_slice(device)
    at = np.nonzero(snapshot.events.action[rows] == Action.ALLOC)[0]
    if len(at) == 0:
        return np.full(len(addresses), -1, np.int64)
    known = snapshot.events.address[rows][at]
    distinct, first = np.unique(known[::-1], return_index=True)
    last = at[::-1][first]
    place = np.minimum(np.searchsorted(distinct, addresses), len(distinct) - 1)
    return np.where(distinct[place] == addresses, last[place], -1)


def segment_map_data(
    snapshot: Snapshot,
    analysis: DeviceAnalysis,
    sink: Sink,
    max_blocks: int,
) -> dict[str, Any] | None:
    """Return the JSON part of one device's segment map; None without segments."""
    chosen = select_segments(snapshot, analysis.device, max_blocks)
    if len(chosen.rows) == 0:
        return None
    segments, blob = snapshot.segments, sink.blob
    rows = chosen.rows
    blocks = _block_rows(snapshot, rows)
    starts = np.concatenate(([0], np.cumsum(np.diff(segments.block_offsets)[rows])))
    address = segments.address[rows]
    return {
        "n_hidden": chosen.n_hidden,
        "hidden_bytes": chosen.hidden_bytes,
        "n_events": analysis.n_events,
        "groups": [_group(snapshot, key) for key in _group_keys(snapshot, rows)],
        "group": blob.add(_group_ids(snapshot, rows)),
        "address_high": blob.add((address >> np.uint64(32)).astype(np.int64)),
        "address_low": blob.add((address & np.uint64(0xFFFFFFFF)).astype(np.int64)),
        "total": blob.add(segments.total_bytes[rows].astype(np.int64)),
        "page": blob.add(_page_bytes(snapshot, rows)),
        "block_start": blob.add(starts),
        **_block_columns(snapshot, analysis, blocks, sink),
    }


def _page_bytes(snapshot: Snapshot, rows: I64) -> I64:
    """Return the page size of expandable segments, 0 for others: whole free pages are returned."""
    segments = snapshot.segments
    by_size = segments.total_bytes[rows] <= np.uint64(SMALL_SEGMENT_BYTES)
    kind = segments.kind[rows]
    is_small = np.where(kind == SegmentType.UNKNOWN, by_size, kind == SegmentType.SMALL)
    large = max(512, min(snapshot.settings.large_segment_bytes, 2**40))
    page = np.where(is_small, SMALL_SEGMENT_BYTES, large)
    return np.where(segments.is_expandable[rows], page, 0).astype(np.int64)


def _block_rows(snapshot: Snapshot, rows: I64) -> I64:
    offsets = snapshot.segments.block_offsets
    ranges = [np.arange(offsets[r], offsets[r + 1]) for r in rows]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def _block_columns(
    snapshot: Snapshot,
    analysis: DeviceAnalysis,
    rows: I64,
    sink: Sink,
) -> dict[str, Any]:
    blocks, blob = snapshot.blocks, sink.blob
    state = blocks.state[rows]
    is_live = state != BlockState.INACTIVE
    stack_ids = np.where(is_live, blocks.stack[rows], -1)
    # Translate the stacks that hold most first: they keep their frames if the tables fill up.
    used, inverse = np.unique(stack_ids, return_inverse=True)
    held = np.bincount(inverse, blocks.size_bytes[rows].astype(float), len(used))
    page_ids = np.full(len(used), -1, np.int64)
    for i in np.argsort(-held):
        page_ids[i] = sink.stacks.page_stack(int(used[i]))
    alloc_row = last_alloc_rows(snapshot, analysis.device, blocks.address[rows])
    requested = np.where(is_live, blocks.requested_bytes[rows], 0).astype(np.int64)
    return {
        "size": blob.add(blocks.size_bytes[rows].astype(np.int64)),
        "requested": blob.add(requested),
        "state": blob.add(state.astype(np.int64)),
        "stack": blob.add(page_ids[inverse]),
        "alloc_row": blob.add(np.where(is_live, alloc_row, -1)),
        "pins": blob.add(_is_pin(snapshot, analysis, rows).astype(np.int64)),
    }


def _is_pin(snapshot: Snapshot, analysis: DeviceAnalysis, rows: I64) -> Bools:
    pinning = [a for pin in analysis.pins for a in pin.addresses]
    return np.isin(snapshot.blocks.address[rows], np.array(pinning, np.uint64))


def _group_keys(snapshot: Snapshot, rows: I64) -> list[tuple[int, int, int]]:
    """Return the distinct (pool, kind, stream) ids: blocks never move between these."""
    return sorted(set(_keys(snapshot, rows)), key=lambda k: (k[0] > 0, k[0], -k[1], k[2]))


def _group_ids(snapshot: Snapshot, rows: I64) -> list[int]:
    place = {key: i for i, key in enumerate(_group_keys(snapshot, rows))}
    return [place[key] for key in _keys(snapshot, rows)]


def _keys(snapshot: Snapshot, rows: I64) -> list[tuple[int, int, int]]:
    segments = snapshot.segments
    pools = [_private_pool(snapshot, int(p)) for p in segments.pool[rows]]
    kinds, streams = segments.kind[rows].tolist(), segments.stream[rows].tolist()
    return list(zip(pools, kinds, streams, strict=True))


def _private_pool(snapshot: Snapshot, pool: int) -> int:
    """Return the pool's id, -1 for the default pool whichever way the file spells it."""
    return -1 if pool < 0 or not snapshot.pools[pool].any() else pool


def _group(snapshot: Snapshot, key: tuple[int, int, int]) -> dict[str, Any]:
    pool, kind, stream = key
    ids = None if pool < 0 else [int(i) for i in snapshot.pools[pool]]
    handle = int(snapshot.streams[stream]) if stream >= 0 else None
    return {
        "kind": KIND_NAMES.get(SegmentType(kind), "unknown"),
        "pool": None if ids is None else f"({ids[0]}, {ids[1]})",
        "stream": "unknown" if handle is None else "default" if handle == 0 else f"{handle:#x}",
    }
