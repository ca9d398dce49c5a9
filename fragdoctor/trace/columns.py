"""The columns of one device of a snapshot, in the form that the trace and the native core use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.model.snapshot import I32, I64, U8, U64, Bools, SegmentType, Snapshot
from fragdoctor.units import MIB

SMALL_SEGMENT_BYTES: Final = 2 * MIB
MAX_SUM: Final = 2**61
"""The most that the values of a column may add up to; larger values are capped."""


class Events(Struct, frozen=True):
    """The events of one device, in file order; row i is row ``first_row + i`` of the snapshot.

    Sizes larger than any device has are capped, so that sums over all rows stay within 64 bits.
    ``pool`` is the default pool's index if the file does not say.
    """

    action: U8
    address: U64
    size_bytes: I64
    stream: I32
    stack: I32
    pool: I32
    time_us: I64

    def __len__(self) -> int:
        return len(self.action)


class FinalSegments(Struct, frozen=True):
    """The segments at the end of the trace, by address; sizes are capped like those of events."""

    address: U64
    size_bytes: I64
    stream: I32
    pool: I32
    is_small: Bools
    is_expandable: Bools

    def __len__(self) -> int:
        return len(self.address)


class FinalBlocks(Struct, frozen=True):
    """The blocks of these segments, by address; ``segment`` is a row of ``FinalSegments``."""

    address: U64
    size_bytes: I64
    requested_bytes: I64
    state: U8
    stack: I32
    segment: I32

    def __len__(self) -> int:
        return len(self.address)


class DeviceColumns(Struct, frozen=True):
    """One device in the snapshot's numbering.

    The native core has its own: its streams are ranks of the handles, its pools are 0 for the
    default pool and 1, 2, ... for private ones. ``stream_of_rank`` and ``pool_of_number`` map back
    to the snapshot's indices.
    ``default_pool`` is the index of pool (0, 0), or -1.
    """

    events: Events
    segments: FinalSegments
    blocks: FinalBlocks
    stream_of_rank: I32
    pool_of_number: I32
    default_pool: int


def device_columns(snapshot: Snapshot, device: int) -> tuple[DeviceColumns, Mapping[str, Any]]:
    """Return the columns of a device, and those for the native core, in its numbering.

    They are empty if the file does not know the device.
    """
    events, segments, blocks = snapshot.events, snapshot.segments, snapshot.blocks
    rows = events.device_slice(device)
    own = np.flatnonzero(segments.device == device)
    own = own[np.argsort(segments.address[own], kind="stable")]
    place = np.full(len(segments), -1, np.int32)
    place[own] = np.arange(len(own), dtype=np.int32)
    of_block = place[blocks.segment] if len(blocks) else np.zeros(0, np.int32)
    own_blocks = np.flatnonzero(of_block >= 0)
    own_blocks = own_blocks[np.argsort(blocks.address[own_blocks], kind="stable")]

    used_streams = _used(len(snapshot.streams), events.stream[rows], segments.stream[own])
    used_pools = _used(len(snapshot.pools), events.pool[rows], segments.pool[own])
    order = np.argsort(snapshot.streams[used_streams], kind="stable")
    stream_of_rank = used_streams[order].astype(np.int32)
    rank = np.zeros(len(snapshot.streams) + 1, np.int32)  # the last entry stands for ID -1
    rank[stream_of_rank] = np.arange(len(stream_of_rank), dtype=np.int32)
    pool_of_number, number = _pool_numbers(snapshot.pools, used_pools)
    default_pool = int(pool_of_number[0])

    limit = MAX_SUM // max(1, rows.stop - rows.start + len(own) + len(own_blocks))
    native = {
        "action": events.action[rows],
        "address": events.address[rows],
        "size": events.size_bytes[rows],
        "stream": _renumbered(events.stream[rows], rank, used_streams),
        "pool": _renumbered(events.pool[rows], number, used_pools),
        "segment_address": segments.address[own],
        "segment_size": segments.total_bytes[own],
        "segment_stream": rank[segments.stream[own]],
        "segment_pool": np.maximum(number[segments.pool[own]], 0),
        "segment_kind": segments.kind[own],
        "segment_expandable": segments.is_expandable[own].astype(np.uint8),
        "block_address": blocks.address[own_blocks],
        "block_size": blocks.size_bytes[own_blocks],
        "block_requested": blocks.requested_bytes[own_blocks],
        "block_state": blocks.state[own_blocks],
    }
    segment_bytes = _cut(segments.total_bytes[own], limit)
    columns = DeviceColumns(
        events=Events(
            action=events.action[rows],
            address=events.address[rows],
            size_bytes=_cut(events.size_bytes[rows], limit),
            stream=events.stream[rows],
            stack=events.stack[rows],
            pool=_with_default(events.pool[rows], default_pool),
            time_us=events.time_us[rows],
        ),
        segments=FinalSegments(
            address=segments.address[own],
            size_bytes=segment_bytes,
            stream=segments.stream[own],
            pool=_with_default(segments.pool[own], default_pool),
            is_small=_is_small(segments.kind[own], segment_bytes),
            is_expandable=segments.is_expandable[own],
        ),
        blocks=FinalBlocks(
            address=blocks.address[own_blocks],
            size_bytes=_cut(blocks.size_bytes[own_blocks], limit),
            requested_bytes=_cut(blocks.requested_bytes[own_blocks], limit),
            state=blocks.state[own_blocks],
            stack=blocks.stack[own_blocks],
            segment=of_block[own_blocks],
        ),
        stream_of_rank=stream_of_rank,
        pool_of_number=pool_of_number,
        default_pool=default_pool,
    )
    return columns, native


def _cut(values: U64, limit: int) -> I64:
    """Return the values as ``int64``, with those above the limit reduced to it.

    The result may share memory with ``values``.
    """
    bound = np.uint64(limit)
    if not len(values) or values.max() <= bound:
        return values.view(np.int64)  # the same bits: no copy of a million rows
    return np.minimum(values, bound).astype(np.int64)


def _renumbered(column: I32, number: I32, used: npt.NDArray[np.int64]) -> I32:
    """Return ``number[column]``, or the column itself, not a copy, if every number stays."""
    keeps_unknown = number[-1] == -1 or column.min(initial=0) >= 0
    if keeps_unknown and np.array_equal(number[used], used):
        return column
    return number[column]


def _used(n: int, *columns: I32) -> npt.NDArray[np.int64]:
    """Return which of n IDs occur in any of the columns, ascending."""
    is_used = np.zeros(n + 1, np.bool_)
    for column in columns:
        # Most traces know one stream and one pool.
        low, high = column.min(initial=n), column.max(initial=-1)
        is_used[column if low < high else column[:1]] = True
    return np.nonzero(is_used[:-1])[0]


def _pool_numbers(pools: npt.NDArray[np.int64], used: npt.NDArray[np.int64]) -> tuple[I32, I32]:
    """Return pool index by native number, and native number by pool index (last entry: unknown)."""
    is_default = (pools == 0).all(axis=1)
    number = np.zeros(len(pools) + 1, np.int32)
    number[-1] = -1
    private = used[~is_default[used]]
    number[private] = np.arange(1, len(private) + 1, dtype=np.int32)
    default = np.nonzero(is_default)[0]
    first = int(default[0]) if len(default) else -1
    return np.concatenate(([first], private)).astype(np.int32), number


def _with_default(pool: I32, default_pool: int) -> I32:
    if not (pool < 0).any():
        return pool
    return np.where(pool < 0, np.int32(default_pool), pool)


def _is_small(kind: U8, size: I64) -> Bools:
    """Return whether each segment is in the small pool, going by size if the file does not say."""
    by_size: Bools = size <= SMALL_SEGMENT_BYTES
    result: Bools = np.where(kind == SegmentType.UNKNOWN, by_size, kind == SegmentType.SMALL)
    return result
