"""The contents of an undone trace: lives of blocks, totals over time, and layouts of the device.

All of it comes from the native core, which undoes a trace once (``undone.h``). Columns that nobody
asks for are never made: a trace of a million events has a third of a million lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.model.arrays import distinct, sum_by
from fragdoctor.model.snapshot import I32, I64, U64, Bools
from fragdoctor.trace.columns import Events, FinalBlocks, FinalSegments

A = TypeVar("A", U64, I64, I32)
DeviceTables = tuple[Events, FinalBlocks, FinalSegments]

BEFORE: Final[int] = _ext.BEFORE
"""The row of anything that happened before the first event."""

NEVER: Final[int] = _ext.NEVER
"""The row of anything that has not happened by the last event."""


class Lives:
    """One row per block that lived at some time.

    Rows before ``n_initial`` are blocks from before the trace, by address; then come the blocks
    that the trace allocates, in its order, up to ``n_regular``. Operations of a replay name their
    block by its row here. Further rows are blocks that do not fit the segments.

    ``start`` is the row of the block's ``alloc`` (``BEFORE``: it was there before the trace),
    ``free`` that of ``free_requested``, ``done`` that of ``free_completed`` (``NEVER``: not by the
    end). Rows count from 0 within the device. In state k (after k events) a block is active iff
    ``start < k <= done``, and allocated iff ``start < k <= free``.

    Attributes:
        start, free, done: ``int32[n]``.
        size_bytes: ``int64[n]``, size of the block (rounded), not of the request.
        block: ``int32[n]``, row of its final block, or -1 if it is gone.
        n_initial, n_regular: see above.
    """

    def __init__(
        self, native: _ext.NativeTrace, tables: DeviceTables, facts: Mapping[str, Any]
    ) -> None:
        columns = native.lives()
        self.start: I32 = columns["start"]
        self.free: I32 = columns["free"]
        self.done: I32 = columns["done"]
        self.size_bytes: I64 = columns["size"]
        self.block: I32 = columns["block"]
        self.n_initial: int = facts["n_initial"]
        self.n_regular: int = facts["n_regular"]
        self._named: I32 = columns["named"]
        self._events, self._blocks, self._segments = tables

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def address(self) -> U64:
        """``uint64[n]``: first byte of each block."""
        return self._gathered(self._events.address, self._blocks.address)

    @cached_property
    def requested_bytes(self) -> I64:
        """``int64[n]``: bytes that the program asked for."""
        requested = self._blocks.requested_bytes
        return self._gathered(self._events.size_bytes, requested, prefer_block=True)

    @cached_property
    def stack(self) -> I32:
        """``int32[n]``: stack ID of the allocation, or -1 if it was not recorded."""
        result = self._gathered(self._events.stack, self._blocks.stack, prefer_block=True)
        # Without the alloc event, the stack of a free says nothing about who allocated the block.
        result[(self._named != self.start) & (self.block < 0)] = -1
        return result

    @cached_property
    def stream(self) -> I32:
        """``int32[n]``: index into ``Snapshot.streams``."""
        segments = self._segments
        return self._gathered(self._events.stream, segments.stream[self._blocks.segment])

    @property
    def survives(self) -> Bools:
        """``bool[n]``: whether each block is allocated at the end."""
        result: Bools = self.free == NEVER
        return result

    def allocated_at(self, k: int) -> I64:
        """Return the rows of the blocks that are allocated after k events."""
        return np.flatnonzero((self.start < k) & (self.free >= k))

    def until(self, end: int | None) -> Lives:
        """Return the lives as if the trace had ended after this many events (None: all of them)."""
        if end is None:
            return self
        other = object.__new__(Lives)
        other.__dict__.update(self.__dict__)
        other.free = np.where(self.free >= end, np.int32(NEVER), self.free)
        other.done = np.where(self.done >= end, np.int32(NEVER), self.done)
        return other

    def _gathered(self, events: A, blocks: A, *, prefer_block: bool = False) -> A:
        """Return for each life the value at its first event, or of its final block."""
        from_block = self._named == NEVER
        if prefer_block:
            from_block |= self.block >= 0
        rows = np.where(from_block, 0, self._named)
        result: Any = events[rows] if len(events) else np.zeros(len(self), blocks.dtype)
        chosen = np.flatnonzero(from_block)
        result[chosen] = blocks[self.block[chosen]]
        return cast("A", result)


def stretch_starts(n_states: int, n_most: int) -> I64:
    """Return the first state of each of at most ``n_most`` stretches of about equal length."""
    starts = np.linspace(0, n_states, min(n_states, n_most), endpoint=False)
    result: I64 = distinct(starts.astype(np.int64))
    return result


class Totals:
    """Allocated, active and reserved bytes in all n_events + 1 states; state 0 is the initial one.

    The three columns are made when first asked for, and kept. Peaks, single states and envelopes do
    not need them.

    Attributes:
        peak_allocated_bytes: the highest value; ``peak_allocated_state`` is the first state with
            it. ``peak_active_bytes`` and ``peak_reserved_bytes`` work likewise.
    """

    def __init__(self, native: _ext.NativeTrace, facts: Mapping[str, Any]) -> None:
        self._native = native
        peaks: list[tuple[int, int]] = [
            facts[name] for name in ("peak_allocated", "peak_active", "peak_reserved")
        ]
        (self.peak_allocated_bytes, self.peak_allocated_state) = peaks[0]
        (self.peak_active_bytes, self.peak_active_state) = peaks[1]
        (self.peak_reserved_bytes, self.peak_reserved_state) = peaks[2]

    @cached_property
    def allocated_bytes(self) -> I64:
        """``int64[n + 1]``: blocks handed out."""
        return self._native.total("allocated_bytes")

    @cached_property
    def active_bytes(self) -> I64:
        """``int64[n + 1]``: blocks handed out or waiting for other streams."""
        return self._native.total("active_bytes")

    @cached_property
    def reserved_bytes(self) -> I64:
        """``int64[n + 1]``: memory held from the driver."""
        return self._native.total("reserved_bytes")

    def reserved_changes(self) -> tuple[I32, I64]:
        """Return the rows of segment events and reserved bytes after each; needs no columns."""
        return self._native.reserved_changes()

    def at(self, states: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ``int64[k, 3]``: allocated, active and reserved bytes in k ascending states."""
        wanted = np.ascontiguousarray(states, np.int64)
        return self._native.totals_at(wanted).reshape(-1, 3)

    def envelope(self, name: str, starts: npt.ArrayLike) -> tuple[I64, I64]:
        """Return the lowest and highest value in stretches of states.

        Args:
            name: ``allocated_bytes``, ``active_bytes`` or ``reserved_bytes``.
            starts: first state of each stretch, strictly ascending; it ends where the next begins.

        Raises:
            ValueError: if the name is not one of these.
        """
        return self._native.envelope(name, np.ascontiguousarray(starts, np.int64))


