"""Calls of modules in a rehearsed trace: what each leaves for its backward pass, and what made it.

Blocks are given as rows of ``Lives``; events are counted from the beginning of the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from fragdoctor.model.snapshot import I64
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.trace import Trace


class Product(Struct, frozen=True):
    """A counted operation of a call.

    Attributes:
        n_flops: the cost of repeating it.
        rows: blocks that it made, other than outputs of the call.
        n_bytes: size of these blocks.
        can_be_kept: whether their contents stay as they were made.
    """

    n_flops: int
    rows: frozenset[int]
    n_bytes: int
    can_be_kept: bool


class TraceBlocks:
    """The blocks of a trace, by address and by the event that allocates them."""

    def __init__(self, trace: Trace) -> None:
        lives = trace.lives
        self.n_rows = lives.n_regular
        self.start, self.free = lives.start[: self.n_rows], lives.free[: self.n_rows]
        self.is_lasting = self.free == NEVER
        self.size_bytes, self.requested_bytes = lives.size_bytes, lives.requested_bytes
        self.stack = lives.stack
        self._rows: dict[int, list[int]] = defaultdict(list)
        for row, address in enumerate(lives.address[: self.n_rows].tolist()):
            self._rows[address].append(row)

    def made_before(self, event: int) -> int:
        """Return how many blocks were allocated before an event."""
        return int(np.searchsorted(self.start, event))

    def passing_from(self, event: int) -> I64:
        """Return the blocks that are allocated from an event on and do not last."""
        return self.made_before(event) + np.flatnonzero(~self.is_lasting[self.made_before(event) :])

    def at(self, addresses: Iterable[int], event: int) -> set[int]:
        """Return the blocks at some addresses after this many events."""
        return {
            row
            for address in addresses
            for row in self._rows.get(address, ())
            if self.start[row] < event <= self.free[row]
        }

    def bytes_of(self, rows: Iterable[int]) -> int:
        """Return the total size of blocks."""
        return int(sum(self.size_bytes[row] for row in rows))


class ModuleCall:
    """A call of a module that records a graph.

    Attributes:
        begin, end, backward: number of events before it, after it, and before its backward pass.
        is_repeated: whether there is a backward pass; if not, its graph is only let go.
        first, last: the range of blocks that it made, with the last exclusive.
        left: the blocks that it left for its backward pass, without its outputs.
        outputs, inputs: blocks that it returned, and that it was given.
        saves_output: whether the backward pass of its last operation needs that one's result.
        again_end: event up to which it is repeated: the last block that is needed, or the last
            product, which keeps its factors, even if they are no blocks of the call.
        products: its counted operations.
    """

    def __init__(self, blocks: TraceBlocks, call: Mapping[str, Any]) -> None:
        self.begin: int = call["begin"]
        self.end: int = call["end"]
        self.is_repeated = call["backward"] is not None
        self.backward: int = call["backward"] if self.is_repeated else self.end
        self._blocks = blocks
        self.first, self.last = blocks.made_before(self.begin), blocks.made_before(self.end)
        self.outputs = blocks.at(call["outputs"], self.end)
        self.inputs = blocks.at(call["inputs"], self.begin)
        made = slice(self.first, self.last)
        # Memory that stays for good, such as a library's workspace, is not for the backward pass.
        outlives = (blocks.free[made] >= self.backward) & ~blocks.is_lasting[made]
        self.left = frozenset((self.first + np.flatnonzero(outlives)).tolist()) - self.outputs
        self.saves_output: bool = call["saves_output"]
        self._last_product = self._begin_of_last(call["products"])
        self.again_end = self.end
        if not self.saves_output:
            self.again_end = max(self._end_of_operation(), self._last_product)
        self.products = [self._product(one) for one in call["products"]]

    def _end_of_operation(self) -> int:
        """Return the event after the last block of the operation that makes the last one needed."""
        if not self.left:
            return self.begin
        start, stack = self._blocks.start, self._blocks.stack
        row = max(self.left)
        while row + 1 < self.last and start[row + 1] == start[row] + 1:
            if stack[row + 1] != stack[row]:
                break
            row += 1
        return int(start[row]) + 1

    def _begin_of_last(self, products: Sequence[Mapping[str, Any]]) -> int:
        """Return the event before the last product makes its result."""
        if not products:
            return self.begin
        rows = self._blocks.at(products[-1]["addresses"], products[-1]["event"])
        return int(min((self._blocks.start[row] for row in rows), default=self.begin))

    def _product(self, product: Mapping[str, Any]) -> Product:
        rows = frozenset(self._blocks.at(product["addresses"], product["event"]) - self.outputs)
        is_again = self.saves_output or product["event"] < self.again_end
        is_again |= product["event"] <= self._last_product
        is_again |= not rows.isdisjoint(self.left)
        return Product(
            product["n_flops"] if is_again and self.is_repeated else 0,
            rows,
            self._blocks.bytes_of(rows),
            # By then there may be another block at that address.
            not any(rows & self._blocks.at(product["addresses"], n) for n in product["changes"]),
        )

    def kept_rows(self, kept: Iterable[int]) -> frozenset[int]:
        """Return the blocks of some of its products."""
        return frozenset(row for n in kept for row in self.products[n].rows)

    def saved_bytes(self, kept: Iterable[int]) -> int:
        """Return the bytes saved between the passes by checkpointing it, with some results kept."""
        results, blocks = self.kept_rows(kept), self._blocks
        # Inputs stay alive that would have been freed.
        held = (row for row in self.inputs if blocks.free[row] < self.backward)
        gone, more = blocks.bytes_of(self.left - results), blocks.bytes_of(results - self.left)
        return gone - more - blocks.bytes_of(held)

    def n_flops(self, kept: Iterable[int]) -> int:
        """Return the operations that are repeated if some results are kept."""
        numbers = {*kept}
        return sum(one.n_flops for n, one in enumerate(self.products) if n not in numbers)
