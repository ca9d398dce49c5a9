"""A program with some of its modules checkpointed, as an edit of its requests.

Between the passes of a checkpointed module, what it left is gone. When its backward pass begins,
its forward pass makes the same requests again, up to the last block that is needed. The module's
inputs stay alive until then. The unchanged program does not show when a block is freed if nothing
keeps it for the backward pass; a rehearsal with the outermost modules checkpointed does. Follows
``torch.utils.checkpoint`` (``use_reentrant=False``, PyTorch 2.13), which stops a second forward
pass early.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import I64
from fragdoctor.rehearsal.prescription.module_calls import ModuleCall, TraceBlocks
from fragdoctor.trace.operations import (
    NEVER,
    OPERATION,
    Allocations,
    Operations,
    OpKind,
    is_free,
    reached_rows,
)

UNKNOWN: Final = -1


class Ends:
    """When blocks are freed if the module that makes them is checkpointed.

    Attributes:
        forward: ``int64[n]``, the block before which each is freed in a forward pass that keeps
            nothing; if that is UNKNOWN, it is freed when its module ends.
        outlives: ``bool[n]``, whether that is after the outermost module in which it was made.
        backward: ``int64[n]``, the block before which the block that replaces each one is freed in
            the backward pass; UNKNOWN: it is freed where the first one was. PyTorch frees it before
            it sums the gradients of broadcast tensors, and frees the first one after that
            (``validate_outputs`` in ``torch/csrc/autograd/engine.cpp``, 2.13).
    """

    def __init__(self, n_blocks: int) -> None:
        self.forward = np.full(n_blocks, UNKNOWN, np.int64)
        self.outlives = np.zeros(n_blocks, np.bool_)
        self.backward = np.full(n_blocks, UNKNOWN, np.int64)

    def learn(
        self, own: TraceBlocks, call: ModuleCall, others: TraceBlocks, bare: ModuleCall, until: int
    ) -> None:
        """Learn from the same call in two traces: of the program, and with the call checkpointed.

        Until event ``until`` of the second trace both are the same except for what is freed.
        """
        mine, theirs = np.arange(call.first, call.last), np.arange(bare.first, bare.last)
        asked = own.requested_bytes[mine]
        if not np.array_equal(asked, others.requested_bytes[theirs]):
            return
        free = others.free[theirs]
        before = call.first - bare.first + np.searchsorted(others.start, free)
        self.forward[mine] = np.where(free < until, before, UNKNOWN)
        self.outlives[mine] = (free >= bare.end) & (free < until)
        # The second forward pass comes first, and then the backward pass as in the first trace.
        made = mine[(own.start[mine] < call.again_end) & ~own.is_lasting[mine]]
        again = others.passing_from(bare.backward)
        after, later = again[len(made) :], own.passing_from(call.backward)
        again = again[: len(made)]
        if np.array_equal(own.requested_bytes[made], others.requested_bytes[again]):
            n_before = np.searchsorted(others.start[after], others.free[again])
            is_known = n_before < len(later)
            self.backward[made[is_known]] = later[n_before[is_known]]


class _Again(Struct, frozen=True):
    """What checkpointing one call changes, as positions among the requests.

    Attributes:
        gone: ``int64[n, 2]``, blocks that are freed in the forward pass, and where.
        remade: ``int64[n, 2]``, outputs that are recomputed, and where the first ones are freed if
            no other recomputed call was given them.
        inputs: blocks that stay until ``end``.
        end: where the last of its blocks is freed.
        steps: ``int64[4, n]``, requests that are added: before which position, of which kind, like
            those of which block, and the number of the recomputed block (UNKNOWN: it is the block
            itself).
        removed: requests that are dropped.
        n_made: number of blocks that are recomputed.
    """

    gone: I64
    remade: I64
    inputs: I64
    end: int
    steps: I64
    removed: I64
    n_made: int


class Recomputation:
    """Makes the requests of a program with modules checkpointed.

    Args:
        base: the requests of the unchanged program.
        blocks: the blocks of its trace.
        ends: when blocks are freed.
    """

    def __init__(self, base: _ext.NativeOps, blocks: TraceBlocks, ends: Ends) -> None:
        self._base, self._ends = base, ends
        self._ops = Operations.of(base)
        self._reached = reached_rows(self._ops)
        lives = Allocations(self._ops)
        n = blocks.n_rows
        self._born, self._dies = np.full(n, -1, np.int64), np.full(n, NEVER)
        known = min(n, len(lives.born))
        self._born[:known], self._dies[:known] = lives.born[:known], lives.dies[:known]
        self._n_ids = max(n, int(self._ops.allocation.max(initial=0)) + 1)
        self._changes = cache(self._worked_out)

    def operations(self, chosen: Sequence[tuple[ModuleCall, tuple[int, ...]]]) -> _ext.NativeOps:
        """Return the requests with calls checkpointed and some results of each kept.

        The calls are given in the order of the program, and none is within another.
        """
        changes = [self._changes(call, kept) for call, kept in reversed(chosen)]
        if not changes:
            return self._base
        dies = self._new_ends(changes)
        moved = np.flatnonzero((dies != self._dies) & (self._born >= 0))
        frees = np.stack([dies[moved], np.full_like(moved, OpKind.FREE), moved, moved])
        columns, n_ids = [frees], self._n_ids
        for one in changes:
            steps = one.steps.copy()
            steps[3] = np.where(steps[3] == UNKNOWN, steps[2], steps[3] + n_ids)
            n_ids += one.n_made
            columns.append(steps)
        position, kind, row, allocation = np.concatenate(columns, axis=1)
        new = np.zeros(len(row), OPERATION)
        for name in ("stream", "pool", "size"):
            new[name] = self._ops.table[name][self._born[row]]
        new["kind"], new["allocation"] = kind, allocation
        new["size"][kind == OpKind.FREE] = 0
        new["row"] = self._reached[np.minimum(position, len(self._reached) - 1)]
        stays = np.ones(len(self._ops), np.bool_)
        stays[np.concatenate([one.removed for one in changes])] = False
        stays[self._dies[moved][self._dies[moved] < NEVER]] = False
        table = np.insert(self._ops.table, position, new)
        return Operations(table[np.insert(stays, position, values=True)]).native(self._base)

    def _new_ends(self, changes: Sequence[_Again]) -> I64:
        """Return where each block that the program's original requests make is freed."""
        dies = self._dies.copy()
        gone = np.concatenate([one.gone for one in changes])
        remade = np.concatenate([one.remade for one in changes])
        dies[gone[:, 0]], dies[remade[:, 0]] = gone[:, 1], -1
        for one in changes:
            np.maximum.at(dies, one.inputs, one.end)
        is_free_to_go = dies[remade[:, 0]] < 0
        dies[remade[is_free_to_go, 0]] = remade[is_free_to_go, 1]
        return dies

    def _worked_out(self, call: ModuleCall, kept: tuple[int, ...]) -> _Again:
        """Return what checkpointing a call changes if some results are kept."""
        kept_rows = call.kept_rows(kept)
        begin = self._position(call.backward)
        gone = [row for row in sorted(call.left - kept_rows) if self._born[row] >= 0]
        ends = [int(self._dies[row]) for row in call.left if self._dies[row] < NEVER]
        steps, removed = self._repeated(call, kept_rows, begin) if call.is_repeated else ([], [])
        is_open = dict.fromkeys(row for _, kind, row in steps if kind == OpKind.MALLOC)
        for _, kind, row in steps:
            if kind == OpKind.FREE:
                is_open.pop(row, None)
        remade = [row for row in is_open if row in call.outputs and self._dies[row] >= begin]
        # What was left is freed where it was; everything else that is recomputed is freed at once.
        stays = {*call.left, *remade}
        steps += [
            (self._last_end_of(row, begin) if row in stays else begin, OpKind.FREE, row)
            for row in is_open
        ]
        rows = [row for _, kind, row in steps if kind == OpKind.MALLOC]
        again = {row: n for n, row in enumerate(rows)}
        numbered = [(*step, again.get(step[2], UNKNOWN)) for step in steps]
        # Nothing known still holds an output when its module is recomputed.
        first_ends = [self._end_of(r, call) if self._ends.outlives[r] else begin for r in remade]
        return _Again(
            gone=_pairs(gone, [self._end_of(row, call) for row in gone]),
            remade=_pairs(remade, first_ends),
            inputs=np.array([r for r in call.inputs if self._dies[r] < NEVER], np.int64),
            end=max(ends, default=begin),
            steps=np.array(numbered, np.int64).reshape(-1, 4).T,
            removed=np.array(removed, np.int64),
            n_made=len(again),
        )

    def _repeated(
        self, call: ModuleCall, kept_rows: frozenset[int], begin: int
    ) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Return the requests of a second forward pass, and those of the first that are dropped.

        Results that are kept are not recomputed, and are freed where the second pass frees them.
        """
        low, high = self._position(call.begin), self._position(call.again_end)
        kind, row = self._ops.kind[low:high], self._ops.allocation[low:high].astype(np.int64)
        is_own = (row >= call.first) & (row < call.last)
        is_own &= (kind == OpKind.MALLOC) | is_free(kind)
        steps, removed = list[tuple[int, int, int]](), list[int]()
        for n in np.flatnonzero(is_own).tolist():
            one, is_made = int(row[n]), kind[n] == OpKind.MALLOC
            if self._dies[one] == NEVER or (is_made and one in kept_rows):
                continue  # permanent memory is not requested again either
            steps.append((begin, OpKind.MALLOC if is_made else OpKind.FREE, one))
            if one in kept_rows:
                removed.append(low + n)
        late = [row for row in kept_rows if high <= self._dies[row] < begin]
        steps += [(begin, OpKind.FREE, row) for row in late]
        removed += [int(self._dies[row]) for row in late]
        return steps, removed

    def _end_of(self, row: int, call: ModuleCall) -> int:
        """Return where a block is freed in a forward pass that keeps nothing."""
        before = int(self._ends.forward[row])
        if before != UNKNOWN and before < len(self._born) and self._born[before] >= 0:
            end = int(self._born[before])
        else:
            end = self._position(call.end)
        return max(end, int(self._born[row]) + 1)

    def _last_end_of(self, row: int, begin: int) -> int:
        """Return where a recomputed block is freed."""
        before = int(self._ends.backward[row])
        if before == UNKNOWN or self._born[before] < 0:
            return int(self._dies[row])
        return max(int(self._born[before]), begin)

    def _position(self, event: int) -> int:
        """Return the first request at or after an event."""
        return int(np.searchsorted(self._reached, event))


def _pairs(rows: Sequence[int], positions: Sequence[int]) -> I64:
    return np.array([*zip(rows, positions, strict=True)], np.int64).reshape(-1, 2)
