"""The trace as requests to the allocator: what a replay goes through, and what an edit changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import U8, U64

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
"""One request, laid out as the native core has it."""


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
        allocation: ``uint32[n]``, the block it is about: a row of ``Lives``. 0 where there is none
            (EMPTY_CACHE, POOL_*, FAILED).
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