class Layout(Struct, frozen=True):
    """The device at one moment: segments, live blocks (allocated or pending) and free blocks.

    Segments are sorted by address, blocks by segment and address.

    Attributes:
        segment_address: ``uint64[s]``; ``segment_bytes``: ``int64[s]``.
        segment_stream, segment_pool: ``int32[s]``, indices into the snapshot's tables.
        is_private: whether the segment belongs to a private pool.
        page_bytes: ``int64[s]``: page size of an expandable segment, which returns single pages; 0
            for ordinary segments, which are returned as a whole.
        live_offset, live_bytes: ``int64[b]``; offsets are from the beginning of the segment.
        live_segment, free_segment: index of the segment.
        live_row: row of ``Lives``, or -1 if unknown.
    """

    segment_address: U64
    segment_bytes: I64
    segment_stream: I32
    segment_pool: I32
    is_small: Bools
    is_private: Bools
    page_bytes: I64
    live_offset: I64
    live_bytes: I64
    live_stack: I32
    live_is_pending: Bools
    live_segment: I32
    live_row: I64
    free_offset: I64
    free_bytes: I64
    free_segment: I32

    @property
    def live_address(self) -> U64:
        """``uint64[b]``: first byte of each live block."""
        result: U64 = self.segment_address[self.live_segment] + self.live_offset.view(np.uint64)
        return result

    @property
    def free_of_segment(self) -> I64:
        """The free bytes of each segment."""
        return sum_by(self.free_segment, self.free_bytes, len(self.segment_address))

    @property
    def reserved_bytes(self) -> int:
        """Sum of the segments' sizes."""
        return int(self.segment_bytes.sum())
