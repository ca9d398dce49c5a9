"""One device's rows as signed integers that arithmetic cannot overflow.

Sizes and addresses of a file are ``uint64`` and hostile. The analysis adds and compares them, so
they are clipped once, here: addresses at 2**61, sizes so that the sum over all rows stays below
2**61. Genuine values (addresses below 2**57, sizes below the memory of a device) never reach
either bound; ``n_clipped`` says how many did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I32, I64, U8, U64, Bools, SegmentType, Snapshot
from fragdoctor.units import MIB

MAX_ADDRESS: Final = 2**61
SMALL_SEGMENT_BYTES: Final = 2 * MIB
SMALL_REQUEST_BYTES: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """Events, segments and blocks of one device.

    Events are in file order; row i is row ``first_row + i`` of the snapshot. Segments are sorted
    by address, blocks by address; ``block_segment`` indexes the segments here (-1: none holds it).

    Attributes:
        seg_pool: pool id, the default pool where the file has none.
        default_pool: index of pool (0, 0) in ``Snapshot.pools``, or -1.
        n_clipped: values beyond what arithmetic can hold.
    """

    device: int
    first_row: int
    action: U8
    address: I64
    size: I64
    stream: I32
    stack: I32
    pool: I32
    seg_address: I64
    seg_size: I64
    seg_stream: I32
    seg_pool: I32
    seg_is_small: Bools
    seg_is_expandable: Bools
    seg_source: I64
    block_address: I64
    block_size: I64
    block_requested: I64
    block_state: U8
    block_stack: I32
    block_segment: I64
    default_pool: int
    n_clipped: int

    @property
    def n_events(self) -> int:
        """Number of events of the device."""
        return len(self.action)


def clip(values: U64, limit: int) -> tuple[I64, int]:
    """Return the values as ``int64`` with those above ``limit`` set to it, and their number.

    The result may share memory with ``values``.
    """
    bound = np.uint64(limit)
    if not len(values) or values.max() <= bound:
        return values.view(np.int64), 0  # the same bits: no copy of a million rows
    n_clipped = int(np.count_nonzero(values > bound))
    return np.minimum(values, bound).astype(np.int64), n_clipped


def device_columns(snapshot: Snapshot, device: int) -> DeviceColumns:
    """Return the rows of one device; empty columns for a device that the file does not know."""
    events, segments, blocks = snapshot.events, snapshot.segments, snapshot.blocks
    rows = events.device_slice(device)
    mine = np.flatnonzero(segments.device == device)
    mine = mine[np.argsort(segments.address[mine], kind="stable")]
    rank = np.full(len(segments), -1, np.int64)
    rank[mine] = np.arange(len(mine))
    of_block = rank[blocks.segment] if len(blocks) else np.zeros(0, np.int64)
    own = np.flatnonzero(of_block >= 0)
    own = own[np.argsort(blocks.address[own], kind="stable")]

    n_rows = rows.stop - rows.start + len(mine) + len(own)
    size_limit = MAX_ADDRESS // max(1, n_rows)
    address, clipped_a = clip(events.address[rows], MAX_ADDRESS)
    size, clipped_b = clip(events.size_bytes[rows], size_limit)
    seg_address, clipped_c = clip(segments.address[mine], MAX_ADDRESS)
    seg_size, clipped_d = clip(segments.total_bytes[mine], size_limit)
    block_address, clipped_e = clip(blocks.address[own], MAX_ADDRESS)
    block_size, clipped_f = clip(blocks.size_bytes[own], size_limit)
    block_requested, _ = clip(blocks.requested_bytes[own], size_limit)
    default_pool = _default_pool(snapshot.pools)
    return DeviceColumns(
        device=device,
        first_row=rows.start,
        action=events.action[rows],
        address=address,
        size=size,
        stream=events.stream[rows],
        stack=events.stack[rows],
        pool=_with_default(events.pool[rows], default_pool),
        seg_address=seg_address,
        seg_size=seg_size,
        seg_stream=segments.stream[mine],
        seg_pool=_with_default(segments.pool[mine], default_pool),
        seg_is_small=_is_small(segments.kind[mine], seg_size),
        seg_is_expandable=segments.is_expandable[mine],
        seg_source=mine.astype(np.int64),
        block_address=block_address,
        block_size=block_size,
        block_requested=block_requested,
        block_state=blocks.state[own],
        block_stack=blocks.stack[own],
        block_segment=of_block[own],
        default_pool=default_pool,
        n_clipped=clipped_a + clipped_b + clipped_c + clipped_d + clipped_e + clipped_f,
    )


def _default_pool(pools: I64) -> int:
    found = np.flatnonzero((pools == 0).all(axis=1)) if len(pools) else np.zeros(0, np.int64)
    return int(found[0]) if len(found) else -1


def _with_default(pool: I32, default_pool: int) -> I32:
    if not (pool < 0).any():
        return pool
    return np.where(pool < 0, np.int32(default_pool), pool)


def _is_small(kind: U8, size: I64) -> Bools:
    """Return whether each segment is of the small pool; by size where the file does not say."""
    by_size: Bools = size <= SMALL_SEGMENT_BYTES
    result: Bools = np.where(kind == SegmentType.UNKNOWN, by_size, kind == SegmentType.SMALL)
    return result
