"""One device's recording, undone once: everything that looks at a trace takes this.

A snapshot holds the segments at its end and the events that led there. ``Trace.of`` undoes the
events in the native core (``undone.h``) and keeps the result; lives of blocks, totals, layouts,
steps and operations are all answers of the one ``Trace``. Nothing else undoes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.hooks import tell
from fragdoctor.model.settings import AllocatorSettings, Era
from fragdoctor.model.snapshot import (
    I32,
    I64,
    U8,
    U64,
    Action,
    BlockState,
    Bools,
    SegmentType,
    Snapshot,
)
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.lives import Layout, Lives, Source, Totals
from fragdoctor.trace.stacks import Stacks
from fragdoctor.units import MIB

SMALL_SEGMENT_BYTES: Final = 2 * MIB
SMALL_REQUEST_BYTES: Final = 1 * MIB
ABSURD_BYTES: Final = 2**56  # no device has 64 PiB
_MAX_SUM: Final = 2**61  # of all values of a column


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one device, in file order; row i is row ``first_row + i`` of the snapshot.

    Sizes that no device has are cut, so that sums over all rows stay within 64 bits. ``pool`` is
    the default pool's index where the file does not say.
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


@dataclass(frozen=True, slots=True)
class FinalSegments:
    """The segments at the end of the trace, by address; sizes are cut as those of events."""

    address: U64
    size_bytes: I64
    stream: I32
    pool: I32
    is_small: Bools
    is_expandable: Bools

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class FinalBlocks:
    """The blocks of these segments, by address; ``segment`` is a row of ``FinalSegments``."""

    address: U64
    size_bytes: I64
    requested_bytes: I64
    state: U8
    stack: I32
    segment: I32

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class InitialState:
    """A device before the first event of its trace: s segments and b blocks, by address.

    Attributes:
        segment_stream, segment_pool: indices into the snapshot's tables (-1 = default pool).
        block_is_pending: freed before the trace began, but waiting for a stream.
        block_size_is_known: False where the size was computed (``round_size``) or bounded by the
            neighbours because the block is gone at the end.
    """

    segment_address: U64
    segment_bytes: U64
    segment_stream: I32
    segment_pool: I32
    segment_is_small: Bools
    segment_is_expandable: Bools
    block_address: U64
    block_bytes: U64
    block_requested: U64
    block_is_pending: Bools
    block_size_is_known: Bools


@dataclass(frozen=True, slots=True)
class SegmentLives:
    """Segments over time: ordinary ones, and pages of expandable ones that came and went together.

    ``start`` and ``done`` are rows, as in ``Lives``: a segment is there in state k iff
    ``start < k <= done``.
    """

    address: U64
    size_bytes: I64
    start: I32
    done: I32
    stream: I32
    pool: I32
    is_small: Bools
    is_expandable: Bools

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, eq=False)
class Trace:
    """One device's recording, undone.

    Attributes:
        settings: that it was recorded under; sizes are rounded by them.
        stacks: what the stacks of the snapshot say; shared by its devices.
        native: the undone trace of the native core.
        stream_of_rank, pool_of_number: from the core's numbers to indices of the snapshot.
        contradictions: kind -> count of what does not fit together; empty for a sound file. The
            kinds are those of ``Contradiction`` in ``undone.h``.
        missing: action -> number of events that must have happened but are not in the file.
    """

    snapshot: Snapshot
    device: int
    settings: AllocatorSettings
    stacks: Stacks
    events: Events
    segments: FinalSegments
    blocks: FinalBlocks
    native: _ext.NativeTrace
    stream_of_rank: I32
    pool_of_number: I32
    default_pool: int
    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        device: int,
        settings: AllocatorSettings | None = None,
        stacks: Stacks | None = None,
    ) -> Trace:
        """Return the trace of a device, undone.

        Args:
            snapshot: any snapshot; one without a trace gives its final state as the initial one.
            device: the device's number; one that the file does not know gives an empty trace.
            settings: that the file was recorded under; the snapshot's own where None.
            stacks: of the snapshot, where another device has them already.
        """
        tell("Undoing the trace")
        bounded = bounded_settings(settings or snapshot.settings)
        return _undone(snapshot, device, bounded, stacks or Stacks(snapshot))

    @property
    def first_row(self) -> int:
        """Row of the device's first event in the snapshot."""
        return self.snapshot.events.device_slice(self.device).start

    @property
    def n_events(self) -> int:
        """Number of events of the device."""
        return len(self.events)

    @property
    def contradictions(self) -> Mapping[str, int]:
        """Kind -> count of what does not fit together; empty for a sound file."""
        result: Mapping[str, int] = self.facts["contradictions"]
        return result

    @property
    def missing(self) -> Mapping[str, int]:
        """Action -> number of events that must have happened but are not in the file."""
        names = ("alloc", "free_requested", "free_completed")
        return {n: k for n, k in zip(names, self.facts["missing"], strict=True) if k}

    @cached_property
    def lives(self) -> Lives:
        """Every block that lived at some time."""
        events, blocks, segments = self.events, self.blocks, self.segments
        source = Source(
            address=events.address,
            requested=events.size_bytes,
            stack=events.stack,
            stream=events.stream,
            pool=events.pool,
            block_address=blocks.address,
            block_requested=blocks.requested_bytes,
            block_stack=blocks.stack,
            block_stream=segments.stream[blocks.segment],
            block_pool=segments.pool[blocks.segment],
        )
        return Lives(self.native, source, self.facts)

    @cached_property
    def totals(self) -> Totals:
        """Allocated, active and reserved bytes in every state."""
        return Totals(self.native, self.facts)

    @cached_property
    def segment_lives(self) -> SegmentLives:
        """Segments over time."""
        raw = self.native.segments()
        raw["size_bytes"] = raw.pop("size")
        return SegmentLives(**self._named(raw, ""))

    @cached_property
    def initial(self) -> InitialState:
        """The device before the first event."""
        raw = self._named(self.native.initial(), "segment_")
        for name in ("block_is_pending", "block_size_is_known"):
            raw[name] = raw[name].view(np.bool_)
        return InitialState(**raw)

    @property
    def initial_reserved_bytes(self) -> int:
        """Reserved memory before the first event."""
        return int(self.facts["initial_reserved_bytes"])

    @cached_property
    def layout(self) -> Layout:
        """The device at the end, as the file has it."""
        return _final_layout(self)

    def layout_at(self, state: int) -> Layout:
        """Return the device after so many events; a fraction of a millisecond per 100,000 lives."""
        raw = self._named(self.native.layout_at(state), "segment_")
        live, pool = raw["live"].astype(np.int64), raw["segment_pool"]
        lives, address = self.lives, raw["segment_address"]
        small, expandable = raw["segment_is_small"], raw["segment_is_expandable"]
        live_segment, free_segment = raw["live_segment"], raw["free_segment"]
        live_address = lives.address[live]
        return Layout(
            segment_address=address,
            segment_bytes=raw["segment_bytes"].view(np.int64),
            segment_stream=raw["segment_stream"],
            segment_pool=pool,
            is_small=small,
            is_private=pool != self.default_pool,
            page_bytes=_pages(expandable, small, self.settings),
            live_offset=(live_address - address[live_segment]).view(np.int64),
            live_bytes=lives.size_bytes[live],
            live_stack=lives.stack[live],
            live_is_pending=lives.free[live] < state,
            live_segment=live_segment,
            live_row=live,
            free_offset=(raw["free_address"] - address[free_segment]).view(np.int64),
            free_bytes=raw["free_bytes"].view(np.int64),
            free_segment=free_segment,
        )

    @cached_property
    def oom_rows(self) -> I64:
        """Rows of requests that failed."""
        return np.flatnonzero(self.events.action == Action.OOM)

    @cached_property
    def oom_capacity_bytes(self) -> I64:
        """Per failed request, what PyTorch could have then: driver-free plus reserved bytes.

        -1 where the file does not say.
        """
        free = [self.snapshot.oom_free_bytes.get(self.first_row + r, -1) for r in self.oom_rows]
        reserved = self.totals.at(self.oom_rows + 1)[:, 2].tolist()
        known = [
            f + r if 0 <= f < ABSURD_BYTES else -1 for f, r in zip(free, reserved, strict=True)
        ]
        return np.array(known, np.int64)

    @cached_property
    def n_requests(self) -> int:
        """Number of requests, failed ones included."""
        action = self.events.action
        return int(np.count_nonzero((action == Action.ALLOC) | (action == Action.OOM)))

    def _named(self, raw: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return native columns with streams and pools as the snapshot counts them."""
        raw[f"{prefix}stream"] = self.stream_of_rank[raw[f"{prefix}stream"]]
        raw[f"{prefix}pool"] = self.pool_of_number[raw[f"{prefix}pool"]]
        for name in ("is_small", "is_expandable"):
            raw[prefix + name] = raw[prefix + name].view(np.bool_)
        return raw


def traces_of(snapshot: Snapshot, settings: AllocatorSettings | None = None) -> tuple[Trace, ...]:
    """Return the traces of all devices of a snapshot, in their order."""
    stacks = Stacks(snapshot)
    return tuple(Trace.of(snapshot, device, settings, stacks) for device in snapshot.devices)


def bounded_settings(settings: AllocatorSettings) -> AllocatorSettings:
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


def large_page_bytes(settings: AllocatorSettings) -> int:
    """Return the page of expandable segments in the large pool, within what can be computed."""
    return min(max(512, settings.large_segment_bytes), 2**40)


# ---- columns of one device ---------------------------------------------------------------------


def _undone(snapshot: Snapshot, device: int, settings: AllocatorSettings, stacks: Stacks) -> Trace:
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
    rank = np.zeros(len(snapshot.streams) + 1, np.int32)  # the last entry stands for id -1
    rank[stream_of_rank] = np.arange(len(stream_of_rank), dtype=np.int32)
    pool_of_number, number = _pool_numbers(snapshot.pools, used_pools)
    default_pool = int(pool_of_number[0])

    limit = _MAX_SUM // max(1, rows.stop - rows.start + len(own) + len(own_blocks))
    native = _ext.NativeTrace(
        action=events.action[rows],
        address=events.address[rows],
        size=events.size_bytes[rows],
        stream=_renumbered(events.stream[rows], rank, used_streams),
        pool=_renumbered(events.pool[rows], number, used_pools),
        segment_address=segments.address[own],
        segment_size=segments.total_bytes[own],
        segment_stream=rank[segments.stream[own]],
        segment_pool=np.maximum(number[segments.pool[own]], 0),
        segment_kind=segments.kind[own],
        segment_expandable=segments.is_expandable[own].astype(np.uint8),
        block_address=blocks.address[own_blocks],
        block_size=blocks.size_bytes[own_blocks],
        block_requested=blocks.requested_bytes[own_blocks],
        block_state=blocks.state[own_blocks],
        config=native_config(settings, era=Era.ADDRESS),
    )
    segment_bytes = _cut(segments.total_bytes[own], limit)
    return Trace(
        snapshot=snapshot,
        device=device,
        settings=settings,
        stacks=stacks,
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
        native=native,
        stream_of_rank=stream_of_rank,
        pool_of_number=pool_of_number,
        default_pool=default_pool,
        facts=native.facts(),
    )


def _cut(values: U64, limit: int) -> I64:
    """Return the values as ``int64``, those above the limit cut to it.

    The result may share memory with ``values``.
    """
    bound = np.uint64(limit)
    if not len(values) or values.max() <= bound:
        return values.view(np.int64)  # the same bits: no copy of a million rows
    return np.minimum(values, bound).astype(np.int64)


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


def _with_default(pool: I32, default_pool: int) -> I32:
    if not (pool < 0).any():
        return pool
    return np.where(pool < 0, np.int32(default_pool), pool)


def _is_small(kind: U8, size: I64) -> Bools:
    """Return whether each segment is of the small pool; by size where the file does not say."""
    by_size: Bools = size <= SMALL_SEGMENT_BYTES
    result: Bools = np.where(kind == SegmentType.UNKNOWN, by_size, kind == SegmentType.SMALL)
    return result


# ---- layouts -------------------------------------------------------------------------------------


def _pages(is_expandable: Bools, is_small: Bools, settings: AllocatorSettings) -> I64:
    page = np.where(is_small, SMALL_SEGMENT_BYTES, large_page_bytes(settings))
    return np.where(is_expandable, page, 0).astype(np.int64)


def _final_layout(trace: Trace) -> Layout:
    segments, blocks = trace.segments, trace.blocks
    offset = (blocks.address - segments.address[blocks.segment]).view(np.int64)
    offset = np.clip(offset, -_MAX_SUM, _MAX_SUM)  # nonsense must not overflow later
    row = np.full(len(blocks), -1, np.int64)
    of_life = trace.lives.block
    found = np.flatnonzero(of_life >= 0)
    row[of_life[found]] = found
    live = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    free = np.flatnonzero(blocks.state == BlockState.INACTIVE)
    return Layout(
        segment_address=segments.address,
        segment_bytes=segments.size_bytes,
        segment_stream=segments.stream,
        segment_pool=segments.pool,
        is_small=segments.is_small,
        is_private=segments.pool != trace.default_pool,
        page_bytes=_pages(segments.is_expandable, segments.is_small, trace.settings),
        live_offset=offset[live],
        live_bytes=blocks.size_bytes[live],
        live_stack=blocks.stack[live],
        live_is_pending=blocks.state[live] == BlockState.PENDING_FREE,
        live_segment=blocks.segment[live],
        live_row=row[live],
        free_offset=offset[free],
        free_bytes=blocks.size_bytes[free],
        free_segment=blocks.segment[free],
    )
