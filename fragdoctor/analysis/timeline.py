"""Undo the trace: block sizes, and allocated, active and reserved bytes after each event.

A trace holds requested sizes. What counts is the size of the block that served the request: the
rounded size (``round_size``), or, in the large pool without expandable segments, the whole free
block where less than 1 MiB (1 MiB included) would have been left of it (``should_split``). Every
block of such a segment is larger than 1 MiB, so the end of a block shows: it is where the next
block or the segment ends, if that is at most 1 MiB away. Source: CUDACachingAllocator.cpp
(``round_size``, ``should_split``), as in torch 2.0 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fragdoctor.analysis.columns import SMALL_REQUEST_BYTES, DeviceColumns
from fragdoctor.analysis.lifetimes import ALIVE, BEFORE, Lifetimes, pair_lifetimes
from fragdoctor.analysis.result import Timeline
from fragdoctor.analysis.spans import SegmentSpans, segment_spans
from fragdoctor.model.hooks import tell
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I64, Action, BlockState, Bools
from fragdoctor.units import MIB

MIN_BLOCK_BYTES: Final = 512
MAX_UNSPLIT_BYTES: Final = 1 * MIB
_FIRST_INTERVAL: Final = 20  # roundup_power2_divisions[0] is for sizes of 2**20
# Pairs looked at to find the block behind a block; a genuine trace needs a few per block.
MAX_PROBES: Final = 20_000_000
_NONE: Final = np.iinfo(np.int64).max
_SEGMENT_SIGNS: Final = (
    (Action.SEGMENT_ALLOC, 1),
    (Action.SEGMENT_MAP, 1),
    (Action.SEGMENT_FREE, -1),
    (Action.SEGMENT_UNMAP, -1),
)


@dataclass(frozen=True, slots=True)
class Undone:
    """What undoing the trace tells.

    Attributes:
        lifetimes: every block with its true size.
        spans: every ordinary segment with its life.
        timeline: None where the device has no events.
        is_exact: every block size is known (always, within ``MAX_PROBES``).
    """

    lifetimes: Lifetimes
    spans: SegmentSpans
    timeline: Timeline
    is_exact: bool


def undo(columns: DeviceColumns, settings: AllocatorSettings) -> Undone:
    """Return the lives of all blocks with their sizes, and the state after each event."""
    lifetimes, spans, is_exact = _lives(columns, settings)
    tell("Analysing: memory over time")
    return Undone(lifetimes, spans, _timeline(columns, lifetimes), is_exact)


def sized_lifetimes(columns: DeviceColumns, settings: AllocatorSettings) -> Lifetimes:
    """Return the lives of all blocks with their sizes, without the state after each event."""
    return _lives(columns, settings)[0]


def _lives(
    columns: DeviceColumns, settings: AllocatorSettings
) -> tuple[Lifetimes, SegmentSpans, bool]:
    tell("Analysing: the lives of blocks")
    lifetimes = pair_lifetimes(columns)
    spans = segment_spans(columns)
    tell("Analysing: the sizes of blocks")
    sizes, is_exact = block_sizes(columns, settings, lifetimes, spans)
    return replace(lifetimes, size=sizes), spans, is_exact


def round_size(requested: I64, settings: AllocatorSettings) -> I64:
    """Return the size that the allocator looks for, for each requested size."""
    plain = np.maximum(MIN_BLOCK_BYTES, -(-requested // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
    if not settings.roundup_is_on:
        return plain
    divisions = np.array([min(d, 2**30) for d in settings.roundup_power2_divisions], np.int64)
    log2 = np.frexp(np.maximum(requested, 1).astype(np.float64))[1].astype(np.int64) - 1
    # The float of a size just below a power of two may round up to it.
    log2 -= (np.int64(1) << log2) > np.maximum(requested, 1)
    d = divisions[np.clip(log2 - _FIRST_INTERVAL, 0, len(divisions) - 1)]
    floor = np.int64(1) << log2
    step = np.maximum(floor // np.maximum(d, 1), 1)
    divided = -(-requested // step) * step
    is_divided = (d > 1) & (requested > MIN_BLOCK_BYTES * d)
    result: I64 = np.where(is_divided, divided, plain)
    return result


def block_sizes(
    columns: DeviceColumns,
    settings: AllocatorSettings,
    lifetimes: Lifetimes,
    spans: SegmentSpans,
) -> tuple[I64, bool]:
    """Return the size of each block, and whether all of them are known."""
    sizes = round_size(lifetimes.requested, settings)
    known = lifetimes.block >= 0
    sizes[known] = columns.block_size[lifetimes.block[known]]
    may_be_longer = ~known & (sizes > SMALL_REQUEST_BYTES)
    if settings.expandable_segments or not may_be_longer.any():
        return sizes, True
    split_limit = settings.max_split_bytes
    slack = np.full(len(sizes), MAX_UNSPLIT_BYTES)
    if split_limit is not None:
        # Blocks of max_split_size and more are handed out whole, up to the rounding bound.
        bound = max(MAX_UNSPLIT_BYTES, min(settings.max_non_split_rounding_bytes, 2**50))
        slack[sizes >= split_limit] = bound
    rows = np.flatnonzero(may_be_longer)
    wanted = _Wanted(
        low=lifetimes.address[rows] + sizes[rows],
        slack=slack[rows],
        start=lifetimes.start[rows],
        done=lifetimes.done[rows],
    )
    blocks = _Barriers.of(lifetimes.address, lifetimes.start, lifetimes.done)
    ends = spans.address + spans.size
    order = np.lexsort((spans.start, ends))
    segments = _Barriers.of(ends[order], spans.start[order], spans.done[order])
    end_a, exact_a = _next_barrier(wanted, blocks)
    end_b, exact_b = _next_barrier(wanted, segments)
    end = np.minimum(end_a, end_b)
    sizes[rows] = np.where(end != _NONE, end - lifetimes.address[rows], sizes[rows])
    return sizes, exact_a and exact_b


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Blocks whose end is asked for: it is at ``low`` unless a barrier is within ``slack``."""

    low: I64
    slack: I64
    start: I64
    done: I64


