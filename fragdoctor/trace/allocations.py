"""Operations by allocation: who makes and frees what, and which operations edits add."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.model.snapshot import I64, U8, Bools
from fragdoctor.trace.operations import OPERATION, U32, Operations, OpKind

NEVER: Final = np.iinfo(np.int64).max
"""Position of the free of what is still live at the end."""


class Allocations:
    """Per allocation: size, and the operations and events that make and free it."""

    def __init__(self, ops: Operations) -> None:
        n = int(ops.allocation.max(initial=0)) + 1
        made = np.flatnonzero(ops.kind == OpKind.MALLOC)
        freed = np.flatnonzero(is_free(ops.kind))
        reached = reached_rows(ops)
        self.born, self.dies = np.full(n, -1, np.int64), np.full(n, NEVER)
        self.row, self.freed_row = np.full(n, -1, np.int64), np.full(n, NEVER)
        self.size = np.zeros(n, np.int64)
        of_made, of_freed = ops.allocation[made], ops.allocation[freed]
        self.born[of_made], self.row[of_made] = made, reached[made]
        self.size[of_made] = ops.size[made].astype(np.int64)
        self.dies[of_freed], self.freed_row[of_freed] = freed, reached[freed]

    def _range_of(self, rows: I64, first_row: I64, end_row: I64) -> I64:
        """Return which of the ranges each row is in, -1 for none."""
        at = np.searchsorted(first_row, rows, side="right") - 1
        inside = (at >= 0) & (rows < end_row[np.maximum(at, 0)])
        return np.where(inside, at, -1)

    def made_and_freed_in(self, first_row: I64, end_row: I64) -> Bools:
        """Return the allocations that live within one of the ranges of events.

        One that the end of the trace leaves live in the last range counts, if that is cut off.
        """
        if not len(first_row):
            return np.zeros(len(self.born), np.bool_)
        made = self._range_of(self.row, first_row, end_row)
        freed = self._range_of(self.freed_row, first_row, end_row)
        result: Bools = (made >= 0) & (made == freed)
        return result

    def kept_from(self, first_row: I64, end_row: I64, until_row: I64 | None = None) -> Bools:
        """Return what was made in one of the ranges and stays until the last of them.

        With ``until_row`` (ascending) what outlives its range and is freed by the first of them
        that follows.
        """
        if not len(first_row):
            return np.zeros(len(self.born), np.bool_)
        made = self._range_of(self.row, first_row, end_row)
        outlives = self.freed_row >= end_row[np.maximum(made, 0)]
        kept: Bools = (made >= 0) & outlives
        if until_row is None:
            # What a program lets go of when it ends was there to stay.
            goes_late = (made < len(first_row) - 1) & (self.freed_row >= first_row[-1])
            result: Bools = kept & ((self.freed_row == NEVER) | goes_late)
            return result
        padded = np.append(until_row, NEVER)
        limit = padded[np.searchsorted(until_row, self.row, side="right")]
        soon: Bools = kept & (self.freed_row <= limit)
        return soon


def reached_rows(ops: Operations) -> I64:
    """Return for each operation the latest event that it or an earlier one comes from."""
    reached: I64 = np.maximum.accumulate(ops.row).astype(np.int64)
    return reached


def is_free(kind: U8) -> Bools:
    """Return which kinds of operations free."""
    result: Bools = (kind == OpKind.FREE) | (kind == OpKind.FREE_PENDING)
    return result


def frees_of(allocation: U32) -> npt.NDArray[np.void]:
    """Return the operations that free some allocations."""
    new = np.zeros(len(allocation), OPERATION)
    new["kind"], new["allocation"] = OpKind.FREE, allocation
    return new
