"""Rerunning layers in the backward pass, as an edit of the recorded requests."""

from __future__ import annotations

import numpy as np

from fragdoctor.future.edits import Edit
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.operations import (
    NEVER,
    Allocations,
    Operations,
    OpKind,
    frees_of,
    is_free,
    reached_rows,
)
from fragdoctor.trace.replay import Reproduction


def checkpointed(first_row: I64, end_row: I64, forward_end_row: I64) -> Edit:
    """Return the edit that runs layers under ``torch.utils.checkpoint``.

    Whatever a layer keeps for the backward pass, except its output, is freed when the layer ends
    and made again, with its temporaries, right before the backward pass reaches the layer.

    Each call of a layer begins at an event of ``first_row`` (ascending) and ends at one of
    ``end_row``.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        calls = _Calls(ops, first_row, end_row, forward_end_row)
        return calls.recomputed()

    return Edit("layers checkpointed", change)


class _Calls:
    """The calls of layers among the operations: what each keeps, and when it is needed again."""

    def __init__(self, ops: Operations, first_row: I64, end_row: I64, forward_end_row: I64) -> None:
        self.ops, self.lives = ops, Allocations(ops)
        reached = reached_rows(ops)
        self.reached = reached
        self.begin = np.searchsorted(reached, first_row)
        self.end = np.searchsorted(reached, end_row)
        self.forward_end = np.searchsorted(reached, forward_end_row)
        self._find_kept()
        self._find_wanted()

    def _find_kept(self) -> None:
        """Find what each call keeps for the backward pass, except its output."""
        born, n = self.lives.born, len(self.lives.born)
        at = np.searchsorted(self.begin, born, side="right") - 1
        inside = (born >= 0) & (at >= 0) & (born < self.end[np.maximum(at, 0)])
        self.call = np.where(inside, at, -1)
        outlives = self.lives.dies >= self.forward_end[np.maximum(at, 0)]
        self.is_kept = inside & outlives
        kept = np.flatnonzero(self.is_kept)
        kept = kept[np.argsort(born[kept], kind="stable")]
        # The last block that a call keeps is its output: the next call's input, kept anyway.
        last = np.append(np.diff(self.call[kept]) > 0, True)[: len(kept)]
        is_output = np.zeros(n, np.bool_)
        is_output[kept[last]] = True
        self.is_inner = self.is_kept & ~is_output

    def _find_wanted(self) -> None:
        """Find the operation before which the backward pass reaches each call.

        By then it has freed what the next call kept, or what the loss kept after the last call,
        and nothing of this one. ``NEVER`` if the trace does not get there.
        """
        n = len(self.begin)
        lives, inner = self.lives, np.flatnonzero(self.is_inner)
        freed = inner[lives.dies[inner] < NEVER]
        first, last = np.full(n, NEVER), np.full(n, -1)
        np.minimum.at(first, self.call[freed], lives.dies[freed])
        np.maximum.at(last, self.call[freed], lives.dies[freed])
        behind = np.append(last[1:], -1)
        is_last = np.append(self.forward_end[1:] != self.forward_end[:-1], True)[:n]
        for i in np.flatnonzero(is_last).tolist():
            low, high = int(self.end[i]), int(self.forward_end[i])
            ids = self.ops.allocation[low:high][self.ops.kind[low:high] == OpKind.MALLOC]
            done = lives.dies[ids]
            done = done[(done >= high) & (done < first[i])]
            behind[i] = int(done.max(initial=-1))
        after = np.where(behind >= 0, behind + 1, first)
        self.wanted = np.where(first == NEVER, NEVER, np.minimum(after, first))

    def recomputed(self) -> Operations:
        """Return the operations with each call rerun when it is needed."""
        ops, lives = self.ops, self.lives
        inner = np.flatnonzero(self.is_inner)
        # Rerun up to the last result that the backward pass needs; PyTorch stops there.
        stop = self.begin.copy()
        np.maximum.at(stop, self.call[inner], lives.born[inner] + 1)
        again = np.flatnonzero(self.wanted < NEVER)
        length = stop[again] - self.begin[again]
        source = np.repeat(self.begin[again] - np.cumsum(length) + length, length)
        source += np.arange(int(length.sum()))
        call = np.repeat(again, length)
        of = ops.allocation[source]
        is_own = self.call[of] == call
        made = is_own & (ops.kind[source] == OpKind.MALLOC)
        new_id = np.zeros(len(lives.born), np.uint32)
        first_new = len(lives.born)
        new_id[of[made]] = first_new + np.arange(int(made.sum()), dtype=np.uint32)
        freed = is_own & is_free(ops.kind[source]) & (new_id[of] > 0)
        chosen = made | freed
        rerun = ops.table[source[chosen]].copy()
        rerun["allocation"] = new_id[of[chosen]]
        rerun["kind"][freed[chosen]] = OpKind.FREE
        # Temporaries that a later layer would have freed end with the call.
        remade = of[made]
        left = remade[~self.is_inner[remade] & (lives.dies[remade] >= stop[self.call[remade]])]
        parts = [
            (self.wanted[call[chosen]], rerun),
            (self.wanted[self.call[left]], frees_of(new_id[left])),
            (self.end[self.call[inner]], frees_of(inner.astype(np.uint32))),
        ]
        table = ops.table.copy()
        is_end = (is_free(ops.kind) | (ops.kind == OpKind.COMPLETE)) & (
            self.is_inner[ops.allocation] & (new_id[ops.allocation] > 0)
        )
        table["allocation"][is_end] = new_id[ops.allocation[is_end]]
        at = np.concatenate([positions for positions, _ in parts])
        new = np.concatenate([operations for _, operations in parts])
        new["row"] = self.reached[np.minimum(at, len(self.reached) - 1)]
        return Operations(np.insert(table, at, new))
