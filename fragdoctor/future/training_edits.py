"""Changes of a training program, as edits of its recorded requests.

Each was compared with programs that were really changed (``tests/future/test_training_edits.py``).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.alignment import ROUNDED_BYTES
from fragdoctor.future.edits import Edit
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import MOST, distinct, is_among
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace.lives import NEVER as NOT_FREED
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
from fragdoctor.units import format_size, plural

FLOAT_BYTES: Final = 4
QUANTIZED_FROM: Final = 4096
"""Elements from which on bitsandbytes keeps a state in eight bits (``min_8bit_size``); smaller
states stay the same."""

MAX_FACTOR: Final = 1000.0

NO_PASSES: Final = (np.zeros(0, np.int64), np.zeros(0, np.int64))

MAX_LOGITS: Final = 4
"""Requests as large as the logits before the loss: as made, cast, shifted, and made contiguous."""

QUANTIZED_BLOCK: Final = 256
"""Elements that share one four-byte scale (``blocksize`` of bitsandbytes' optimizers)."""


def loss_in_chunks(
    forward_rows: tuple[I64, I64], until_row: I64, loss_rows: I64, n_chunks: int
) -> Edit:
    """Return the edit that computes the loss on one part of the tokens after another.

    The largest request of the loss and all requests with the same number of elements (of 1, 2, 4 or
    8 bytes) shrink to one part, from the end of the last layer until the backward pass is there.
    So does what that pass makes for itself and is as large.

    Args:
        forward_rows: events from which on the logits of each forward pass may appear, and events at
            which the passes end.
        until_row: event at which the backward pass of the loss is over.
        loss_rows: events of all requests that the loss makes, ascending.
        n_chunks: number of parts.
    """
    from_row, end_row = forward_rows

    def change(_: Reproduction, ops: Operations) -> Operations:
        is_request = ops.is_request
        reached = reached_rows(ops)
        is_loss = is_request & is_among(ops.row, loss_rows)
        dies = Allocations(ops).dies[ops.allocation]
        table = ops.table.copy()
        bounds = np.searchsorted(reached, np.stack((from_row, end_row, until_row)))
        for low, middle, high in bounds.T.tolist():
            seeds = np.flatnonzero(is_loss[low:middle]) + low
            if not len(seeds):
                continue
            largest = int(ops.size[seeds].max())
            alike = [largest * 2, largest, largest // 2, largest // 4]
            size = table["size"][low:high]
            chosen = is_request[low:high] & np.isin(size, np.array(alike, np.uint64))
            if np.count_nonzero(chosen[: seeds[0] - low]) > MAX_LOGITS:
                continue  # results of the model's layers have that size, so these are not logits
            is_backward = (np.arange(low, high) >= middle) & (ops.kind[low:high] == OpKind.MALLOC)
            # What it keeps are gradients, as of the output layer.
            chosen |= is_backward & (size >= alike[-1])
            chosen &= ~(is_backward & (dies[low:high] >= high))
            size[chosen] = np.maximum(size[chosen] // np.uint64(n_chunks), np.uint64(1))
        return Operations(table)

    return Edit(f"loss in {n_chunks} chunks", change)


def passes_scaled(
    passes: tuple[I64, I64], last_row: int, share: float, forward: tuple[I64, I64] = NO_PASSES
) -> Edit:
    """Return the edit that scales the memory that grows with the batch.

    These are the requests of forward and backward passes, except those that stay for good
    (workspaces) and those that have exactly the size of a parameter (gradients or copies) and are
    not known to be of a forward pass.

    Passes are ranges of events, (first, end), ascending; ``passes`` are all, ``forward`` those
    that are known to be forward passes. The last of these begins at ``last_row``: older blocks that
    still live stay. ``share`` is relative to the present batch.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        lives = Allocations(ops)
        parameters = _parameters(reproduction, lives, int(passes[0][0]))
        reached = reached_rows(ops)
        stays = (lives.dies == NEVER) & (lives.row < last_row)
        chosen = (ops.kind == OpKind.MALLOC) & ~stays[ops.allocation] & _inside(reached, passes)
        chosen |= ops.kind == OpKind.FAILED
        is_copy = is_among(ops.size.astype(np.int64), parameters) & ~_inside(reached, forward)
        chosen &= ~is_copy
        table = ops.table.copy()
        size = table["size"][chosen]
        table["size"][chosen] = np.maximum(np.rint(size * share), 1).astype(np.uint64)
        return Operations(table)

    return Edit(f"batch x {share:g}", change)


def _inside(rows: I64, spans: tuple[I64, I64]) -> Bools:
    """Return which events are in one of the spans, given as (first, end), ascending."""
    first, end = spans
    if not len(first):
        return np.zeros(len(rows), np.bool_)
    at = np.searchsorted(first, rows, side="right") - 1
    found: Bools = (at >= 0) & (rows < end[np.maximum(at, 0)])
    return found


def batch_scaled(share: float) -> Edit:
    """Return the edit that scales the memory that grows with the batch, using the trace's steps.

    Raises:
        ConfigError: if the share is not a positive number.
    """
    if not 0.0 < share <= MAX_FACTOR:
        raise ConfigError(f"The factor must lie between 0 and {MAX_FACTOR:g}.")

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        rows = Steps.of(reproduction.trace).rows
        if not len(rows):
            raise SimulationError(
                "The steps of this trace cannot be told apart.",
                hint='Record with context="all", over more than one step.',
            )
        ends = np.append(rows[1:], reproduction.trace.n_events)
        return passes_scaled((rows, ends), int(rows[-1]), share).change(reproduction, ops)

    return Edit(f"batch x {share:g}", change)


def states_quantized(state_row: I64, temporary_row: I64) -> Edit:
    """Return the edit that keeps the optimizer's states in eight bits, updated by one kernel.

    A float32 state shrinks to a byte per element and a scale per block, as in bitsandbytes.

    Events of ``state_row`` request states, and those of ``temporary_row`` temporaries of the step;
    both are ascending.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        table = ops.table.copy()
        n = ops.size.astype(np.int64) // FLOAT_BYTES
        is_state = ops.is_request & is_among(ops.row, state_row)
        chosen = is_state & (n >= QUANTIZED_FROM)
        size = n[chosen] + -(-n[chosen] // QUANTIZED_BLOCK) * FLOAT_BYTES
        table["size"][chosen] = size.astype(np.uint64)
        return _without_requests(Operations(table), temporary_row)

    return Edit("optimizer states in 8 bits", change)


def optimizer_one_by_one(temporary_row: I64, first_row: I64) -> Edit:
    """Return the edit that updates one parameter after another: ``foreach=False``.

    Adam then has two temporaries of a parameter's size at a time; the largest of each pass counts.

    Events of ``temporary_row`` request temporaries of the optimizer's step; each pass of the step
    begins at an event of ``first_row``. Both are ascending.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        temporary = _requested_at(ops, temporary_row)
        lives = Allocations(ops)
        ids = np.flatnonzero(temporary)
        of_pass = np.searchsorted(first_row, lives.row[ids], side="right")
        order = np.lexsort((lives.size[ids], of_pass))
        last_of_pass = np.append(np.diff(of_pass[order]) > 0, True)[: len(order)]
        largest = np.zeros(len(temporary), np.bool_)
        largest[ids[order[last_of_pass]]] = True
        table = ops.table.copy()
        doubled = largest[ops.allocation] & (ops.kind == OpKind.MALLOC)
        table["size"][doubled] *= np.uint64(2)
        return Operations(table).without(temporary & ~largest)

    return Edit("optimizer without foreach", change)


def step_in_backward(gradient_row: I64, temporary_row: I64) -> Edit:
    """Return the edit that updates each parameter as soon as its gradient exists, then drops it.

    Events of ``gradient_row`` request gradients, and those of ``temporary_row`` temporaries of the
    optimizer's step; both are ascending.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        kept = _without_requests(ops, temporary_row)
        return _freed_at_once(kept, _requested_at(kept, gradient_row))

    return Edit("optimizer step in the backward pass", change)


def requests_removed(rows: I64, name: str = "") -> Edit:
    """Return the edit that leaves out what some events make, as if it were made on the host.

    The rows are ascending. Leaving out the temporaries of the optimizer's step stands for updating
    all parameters in one kernel (``fused=True``); leaving out its states too, for the host.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        return _without_requests(ops, rows)

    return Edit(name or f"without {plural(len(rows), 'request')}", change)


def requests_limited(rows: I64, n_bytes: I64) -> Edit:
    """Return the edit that limits the request of each of some events, which are ascending."""

    def change(_: Reproduction, ops: Operations) -> Operations:
        at = np.flatnonzero(ops.is_request & is_among(ops.row, rows))
        size, most = ops.size.copy(), n_bytes[np.searchsorted(rows, ops.row[at])]
        size[at] = np.minimum(size[at], most.astype(np.uint64))
        return ops.with_size(size)

    return Edit(f"{plural(len(rows), 'request')} as large as before at most", change)


def rounded_to_blocks(n_bytes: I64) -> I64:
    """Return the block sizes that serve some requests by default."""
    blocks: I64 = -(-n_bytes // ROUNDED_BYTES) * ROUNDED_BYTES
    return blocks


def requests_divided(n_bytes: int, n_parts: int) -> Edit:
    """Return the edit that asks for one of n parts wherever so many bytes are asked for."""
    wanted = rounded_to_blocks(np.array(n_bytes))

    def change(_: Reproduction, ops: Operations) -> Operations:
        table = ops.table.copy()
        # The size of a request that failed is rounded.
        chosen = ops.is_request & (rounded_to_blocks(table["size"].astype(np.int64)) == wanted)
        table["size"][chosen] = max(n_bytes // n_parts, 1)
        return Operations(table)

    return Edit(f"{format_size(n_bytes)} in {n_parts} parts", change)


def requests_freed_at(rows: I64, row: int) -> Edit:
    """Return the edit that frees what some events make before another event, and no later."""

    def change(_: Reproduction, ops: Operations) -> Operations:
        chosen = _requested_at(ops, rows)
        # Blocks that are freed before that anyway must stay so.
        chosen[ops.allocation[ops.is_end & (reached_rows(ops) < row)]] = False
        freed = np.flatnonzero(chosen).astype(np.uint32)
        return ops.with_ends(freed, np.full(len(freed), row, np.int64))

    return Edit(f"{plural(len(rows), 'request')} freed before event {row}", change)


def buffers_preallocated(rows: I64, n_buffers: int) -> Edit:
    """Return the edit that makes buffers that grow by copying once, as large as they ever get.

    ``rows`` are the events that make them, ascending. If ``n_buffers`` live side by side, request i
    replaces request i - ``n_buffers``.
    """

    def change(_: Reproduction, ops: Operations) -> Operations:
        lives = Allocations(ops)
        made = np.flatnonzero(is_among(lives.row, rows) & (lives.born >= 0))
        made = made[np.argsort(lives.born[made])]
        slot = np.arange(len(made)) % n_buffers
        largest = np.zeros(n_buffers, np.int64)
        np.maximum.at(largest, slot, lives.size[made])
        first, last = made[:n_buffers], made[-n_buffers:]
        last = last[np.argsort(slot[-n_buffers:])] if len(made) >= n_buffers else last
        gone = ops.marked(made[n_buffers:])
        table, is_end = ops.table.copy(), ops.is_end
        of_last = np.zeros(len(lives.born), np.uint32)
        of_last[last] = first
        keeps = np.isin(ops.allocation, last) & is_end  # the end of the last one ends the buffer
        drops = np.isin(ops.allocation, first) & is_end & ~np.isin(ops.allocation, last)
        is_first = np.isin(ops.allocation, first) & (ops.kind == OpKind.MALLOC)
        size = np.zeros(len(lives.born), np.uint64)
        size[first] = largest[: len(first)].astype(np.uint64)
        table["size"][is_first] = size[ops.allocation[is_first]]
        gone_now = gone[ops.allocation] & (ops.kind <= OpKind.COMPLETE) & ~keeps
        table["allocation"][keeps] = of_last[ops.allocation[keeps]]
        return Operations(table[~(gone_now | drops)])

    return Edit("buffers made once", change)


# ---- layers that run again in the backward pass ----------------------------------------------


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
        dies, ends = self.lives.dies, distinct(self.forward_end)
        # What still lives when the second next pass ends, something else keeps.
        until = np.append(ends, [NEVER, NEVER])[np.searchsorted(ends, self.forward_end) + 2]
        of = np.maximum(at, 0)
        self.is_kept = inside & (dies >= self.forward_end[of]) & (dies <= until[of])
        kept = np.flatnonzero(self.is_kept)
        # The backward pass is done with a call's output, the next call's input, before it gets to
        # anything else that the call keeps. If it is not seen, the output is what was made last.
        kept = kept[np.lexsort((-born[kept], self.lives.dies[kept], self.call[kept]))]
        is_first = np.append(True, np.diff(self.call[kept]) > 0)[: len(kept)]
        is_output = np.zeros(n, np.bool_)
        is_output[kept[is_first]] = True
        self.is_inner = self.is_kept & ~is_output

    def _find_wanted(self) -> None:
        """Find the operation before which the backward pass reaches each call.

        An operation of the backward pass makes its gradients and then frees what was kept for it,
        so it begins behind the free before these requests. ``NEVER`` if the trace does not get
        there.
        """
        ops, dies = self.ops, self.lives.dies
        first, last = np.full(len(self.begin), NEVER), np.full(len(self.begin), -1)
        freed = np.flatnonzero(self.is_inner & (dies < NEVER))
        np.minimum.at(first, self.call[freed], dies[freed])
        np.maximum.at(last, self.call[freed], dies[freed])
        # By then it has freed what the next call of the pass kept.
        is_followed = np.append(self.forward_end[1:] == self.forward_end[:-1], False)[: len(first)]
        behind = np.where(is_followed, np.append(last[1:], -1), -1)
        at = np.arange(len(ops))
        made = np.maximum.accumulate(np.where(ops.kind == OpKind.MALLOC, at, -1))
        ended = np.maximum.accumulate(np.where(ops.is_end, at, -1))
        # The last operation of a layer may have kept nothing but its own result, as a ReLU does.
        result = np.full(len(first), NEVER)
        outputs = np.flatnonzero(self.is_kept & ~self.is_inner)
        result[self.call[outputs]] = dies[outputs]
        seen = (behind >= 0) & (result < NEVER)
        keeps_own = np.zeros(len(first), np.bool_)
        keeps_own[seen] = made[result[seen]] > behind[seen]
        keeps_own[~seen] = np.count_nonzero(keeps_own[seen]) > MOST * np.count_nonzero(seen)
        first = np.where(keeps_own, np.minimum(first, result), first)
        self.is_needed = self.is_inner | (self.is_kept & keeps_own[self.call])
        reached = first < NEVER
        self.wanted = first
        begins = ended[np.maximum(made[first[reached]], 0)]
        self.wanted[reached] = np.maximum.reduce(
            [begins + 1, behind[reached] + 1, self.forward_end[reached]]
        )

    def recomputed(self) -> Operations:
        """Return the operations with each call rerun when it is needed."""
        ops, lives = self.ops, self.lives
        inner, needed = np.flatnonzero(self.is_inner), np.flatnonzero(self.is_needed)
        # Rerun up to the last result that the backward pass needs; PyTorch stops there.
        stop = self.begin.copy()
        np.maximum.at(stop, self.call[needed], lives.born[needed] + 1)
        again = np.flatnonzero(self.wanted < NEVER)
        length = stop[again] - self.begin[again]
        source = np.repeat(self.begin[again] - np.cumsum(length) + length, length)
        source += np.arange(int(length.sum()))
        call = np.repeat(again, length)
        of = ops.allocation[source]
        is_own = self.call[of] == call
        made = is_own & (ops.kind[source] == OpKind.MALLOC)
        new_id = np.zeros(len(lives.born), np.uint32)
        new_id[of[made]] = len(lives.born) + np.arange(int(made.sum()), dtype=np.uint32)
        freed = is_own & is_free(ops.kind[source]) & (new_id[of] > 0)
        chosen = made | freed
        rerun = ops.table[source[chosen]].copy()
        rerun["allocation"] = new_id[of[chosen]]
        rerun["kind"][freed[chosen]] = OpKind.FREE
        # Temporaries that a later layer would have freed end with the call.
        remade = of[made]
        left = remade[~self.is_needed[remade] & (lives.dies[remade] >= stop[self.call[remade]])]
        # A result that the call itself needs takes the place of the first one, which its user had.
        used = needed[~self.is_inner[needed] & (new_id[needed] > 0)]
        parts = [
            (self.wanted[self.call[used]], frees_of(used.astype(np.uint32))),
            (self.wanted[call[chosen]], rerun),
            (self.wanted[self.call[left]], frees_of(new_id[left])),
            (self.end[self.call[inner]], frees_of(inner.astype(np.uint32))),
        ]
        table = ops.table.copy()
        is_end = ops.is_end & self.is_needed[ops.allocation] & (new_id[ops.allocation] > 0)
        table["allocation"][is_end] = new_id[ops.allocation[is_end]]
        at = np.concatenate([positions for positions, _ in parts])
        new = np.concatenate([operations for _, operations in parts])
        new["row"] = self.reached[np.minimum(at, len(self.reached) - 1)]
        return Operations(np.insert(table, at, new))


# ---- building blocks of the edits ------------------------------------------------------------


def _requested_at(ops: Operations, rows: I64) -> Bools:
    """Return which allocations are requested at some events."""
    is_here = (ops.kind == OpKind.MALLOC) & is_among(ops.row, rows)
    return ops.marked(ops.allocation[is_here])


def _without_requests(ops: Operations, rows: I64) -> Operations:
    """Return the operations without the requests of some events, including those that failed."""
    is_failed = (ops.kind == OpKind.FAILED) & is_among(ops.row, rows)
    gone = _requested_at(ops, rows)
    return Operations(ops.table[~is_failed]).without(gone)


def _parameters(reproduction: Reproduction, lives: Allocations, first_row: int) -> I64:
    """Return the sizes of blocks made before a row, or before the trace, that stay."""
    made = lives.size[(lives.row >= 0) & (lives.row < first_row) & (lives.dies == NEVER)]
    trace = reproduction.trace
    stays = trace.lives_of_program.free[: trace.lives.n_initial] == NOT_FREED
    return np.concatenate((made, trace.initial["block_requested"][stays].astype(np.int64)))


def _freed_at_once(ops: Operations, chosen: Bools) -> Operations:
    """Return the operations with the chosen allocations freed right after they are made."""
    kept = Operations(ops.table[~(chosen[ops.allocation] & ops.is_end)])
    at = np.flatnonzero(chosen[kept.allocation] & (kept.kind == OpKind.MALLOC))
    new = frees_of(kept.allocation[at])
    new["row"] = kept.row[at]
    # Free after the next request: a gradient still exists while the next one is computed.
    return Operations(np.insert(kept.table, np.minimum(at + 2, len(kept)), new))
