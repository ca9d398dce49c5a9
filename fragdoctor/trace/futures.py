"""Operations of the future, and how the steps to come may differ from what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace.operations import OpKind

FUTURE_OPERATION: Final = np.dtype(
    {
        "names": [name for name, _, _ in _ext.FUTURE_OP_FIELDS],
        "formats": [form for _, form, _ in _ext.FUTURE_OP_FIELDS],
        "offsets": [offset for _, _, offset in _ext.FUTURE_OP_FIELDS],
        "itemsize": _ext.FUTURE_OP_BYTES,
    }
)
"""One operation of the future, laid out as the native core has it (``future.h``)."""

Table = npt.NDArray[np.void]


@dataclass(frozen=True)
class Spread:
    """How far the steps to come may be from what is expected of them.

    Attributes:
        less, more: shares by which what is made and freed within a step may be smaller or larger.
        irregular: slots of what some steps keep and others do not make.
        trend: bytes by which the size in each slot rises with each step, where it does not rise
            evenly.
        varies: slots that may be larger; None where all may.
        slowed: share of their growth that sizes may go on with at least, and the slots that grow
            evenly and keep it; None where all do.
    """

    less: float
    more: float
    irregular: Bools
    trend: I64
    varies: Bools | None
    slowed: tuple[float, Bools] | None

    def lower(self, table: Table) -> Table | None:
        """Return a future that asks for less; None where that is not to be expected."""
        is_irregular = bool(self.irregular.any())
        if not self.less and not is_irregular and self.slowed is None:
            return None
        lower, is_made = table.copy(), table["kind"] == OpKind.MALLOC
        if self.less or is_irregular:
            passing = is_made & (table["age"] == 0)
            smaller = table["size"][passing] * max(1 - self.less, 0)
            lower["size"][passing] = smaller.astype(np.uint64)
            lower["age"][is_made & self.irregular[table["slot"]] & (table["age"] < 0)] = 0
        if self.slowed is not None:
            pace, is_even = self.slowed
            growth = table["growth"]
            lower["growth"] = np.where(is_even[table["slot"]], growth, growth * pace)
        return lower

    def higher(self, table: Table) -> Table | None:
        """Return a future that asks for more; None where that is not to be expected."""
        is_made = table["kind"] == OpKind.MALLOC
        rises = is_made & (self.trend[table["slot"]] > 0)
        if not self.more and not rises.any():
            return None
        higher = table.copy()
        higher["growth"][rises] += self.trend[table["slot"][rises]]
        chosen = is_made & (table["age"] == 0)
        if self.varies is not None:
            chosen &= self.varies[table["slot"]]
        higher["size"][chosen] = (table["size"][chosen] * (1 + self.more)).astype(np.uint64)
        return higher


def without_growth(table: Table) -> Table:
    """Return a table of steps that are as large as they were."""
    result = table.copy()
    result["growth"] = 0
    return result


def joined(*parts: Table) -> Table:
    """Return tables of future operations after each other; ``concatenate`` would repack them."""
    result = np.empty(sum(len(part) for part in parts), FUTURE_OPERATION)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result
