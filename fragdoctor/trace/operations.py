"""The trace of one device as the allocator's operations, and the state before its first event.

Recording may begin late or lose its oldest entries, so the state at the first event is found by
undoing the trace from the final segments. The work is native (``_native/trace_undo.cpp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.errors import SimulationError
from fragdoctor.model.hooks import tell
from fragdoctor.model.settings import AllocatorSettings, Era
from fragdoctor.model.snapshot import I32, I64, U8, U64, Action, Bools, Snapshot
from fragdoctor.trace.allocator import native_config

U32 = npt.NDArray[np.uint32]

ABSURD_BYTES = 2**56  # no device has 64 PiB
OPERATION = np.dtype(
    {
        "names": [name for name, _, _ in _ext.OP_FIELDS],
        "formats": [form for _, form, _ in _ext.OP_FIELDS],
        "offsets": [offset for _, _, offset in _ext.OP_FIELDS],
        "itemsize": _ext.OP_BYTES,
    }
)
"""One request, laid out as the native core has it."""


@dataclass(frozen=True)
class UndoneTrace:
    """A device before the first event of its trace, and the totals after every event.

    What has a value for every event is computed when it is asked for.

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
        reserved_rows, reserved_steps_bytes: the segment events, ascending, and reserved memory
            after each of them.
        peak_active_bytes, peak_reserved_bytes: highest totals, the initial state included.
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
    trace: _ext.NativeTrace
    reserved_rows: U32
    reserved_steps_bytes: I64
    peak_active_bytes: int
    peak_reserved_bytes: int
    initial_allocated_bytes: int
    initial_active_bytes: int
    initial_reserved_bytes: int
    allocated_error_bytes: int
    active_error_bytes: int
    reserved_error_bytes: int
    contradictions: Mapping[str, int]

    @cached_property
    def event_block_bytes(self) -> U64:
        """``uint64[n]``: size of the block an ``alloc`` or ``free_*`` row is about, else 0."""
        return self.trace.totals("event_block_bytes")

    @cached_property
    def allocated_bytes(self) -> I64:
        """``int64[n]``: allocated memory after each event."""
        return self.trace.totals("allocated_bytes")

    @cached_property
    def active_bytes(self) -> I64:
        """``int64[n]``: active memory after each event."""
        return self.trace.totals("active_bytes")

    @cached_property
    def reserved_bytes(self) -> I64:
        """``int64[n]``: reserved memory after each event."""
        return self.trace.totals("reserved_bytes")

    def reserved_after(self, rows: I64) -> I64:
        """Return reserved memory after each of some events."""
        steps = np.concatenate(([self.initial_reserved_bytes], self.reserved_steps_bytes))
        result: I64 = steps[np.searchsorted(self.reserved_rows, rows, side="right")]
        return result


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
    rows = snapshot.events.device_slice(device)
    events, segments, blocks = snapshot.events, snapshot.segments, snapshot.blocks
    own = np.nonzero(segments.device == device)[0]
    n_streams, n_pools = len(snapshot.streams), len(snapshot.pools)
    used_streams = _used(n_streams, events.stream[rows], segments.stream[own])
    used_pools = _used(n_pools, events.pool[rows], segments.pool[own])
    order = np.argsort(snapshot.streams[used_streams], kind="stable")
    stream_of_rank = used_streams[order].astype(np.int32)
    rank = np.zeros(n_streams + 1, np.int32)  # the last entry stands for id -1
    rank[stream_of_rank] = np.arange(len(stream_of_rank), dtype=np.int32)
    pool_of_number, number = _pool_numbers(snapshot.pools, used_pools)
    own_blocks = np.isin(blocks.segment, own.astype(np.int32)) if len(own) else slice(0, 0)
    segment_pool = number[segments.pool[own]]
    native = {
        "action": events.action[rows],
        "address": events.address[rows],
        "size": events.size_bytes[rows],
        "stream": _renumbered(events.stream[rows], rank, used_streams),
        "pool": _renumbered(events.pool[rows], number, used_pools),
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


def _renumbered(column: I32, number: I32, used: npt.NDArray[np.int64]) -> I32:
    """Return ``number[column]``; the column itself, not a copy, where every number stays."""
    keeps_unknown = number[-1] == -1 or column.min(initial=0) >= 0
    if keeps_unknown and np.array_equal(number[used], used):
        return column
    return number[column]


def _used(n: int, *columns: I32) -> npt.NDArray[np.int64]:
    """Return which of n ids occur in any of the columns, ascending."""
    is_used = np.zeros(n + 1, np.bool_)
    for column in columns:
        is_used[column] = True
    return np.nonzero(is_used[:-1])[0]


def _pool_numbers(pools: npt.NDArray[np.int64], used: npt.NDArray[np.int64]) -> tuple[I32, I32]:
    """Return pool index by native number, and native number by pool index (last: -1, unknown)."""
    is_default = (pools == 0).all(axis=1)
    number = np.zeros(len(pools) + 1, np.int32)
    number[-1] = -1
    private = used[~is_default[used]]
    number[private] = np.arange(1, len(private) + 1, dtype=np.int32)
    default = np.nonzero(is_default)[0]
    first = int(default[0]) if len(default) else -1
    return np.concatenate(([first], private)).astype(np.int32), number


def bounded(settings: AllocatorSettings) -> AllocatorSettings:
    """Return recorded settings with numbers that no allocator has brought into 64 bits."""
    split = settings.max_split_bytes
    return replace(
        settings,
        backend="native",
        max_split_bytes=None if split is None or split >= ABSURD_BYTES else split,
        max_non_split_rounding_bytes=min(settings.max_non_split_rounding_bytes, ABSURD_BYTES),
        large_segment_bytes=min(settings.large_segment_bytes, ABSURD_BYTES),
        roundup_power2_divisions=tuple(min(d, 2**31) for d in settings.roundup_power2_divisions),
    )


class OpKind(IntEnum):
    """What the allocator is asked to do."""

    MALLOC = 0
    FREE = 1
    FREE_PENDING = 2
    COMPLETE = 3
    EMPTY_CACHE = 4
    POOL_DROP = 5
    POOL_RELEASE = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class Operations:
    """The trace as requests to the allocator, n of them, in order.

    They stay in the memory of the native core, or in one array of the same layout (``OPERATION``),
    since a long trace has millions of them. Its fields:

        kind: ``uint8[n]``, an ``OpKind``.
        size: ``uint64[n]``, bytes asked for; for FAILED the rounded size.
        allocation: ``uint32[n]``, which allocation it is about: blocks that were there before the
            trace first, in order of address, then requests in order. 0 where there is none.
        row: ``uint32[n]``, event of the device it comes from.
        stream, pool: ``uint16[n]``, in the numbering of the native core.
    """

    table: npt.NDArray[np.void]

    @classmethod
    def of(cls, operations: _ext.NativeOps) -> Operations:
        """Return operations of the native core, to read."""
        return cls(operations.table().view(OPERATION))

    def native(self, base: _ext.NativeOps) -> _ext.NativeOps:
        """Return these as operations of the native core, from the same start as ``base``.

        Raises:
            ValueError: one of them is out of range.
        """
        self.table.setflags(write=False)  # checked once, then trusted
        return base.edited(self.table.view(np.uint8))

    def with_size(self, size: U64) -> Operations:
        """Return them with other sizes."""
        table = self.table.copy()
        table["size"] = size
        return Operations(table)

    @property
    def kind(self) -> U8:
        """An ``OpKind`` each."""
        return self.table["kind"]

    @property
    def size(self) -> U64:
        """Bytes asked for."""
        return self.table["size"]

    @property
    def allocation(self) -> U32:
        """Which allocation each is about."""
        return self.table["allocation"]

    @property
    def row(self) -> U32:
        """Event that each comes from."""
        return self.table["row"]

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True)
class PreparedTrace:
    """A device's trace with all that follows from it before any choice; shared by all replays.

    Attributes:
        trace: the native trace.
        undone: state before the first event and totals after each.
        oom_rows: rows (of the device) of requests that failed.
        oom_capacity_bytes: per such row, what PyTorch could have then: driver-free plus reserved;
            -1 where the file does not say.
    """

    snapshot: Snapshot
    device: int
    settings: AllocatorSettings
    columns: DeviceColumns
    trace: _ext.NativeTrace
    undone: UndoneTrace
    oom_rows: I64
    oom_capacity_bytes: I64

    @property
    def n_events(self) -> int:
        """Number of events of the device."""
        return len(self.columns.native["action"])

    @cached_property
    def n_requests(self) -> int:
        """Number of requests, failed ones included."""
        action = self.columns.native["action"]
        return int(np.count_nonzero((action == Action.ALLOC) | (action == Action.OOM)))

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest reserved memory that the file shows, the initial state included."""
        return self.undone.peak_reserved_bytes

    @property
    def peak_active_bytes(self) -> int:
        """Highest active memory that the file shows: no allocator can reserve less."""
        return self.undone.peak_active_bytes


def prepare(
    snapshot: Snapshot, device: int, settings: AllocatorSettings | None = None
) -> PreparedTrace:
    """Return the trace of a device, undone and ready for any number of replays.

    Args:
        snapshot: any snapshot.
        device: the device's number.
        settings: that the file was recorded under; the snapshot's own where None.

    Raises:
        SimulationError: the trace has more streams and pools than a genuine one can have.
    """
    tell("Undoing the trace")
    settings = bounded(settings or snapshot.settings)
    columns = device_columns(snapshot, device)
    try:
        trace = _ext.NativeTrace(**columns.native, config=native_config(settings, era=Era.ADDRESS))
    except ValueError as error:
        raise SimulationError(f"The trace cannot be replayed: {error}.") from error
    undone = _undone(trace, columns)
    rows = snapshot.events.device_slice(device)
    oom_rows = np.nonzero(columns.native["action"] == Action.OOM)[0].astype(np.int64)
    free = [snapshot.oom_free_bytes.get(int(row) + rows.start, -1) for row in oom_rows]
    capacity = [
        f + reserved if 0 <= f < ABSURD_BYTES else -1
        for f, reserved in zip(free, undone.reserved_after(oom_rows).tolist(), strict=True)
    ]
    return PreparedTrace(
        snapshot,
        device,
        settings,
        columns,
        trace,
        undone,
        oom_rows,
        np.array(capacity, np.int64),
    )


def undo(snapshot: Snapshot, device: int, settings: AllocatorSettings | None = None) -> UndoneTrace:
    """Return the state before a device's first event and the totals after each event.

    Args:
        snapshot: any snapshot; one without a trace gives its final state as the initial one.
        device: the device's number.
        settings: under which sizes were rounded; the snapshot's own where None.

    Raises:
        SimulationError: the trace has more streams and pools than a genuine one can have.
    """
    return prepare(snapshot, device, settings).undone


def _undone(trace: _ext.NativeTrace, columns: DeviceColumns) -> UndoneTrace:
    raw = trace.undone()
    raw["segment_stream"] = columns.stream_of_rank[raw["segment_stream"]]
    raw["segment_pool"] = columns.pool_of_number[raw["segment_pool"]]
    flags = ("segment_is_small", "segment_is_expandable", "block_is_pending", "block_size_is_known")
    for name in flags:
        raw[name] = raw[name].view(np.bool_)
    return UndoneTrace(**raw, trace=trace)
