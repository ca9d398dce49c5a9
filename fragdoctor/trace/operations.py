"""The trace as requests to the allocator, which a replay serves and an edit changes.

:class:`Allocations` groups them by allocation: what makes and frees each one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import I64, U8, U64, Bools

U32 = npt.NDArray[np.uint32]
NativeOps = _ext.NativeOps

OPERATION = np.dtype(
    {
        "names": [name for name, _, _ in _ext.OP_FIELDS],
        "formats": [form for _, form, _ in _ext.OP_FIELDS],
        "offsets": [offset for _, _, offset in _ext.OP_FIELDS],
        "itemsize": _ext.OP_BYTES,
    }
)
"""One request, laid out as in the native core."""


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


class Operations(Struct, frozen=True):
    """The trace as requests to the allocator, n of them, in order.

    They stay in the memory of the native core, or in one array of the same layout (``OPERATION``),
    since a long trace has millions of them. Its fields:

        kind: ``uint8[n]``, an ``OpKind``.
        size: ``uint64[n]``, bytes asked for; for FAILED, the rounded size.
        allocation: ``uint32[n]``, the block it concerns: a row of ``Lives``; 0 if there is none
            (EMPTY_CACHE, POOL_*, FAILED).
        row: ``uint32[n]``, the device's event that it comes from.
        stream, pool: ``uint16[n]``, in the numbering of the native core.
    """

    table: npt.NDArray[np.void]

    @classmethod
    def of(cls, operations: _ext.NativeOps) -> Operations:
        """Return operations of the native core, for reading.

        A failure that no request follows comes last: blocks freed after it were released by
        its exception.
        """
        return cls(operations.table().view(OPERATION))

    def native(self, base: _ext.NativeOps) -> _ext.NativeOps:
        """Return these operations in the native core, from the same start as ``base``.

        Raises:
            ValueError: if one of them is out of range.
        """
        self.table.setflags(write=False)  # checked once, then trusted
        return base.edited(self.table.view(np.uint8))

    def with_size(self, size: U64) -> Operations:
        """Return these operations with other sizes."""
        table = self.table.copy()
        table["size"] = size
        return Operations(table)

    @property
    def kind(self) -> U8:
        """The ``OpKind`` of each operation."""
        return self.table["kind"]

    @property
    def size(self) -> U64:
        """Bytes asked for."""
        return self.table["size"]

    @property
    def allocation(self) -> U32:
        """The allocation that each operation concerns."""
        return self.table["allocation"]

    @property
    def row(self) -> U32:
        """The event that each operation comes from."""
        return self.table["row"]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def is_request(self) -> Bools:
        """Whether each operation asks for memory, successfully or not."""
        chosen: Bools = (self.kind == OpKind.MALLOC) | (self.kind == OpKind.FAILED)
        return chosen

    @property
    def is_end(self) -> Bools:
        """Whether each operation frees, or completes a free that waited for another stream."""
        chosen: Bools = (self.kind >= OpKind.FREE) & (self.kind <= OpKind.COMPLETE)
        return chosen

    def marked(self, allocations: U32 | I64) -> Bools:
        """Return for each allocation whether it is among the given ones."""
        n = 1 + max(int(self.allocation.max(initial=0)), int(allocations.max(initial=0)))
        marks = np.zeros(n, np.bool_)
        marks[allocations] = True
        return marks

    def without(self, gone: Bools) -> Operations:
        """Return these operations without those on allocations marked as gone."""
        return Operations(self.table[~(gone[self.allocation] & (self.kind <= OpKind.COMPLETE))])

    def with_ends(self, allocations: U32, rows: I64) -> Operations:
        """Return these operations with each allocation freed just before a row, and no later."""
        rest = Operations(self.table[~(self.marked(allocations)[self.allocation] & self.is_end)])
        new = frees_of(allocations)
        new["row"] = rows
        return Operations(np.insert(rest.table, rest.positions(rows), new))

    def positions(self, rows: I64) -> I64:
        """Return the first operation that comes from each row or from a later one."""
        reached = np.maximum.accumulate(self.row)
        wanted = np.clip(rows, 0, np.iinfo(np.uint32).max).astype(np.uint32)  # as narrow as rows
        return np.searchsorted(reached, wanted, side="left").astype(np.int64)


NEVER: Final = np.iinfo(np.int64).max
"""Position of the free of an allocation that is still live at the end."""


class Allocations:
    """For each allocation: its size, and the operations and events that make and free it."""

    def __init__(self, ops: Operations) -> None:
        n = int(ops.allocation.max(initial=0)) + 1
        made = np.flatnonzero(ops.kind == OpKind.MALLOC)
        freed = np.flatnonzero(is_free(ops.kind))
        reached = reached_rows(ops)
        self.born, self.dies = np.full(n, -1, np.int64), np.full(n, NEVER)
        self.row = np.full(n, -1, np.int64)
        self.size = np.zeros(n, np.int64)
        of_made, of_freed = ops.allocation[made], ops.allocation[freed]
        self.born[of_made], self.row[of_made] = made, reached[made]
        self.size[of_made] = ops.size[made].astype(np.int64)
        self.dies[of_freed] = freed


def reached_rows(ops: Operations) -> I64:
    """Return for each operation the latest event that it or an earlier operation comes from."""
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
