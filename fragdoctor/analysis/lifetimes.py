"""Lifetimes: each block's allocation, release and completion as one row, without a Python loop.

Events name blocks by address, and addresses are reused. Sorted by (address, row) the events of one
block stand together in the order ``alloc``, ``free_requested``, ``free_completed``; whatever breaks
this order is a contradiction (skipped actions, a foreign allocator) and is counted, never fatal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.analysis.columns import DeviceColumns
from fragdoctor.analysis.ordering import stable_order
from fragdoctor.model.snapshot import I32, I64, Action, BlockState, Bools

BEFORE: Final = -1  # the row of what happened before the first event
ALIVE = np.iinfo(np.int64).max  # the row of what has not happened by the last event

_ALLOC, _FREE, _DONE = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """One row per block that lived at some time, sorted by (address, start).

    ``start`` is the row of its ``alloc`` (``BEFORE``: it was there before the trace), ``free`` that
    of ``free_requested``, ``done`` that of ``free_completed`` (``ALIVE``: not by the end). Rows
    count from 0 within the device. A block is active in state k (after k events) iff
    ``start < k <= done``, and allocated iff ``start < k <= free``.

    Attributes:
        requested: bytes asked for.
        size: bytes of the block; filled by ``timeline.undo``, equal to ``requested`` before.
        block: row of the final block it is, in ``DeviceColumns``; -1 if it is gone.
        n_contradictions: events that do not fit the order above or the final blocks.
        n_missing: implied events that the file lacks, by action (alloc, free_requested,
            free_completed).
    """

    address: I64
    start: I64
    free: I64
    done: I64
    requested: I64
    size: I64
    stack: I32
    stream: I32
    pool: I32
    block: I64
    n_contradictions: int
    n_missing: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.address)

    def active_at(self, k: int) -> I64:
        """Return the rows of the blocks that are active after k events."""
        return np.flatnonzero((self.start < k) & (self.done >= k))

    def allocated_at(self, k: int) -> I64:
        """Return the rows of the blocks that are allocated after k events."""
        return np.flatnonzero((self.start < k) & (self.free >= k))

    @property
    def survives(self) -> Bools:
        """Whether each block is allocated at the end."""
        result: Bools = self.free == ALIVE
        return result


@dataclass(slots=True)
class _Draft:
    """Lifetimes from the events alone, before the final blocks are matched."""

    address: I64
    first_event: I64
    start: I64
    free: I64
    done: I64
    is_last: Bools
    n_contradictions: int
    n_missing: list[int]


def pair_lifetimes(columns: DeviceColumns) -> Lifetimes:
    """Return the lifetimes of all blocks that events or the final state name."""
    draft = _from_events(columns)
    live = np.flatnonzero(columns.block_state != BlockState.INACTIVE)
    block = _match_final(columns, draft, live)
    _close_open_ends(columns, draft, block)
    return _with_silent_blocks(columns, draft, block, live)


def _from_events(columns: DeviceColumns) -> _Draft:
    rows = np.flatnonzero(columns.action <= _DONE)
    rows = rows[stable_order(columns.address[rows])]
    action, address = columns.action[rows], columns.address[rows]
    n = len(rows)
    first = np.ones(n, np.bool_)
    first[1:] = address[1:] != address[:-1]
    previous = np.full(n, _DONE, np.uint8)
    previous[1:] = action[:-1]
    orphan = ~first & (action != _ALLOC) & (action <= previous)
    begins = first | orphan | (action == _ALLOC)
    heads = np.flatnonzero(begins)
    member = np.cumsum(begins) - 1
    start = np.where(action[heads] == _ALLOC, rows[heads], BEFORE)
    # A free of a block that was already freed: nothing says when it was allocated again.
    start = np.where(orphan[heads], rows[heads], start)
    free, done = np.full(len(heads), ALIVE), np.full(len(heads), ALIVE)
    frees, dones = action == _FREE, action == _DONE
    free[member[frees]] = rows[frees]
    done[member[dones]] = rows[dones]
    is_last = np.ones(len(heads), np.bool_)
    is_last[:-1] = first[heads[1:]]
    n_orphans = int(np.count_nonzero(orphan))
    return _Draft(
        address[heads], rows[heads], start, free, done, is_last, n_orphans, [n_orphans, 0, 0]
    )


def _match_final(columns: DeviceColumns, draft: _Draft, live: I64) -> I64:
    """Return for each lifetime the final live block it ended as, -1 where it ended before."""
    block = np.full(len(draft.address), -1, np.int64)
    last = np.flatnonzero(draft.is_last)
    if not len(last) or not len(live):
        return block
    at = np.searchsorted(draft.address[last], columns.block_address[live])
    at = np.minimum(at, len(last) - 1)
    owner = last[at]
    fits = (draft.address[owner] == columns.block_address[live]) & (draft.done[owner] == ALIVE)
    block[owner[fits]] = live[fits]
    return block


def _close_open_ends(columns: DeviceColumns, draft: _Draft, block: I64) -> None:
    """Give every lifetime that did not survive an end, and the final pending blocks a free."""
    has_free_rows = bool((columns.action == _FREE).any())
    free, done, start = draft.free, draft.done, draft.start
    # free_completed without free_requested: skipped, or requested before the ring's oldest entry.
    no_free = (done != ALIVE) & (free == ALIVE)
    # A cut between the two events of one free leaves its second as the first row.
    was_pending = no_free & (start == BEFORE) & (has_free_rows | (done == 0))
    free[no_free] = done[no_free]
    free[was_pending] = BEFORE
    draft.n_missing[1] += int(np.count_nonzero(no_free & ~was_pending))

    gone = (done == ALIVE) & (block < 0)
    end = np.full(len(done), max(0, columns.n_events - 1))
    end[:-1] = np.where(draft.is_last[:-1], end[:-1], draft.first_event[1:])
    unfinished = gone & (free != ALIVE)
    done[unfinished] = free[unfinished]
    unknown = gone & (free == ALIVE)
    free[unknown] = done[unknown] = end[unknown]
    draft.n_missing[1] += int(np.count_nonzero(unknown))
    draft.n_missing[2] += int(np.count_nonzero(gone))
    draft.n_contradictions += int(np.count_nonzero(gone))

    at_end = np.flatnonzero(block >= 0)
    is_pending = columns.block_state[block[at_end]] == BlockState.PENDING_FREE
    unasked = at_end[is_pending & (free[at_end] == ALIVE)]
    free[unasked] = max(0, columns.n_events - 1)
    draft.n_missing[1] += len(unasked)
    revived = at_end[~is_pending & (free[at_end] != ALIVE)]
    free[revived] = ALIVE
    draft.n_contradictions += len(unasked) + len(revived)


def _with_silent_blocks(columns: DeviceColumns, draft: _Draft, block: I64, live: I64) -> Lifetimes:
    """Add the final live blocks that no event explains: they were there before the trace."""
    matched = np.zeros(len(columns.block_address), np.bool_)
    matched[block[block >= 0]] = True
    silent = live[~matched[live]]
    last = np.flatnonzero(draft.is_last)
    start = np.full(len(silent), BEFORE, np.int64)
    n_contradictions = draft.n_contradictions
    if len(last) and len(silent):
        at = np.searchsorted(draft.address[last], columns.block_address[silent])
        owner = last[np.minimum(at, len(last) - 1)]
        # Events of that address end with a completed free, yet a block lives there.
        reused = draft.address[owner] == columns.block_address[silent]
        start[reused] = np.minimum(draft.done[owner[reused]], columns.n_events - 1)
        n_contradictions += int(np.count_nonzero(reused))
        draft.n_missing[0] += int(np.count_nonzero(reused))
    is_pending = columns.block_state[silent] == BlockState.PENDING_FREE
    n_silent = len(silent)
    first = draft.first_event
    join = np.concatenate
    found = block >= 0
    requested = columns.size[first]
    requested[found] = columns.block_requested[block[found]]
    requested = join([requested, columns.block_requested[silent]])
    in_segment = columns.block_segment[silent]
    stack = columns.stack[first]
    # Without the alloc event the stack of a free says nothing about who allocated.
    stack[columns.action[first] != _ALLOC] = -1
    stack[found] = columns.block_stack[block[found]]
    address = join([draft.address, columns.block_address[silent]])
    start = join([draft.start, start])
    order = np.lexsort((start, address)) if n_silent else np.arange(len(address))
    return Lifetimes(
        address=address[order],
        start=start[order],
        free=join([draft.free, np.where(is_pending, BEFORE, ALIVE)])[order],
        done=join([draft.done, np.full(n_silent, ALIVE)])[order],
        requested=requested[order],
        size=requested[order],
        stack=join([stack, columns.block_stack[silent]]).astype(np.int32)[order],
        stream=join([columns.stream[first], columns.seg_stream[in_segment]]).astype(np.int32)[
            order
        ],
        pool=join([columns.pool[first], columns.seg_pool[in_segment]]).astype(np.int32)[order],
        block=join([block, silent])[order],
        n_contradictions=n_contradictions,
        n_missing=(draft.n_missing[0], draft.n_missing[1], draft.n_missing[2]),
    )