@dataclass(frozen=True, slots=True)
class _Barriers:
    """Starts of blocks, or ends of segments, while they live.

    ``places`` are the distinct addresses. ``key`` is place * width + start + 1, ascending, so that
    one search finds the last barrier at a place that began before a row; ``first`` is the index
    of the first one of each place.
    """

    places: I64
    first: I64
    key: I64
    done: I64
    width: int

    @classmethod
    def of(cls, address: I64, start: I64, done: I64) -> _Barriers:
        """Return the barriers of rows that are sorted by (address, start)."""
        fresh = np.ones(len(address), np.bool_)
        fresh[1:] = address[1:] != address[:-1]
        first = np.flatnonzero(fresh)
        width = int(start.max(initial=0)) + 3
        key = np.cumsum(fresh) - 1
        key *= width
        key += start
        key += 1
        return cls(address[first], first, key, done, width)


def _next_barrier(wanted: _Wanted, barriers: _Barriers) -> tuple[I64, bool]:
    """Return where a barrier ends each block (``_NONE``: none is near), and whether all is known.

    Before its alloc a block's place is free, so the layout at that row decides. For a block that
    was there before the trace any barrier during its life will do: the space behind it is handed
    out from its end on.
    """
    place = np.searchsorted(barriers.places, wanted.low)
    stop = np.searchsorted(barriers.places, wanted.low + wanted.slack, side="right")
    is_initial = wanted.start == BEFORE
    now = np.minimum(np.where(is_initial, wanted.done, wanted.start), barriers.width - 2)
    end = np.full(len(place), _NONE)
    todo = np.flatnonzero(place < stop)
    n_probes = 0
    while len(todo) and n_probes < MAX_PROBES:
        n_probes += len(todo)
        at = place[todo]
        last = np.searchsorted(barriers.key, at * barriers.width + now[todo] + 1) - 1
        inside = last >= barriers.first[at]
        hit = inside & ((barriers.done[last] > now[todo]) | is_initial[todo])
        end[todo[hit]] = barriers.places[at[hit]]
        todo = todo[~hit]
        place[todo] += 1
        todo = todo[place[todo] < stop[todo]]
    return end, not len(todo)


def _timeline(columns: DeviceColumns, lifetimes: Lifetimes) -> Timeline:
    n = columns.n_events
    began = lifetimes.start != BEFORE
    # Differences first, in the memory of the states: three columns of a long trace are enough.
    allocated = np.zeros(n + 1, np.int64)
    np.add.at(allocated[1:], lifetimes.start[began], lifetimes.size[began])
    active = allocated.copy()
    _subtract(allocated[1:], lifetimes.free, lifetimes.size)
    _subtract(active[1:], lifetimes.done, lifetimes.size)
    state = columns.block_state
    allocated_now = int(columns.block_size[state == BlockState.ALLOCATED].sum())
    active_now = int(columns.block_size[state != BlockState.INACTIVE].sum())
    return Timeline(
        allocated_bytes=_summed(allocated, allocated_now),
        active_bytes=_summed(active, active_now),
        reserved_bytes=_summed(_reserved_changes(columns), int(columns.seg_size.sum())),
    )


def _subtract(delta: I64, rows: I64, sizes: I64) -> None:
    happened: Bools = (rows != ALIVE) & (rows != BEFORE)
    np.subtract.at(delta, rows[happened], sizes[happened])


def _reserved_changes(columns: DeviceColumns) -> I64:
    changes = np.zeros(columns.n_events + 1, np.int64)
    for action, sign in _SEGMENT_SIGNS:
        rows = np.flatnonzero(columns.action == action)
        changes[rows + 1] = sign * columns.size[rows]
    return changes


def _summed(changes: I64, final: int) -> I64:
    """Return the state before and after each event, given its changes and the final one."""
    np.cumsum(changes, out=changes)
    changes += final - changes[-1]
    return changes
