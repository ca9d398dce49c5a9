"""The trace of one device as the allocator's operations, and the state before its first event.

Recording may begin late or lose its oldest entries, so the state at the first event is found by
undoing the trace from the final segments. The work is native (``_native/trace_undo.cpp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, I64, U64, Bools, Snapshot

UNLIMITED_BYTES = 2**64 - 1


@dataclass(frozen=True, slots=True)
class UndoneTrace:
    """A device before the first event of its trace, and the totals after every event.

    n events, s segments and b blocks at the start:

    Attributes:
        segment_address, segment_bytes: ``uint64[s]``, by address; contiguous pages of an
            expandable segment are one row.
        segment_stream: ``int32[s]``, index into ``Snapshot.streams``.
        segment_pool: ``int32[s]``, index into ``Snapshot.pools``, -1 = default pool.
        segment_is_small, segment_is_expandable: ``bool[s]``.
        block_address, block_size, block_requested: ``uint64[b]``, by address; live blocks only.
        block_is_pending: ``bool[b]``, freed before the trace began but waiting for a stream.
        block_size_is_known: ``bool[b]``, False where the size was computed (``round_size``) or
            bounded by the neighbours because the block is gone at the end.
        event_block_bytes: ``uint64[n]``, size of the block an ``alloc`` or ``free_*`` row is
            about, as the allocator rounded it; 0 for other rows.
        allocated_bytes, active_bytes, reserved_bytes: ``int64[n]``, totals after each event.
        initial_allocated_bytes, ...: totals before the first event.
        allocated_error_bytes, ...: last total less what the segments say; 0 where they agree.
        contradictions: kind -> count of what does not fit together; empty for a sound file.
    """

    segment_address: U64
    segment_bytes: U64
    segment_stream: I32
    segment_pool: I32
    segment_is_small: Bools
    segment_is_expandable: Bools
    block_address: U64
    block_size: U64
    block_requested: U64
    block_is_pending: Bools
    block_size_is_known: Bools
    event_block_bytes: U64
    allocated_bytes: I64
    active_bytes: I64
    reserved_bytes: I64
    initial_allocated_bytes: int
    initial_active_bytes: int
    initial_reserved_bytes: int
    allocated_error_bytes: int
    active_error_bytes: int
    reserved_error_bytes: int
    contradictions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """Columns of one device in the numbering of the native core.

    Streams are ranks of the handles; pools are 0 for the default pool, 1.. for private ones.
    ``stream_of_rank`` and ``pool_of_number`` lead back to ids of the snapshot.
    """

    native: Mapping[str, Any]
    stream_of_rank: I32
    pool_of_number: I32


def device_columns(snapshot: Snapshot, device: int) -> DeviceColumns:
    """Return the events, segments and blocks of one device, renumbered."""
    stream_of_rank = np.argsort(snapshot.streams, kind="stable").astype(np.int32)
    rank = np.zeros(len(stream_of_rank) + 1, np.int32)  # the last entry stands for id -1
    rank[stream_of_rank] = np.arange(len(stream_of_rank), dtype=np.int32)
    pool_of_number, number = _pool_numbers(snapshot.pools)
    rows = snapshot.events.device_slice(device)
    events, segments, blocks = snapshot.events, snapshot.segments, snapshot.blocks
    own = np.nonzero(segments.device == device)[0]
    own_blocks = np.isin(blocks.segment, own.astype(np.int32)) if len(own) else slice(0, 0)
    segment_pool = number[segments.pool[own]]
    native = {
        "action": events.action[rows],
        "address": events.address[rows],
        "size": events.size_bytes[rows],
        "stream": rank[events.stream[rows]],
        "pool": number[events.pool[rows]],
        "segment_address": segments.address[own],
        "segment_size": segments.total_bytes[own],
        "segment_stream": rank[segments.stream[own]],
        "segment_pool": np.maximum(segment_pool, 0),
        "segment_kind": segments.kind[own],
        "segment_expandable": segments.is_expandable[own].astype(np.uint8),
        "block_address": blocks.address[own_blocks],
        "block_size": blocks.size_bytes[own_blocks],
        "block_requested": blocks.requested_bytes[own_blocks],
        "block_state": blocks.state[own_blocks],
    }
    return DeviceColumns(native, stream_of_rank, pool_of_number)


def _pool_numbers(pools: npt.NDArray[np.int64]) -> tuple[I32, I32]:
    """Return pool index by native number, and native number by pool index (last: -1, unknown)."""
    is_default = (pools == 0).all(axis=1)
    number = np.full(len(pools) + 1, -1, np.int32)
    private = np.nonzero(~is_default)[0]
    number[:-1] = 0
    number[private] = np.arange(1, len(private) + 1, dtype=np.int32)
    default = np.nonzero(is_default)[0]
    first = int(default[0]) if len(default) else -1
    return np.concatenate(([first], private)).astype(np.int32), number


def native_config(settings: AllocatorSettings) -> _ext.AllocatorConfig:
    """Return the settings as the native model takes them."""
    config = _ext.AllocatorConfig()
    if settings.max_split_bytes is not None:
        config.max_split_bytes = min(settings.max_split_bytes, UNLIMITED_BYTES)
    config.max_non_split_rounding_bytes = min(
        settings.max_non_split_rounding_bytes, UNLIMITED_BYTES
    )
    config.large_segment_bytes = settings.large_segment_bytes
    config.garbage_collection_threshold = settings.garbage_collection_threshold
    config.expandable_segments = settings.expandable_segments
    config.roundup_power2_divisions = [min(d, 2**32 - 1) for d in settings.roundup_power2_divisions]
    return config


def undo(snapshot: Snapshot, device: int, settings: AllocatorSettings | None = None) -> UndoneTrace:
    """Return the state before a device's first event and the totals after each event.

    Args:
        snapshot: any snapshot; one without a trace gives its final state as the initial one.
        device: the device's number.
        settings: under which sizes were rounded; the snapshot's own where None.
    """
    columns = device_columns(snapshot, device)
    trace = _ext.NativeTrace(
        **columns.native, config=native_config(settings or snapshot.settings)
    )
    raw = trace.undone()
    raw["segment_stream"] = columns.stream_of_rank[raw["segment_stream"]]
    raw["segment_pool"] = columns.pool_of_number[raw["segment_pool"]]
    flags = ("segment_is_small", "segment_is_expandable", "block_is_pending", "block_size_is_known")
    for name in flags:
        raw[name] = raw[name].view(np.bool_)
    return UndoneTrace(**raw)
