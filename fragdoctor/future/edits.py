"""Code-level what-ifs, as edits of the list of requests.

Each function returns an ``Edit``: a name for people, and a change that ``simulate`` applies to the
requests of the reproduction before it replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.frozen import frozen
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I32, I64, U64, Bools
from fragdoctor.trace.operations import OPERATION, Operations, OpKind
from fragdoctor.trace.replay import Reproduction
from fragdoctor.units import MIB, format_size, plural

MIN_STEPS = 2
MAX_FACTOR = 1000.0
_PIECE = 1 << 20  # operations that are looked at together where columns of all would be many
_FREES = (OpKind.FREE, OpKind.FREE_PENDING)


@frozen
class Edit:
    """A change of the code.

    Attributes:
        name: what is done, for people.
        change: the requests of a reproduction, changed; raises SimulationError where the trace does
            not say enough for it.
    """

    name: str
    change: Callable[[Reproduction, Operations], Operations]

    def apply(self, reproduction: Reproduction) -> _ext.NativeOps:
        """Return the changed requests.

        Raises:
            SimulationError: the trace does not say enough for this change.
        """
        changed = self.change(reproduction, Operations.of(reproduction.operations))
        return changed.native(reproduction.operations)


def combined(edits: Sequence[Edit]) -> Edit:
    """Return the edit that does several, each on what the ones before it left."""

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        for edit in edits:
            ops = edit.change(reproduction, ops)
        return ops

    return Edit(" + ".join(edit.name for edit in edits), change)


def empty_cache_at(rows: Sequence[int]) -> Edit:
    """Return the edit that calls ``empty_cache()`` before given event rows."""
    wanted = np.array(sorted(set(rows)), np.int64)

    def change(_: Reproduction, ops: Operations) -> Operations:
        return _with_calls(ops, wanted)

    return Edit(f"empty_cache() at {len(wanted)} chosen points", change)


def empty_cache_every(n_requests: int) -> Edit:
    """Return the edit that calls ``empty_cache()`` after every so many requests.

    Raises:
        ConfigError: the number is not positive.
    """
    if n_requests < 1:
        raise ConfigError("The number of requests between calls must be at least 1.")

    def change(_: Reproduction, ops: Operations) -> Operations:
        rows = ops.row[_is_request(ops)].astype(np.int64)
        return _with_calls(ops, rows[n_requests::n_requests])

    return Edit(f"empty_cache() every {n_requests} requests", change)


def empty_cache_each_step() -> Edit:
    """Return the edit that calls ``empty_cache()`` at the beginning of every step but the first."""

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        return _with_calls(ops, _steps(reproduction).rows[1:])

    return Edit("empty_cache() after each step", change)


def largest_step_first() -> Edit:
    """Return the edit that runs the step with the most active memory first, the rest in order.

    What the first step makes and keeps (optimizer state, gradient buffers) is then made in the
    step that runs first.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        steps = _steps(reproduction)
        peaks = reproduction.trace.totals.envelope("active_bytes", steps.rows + 1).high
        largest = int(np.where(is_among(steps.rows, steps.main_rows), peaks, 0).argmax())
        order = [largest, *(i for i in range(len(steps)) if i != largest)]
        return _reordered(ops, steps, np.array(order, np.int64))

    return Edit("largest batch first", change)


def sizes_padded(bucket_bytes: int, from_bytes: int = MIB) -> Edit:
    """Return the edit that pads requests above ``from_bytes`` to multiples of a bucket.

    Raises:
        ConfigError: the bucket is not positive.
    """
    if bucket_bytes < 1:
        raise ConfigError("The bucket must be at least one byte.")

    def padded(size: U64) -> U64:
        bucket = np.uint64(bucket_bytes)
        return (size + bucket - np.uint64(1)) // bucket * bucket

    def change(_: Reproduction, ops: Operations) -> Operations:
        is_padded = _is_request(ops) & (ops.size > from_bytes) & (ops.size < 2**50)
        return _resized(ops, is_padded, padded)

    return Edit(f"sizes padded to {format_size(bucket_bytes)}", change)


def blocks_freed(addresses: Sequence[int], row: int | None = None) -> Edit:
    """Return the edit that does without blocks which are live at the end of the trace.

    They are never made (or, if older than the trace, freed before it), or freed just before an
    event row where one is given.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        allocations = _live_at_end(reproduction, addresses)
        if row is not None:
            return _freed_before(ops, allocations, np.full(len(allocations), row, np.int64))
        old = allocations[allocations < reproduction.trace.lives.n_initial]
        return _freed_before(_without(ops, allocations), old, np.zeros(len(old), np.int64))

    return Edit(f"without {plural(len(set(addresses)), 'block')}", change)


def without_noted(note: str) -> Edit:
    """Return the edit that leaves out requests which a trace notes so (``user_metadata``)."""

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        trace = reproduction.trace
        events = trace.snapshot.events
        notes = events.user_metadata[events.device_slice(trace.device)]
        lives = trace.lives
        rows = np.arange(lives.n_initial, lives.n_regular)
        texts = trace.snapshot.strings
        is_noted = [n >= 0 and texts[n] == note for n in notes[lives.start[rows]].tolist()]
        return _without(ops, rows[is_noted].astype(np.uint32))

    return Edit(f"without {note}", change)


def blocks_moved_to_start(addresses: Sequence[int]) -> Edit:
    """Return the edit that makes blocks which are live at the end before anything else."""

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        allocations = _live_at_end(reproduction, addresses)
        is_moved = np.isin(ops.allocation, allocations) & (ops.kind == OpKind.MALLOC)
        order = np.concatenate((np.nonzero(is_moved)[0], np.nonzero(~is_moved)[0]))
        return _taken(ops, order)

    return Edit(f"{plural(len(set(addresses)), 'block')} made at the start", change)


def leak_removed(allocations: I64, ends: I64) -> Edit:
    """Return the edit that frees each allocation before the row at which its step ends.

    One whose step is still under way at the end of the trace stays.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        is_closed = ends <= reproduction.trace.n_events
        gone = allocations[is_closed].astype(np.uint32)
        is_freed = np.isin(ops.kind, (*_FREES, OpKind.COMPLETE))
        goes_later = is_freed & np.isin(ops.allocation, gone)
        return _freed_before(_taken(ops, np.flatnonzero(~goes_later)), gone, ends[is_closed])

    return Edit(f"{plural(len(allocations), 'survivor')} freed at the end of their step", change)


def batch_scaled(factor: float) -> Edit:
    """Return the edit that scales the memory that grows with the batch.

    Taken for that are requests inside steps that do not outlive the next step, unless some block
    made before the steps (a parameter) has exactly their size: then it is a gradient or a copy.

    Raises:
        ConfigError: the factor is not a positive number.
    """
    if not 0.0 < factor <= MAX_FACTOR:
        raise ConfigError(f"The factor must lie between 0 and {MAX_FACTOR:g}.")

    def scaled(size: U64) -> U64:
        scaled_size: U64 = np.maximum(np.rint(size * factor), 1).astype(np.uint64)
        return scaled_size

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        is_scaled = _is_activation(reproduction, ops, _steps(reproduction)) & (ops.size < 2**50)
        return _resized(ops, is_scaled, scaled)

    return Edit(f"batch x {factor:g}", change)


# ---- what the edits are made of --------------------------------------------------------------


def _steps(reproduction: Reproduction) -> Steps:
    steps = Steps.of(reproduction.trace)
    if len(steps) < MIN_STEPS or steps.method == "sizes":
        raise SimulationError(
            "The steps of this trace cannot be told apart.",
            hint='Record with context="all", over more than one step.',
        )
    return steps


def _is_request(ops: Operations) -> Bools:
    chosen: Bools = (ops.kind == OpKind.MALLOC) | (ops.kind == OpKind.FAILED)
    return chosen


def _resized(ops: Operations, chosen: Bools, change: Callable[[U64], U64]) -> Operations:
    """Return the operations with other sizes of the chosen ones; piece by piece, to save memory."""
    table = ops.table.copy()
    for low in range(0, len(table), _PIECE):
        size, is_chosen = table["size"][low : low + _PIECE], chosen[low : low + _PIECE]
        size[is_chosen] = change(size[is_chosen])
    return Operations(table)


def _is_one_of(values: U64, some: U64) -> Bools:
    """Return whether each value is among ``some``; piece by piece."""
    result = np.zeros(len(values), np.bool_)
    for low in range(0, len(values), _PIECE):
        result[low : low + _PIECE] = is_among(values[low : low + _PIECE], some)
    return result


def _taken(ops: Operations, order: npt.NDArray[np.int64]) -> Operations:
    return Operations(ops.table[order])


def _inserted(ops: Operations, at: I64, kind: OpKind, allocation: U64, rows: I64) -> Operations:
    """Return the operations with new ones before the given positions."""
    new = np.zeros(len(at), OPERATION)
    new["kind"], new["allocation"], new["row"] = kind, allocation, rows
    return Operations(np.insert(ops.table, at, new))


def _positions(ops: Operations, rows: I64) -> I64:
    """Return the first operation that comes from each row or a later one."""
    reached = np.maximum.accumulate(ops.row)
    wanted = np.clip(rows, 0, np.iinfo(np.uint32).max).astype(np.uint32)  # as narrow as the rows
    return np.searchsorted(reached, wanted, side="left").astype(np.int64)


def _with_calls(ops: Operations, rows: I64) -> Operations:
    none = np.zeros(len(rows), np.uint64)
    return _inserted(ops, _positions(ops, rows), OpKind.EMPTY_CACHE, none, rows)


def _freed_before(ops: Operations, allocations: npt.NDArray[np.uint32], rows: I64) -> Operations:
    """Return the operations with allocations freed just before rows."""
    at = _positions(ops, rows)
    return _inserted(ops, at, OpKind.FREE, allocations.astype(np.uint64), rows)


def _without(ops: Operations, allocations: npt.NDArray[np.uint32]) -> Operations:
    """Return the operations without those on some allocations."""
    is_gone = np.isin(ops.allocation, allocations) & (ops.kind <= OpKind.COMPLETE)
    return _taken(ops, np.nonzero(~is_gone)[0])


def _live_at_end(reproduction: Reproduction, addresses: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the allocations that lie at these addresses at the end of the trace.

    Raises:
        SimulationError: there is none at one of them.
    """
    asked = sorted(set(addresses))
    wanted = np.array([a for a in asked if 0 <= a < 2**64], np.uint64)
    lives = reproduction.trace.lives
    rows = np.flatnonzero(lives.survives[: lives.n_regular])
    rows = rows[is_among(lives.address[rows], wanted)]
    rows = rows[np.argsort(lives.address[rows])]
    is_live = is_among(wanted, lives.address[rows])
    missing = [a for a in asked if not 0 <= a < 2**64] + wanted[~is_live].tolist()
    if missing:
        raise SimulationError(
            f"No block is live at {missing[0]:#x} at the end of the trace."
            + (f" ({len(missing)} such addresses)" if len(missing) > 1 else "")
        )
    return np.sort(rows).astype(np.uint32)


def _is_activation(reproduction: Reproduction, ops: Operations, steps: Steps) -> Bools:
    step = _step_of(ops, steps)
    born, dies = _life_in_steps(ops, step)
    lives_on = ((dies < 0) | (dies > born + 1))[ops.allocation]
    made_in_set_up = ops.size[(ops.kind == OpKind.MALLOC) & (step < 0) & lives_on]
    parameter_sizes = distinct(
        np.append(made_in_set_up, reproduction.trace.initial.block_requested)
    )
    # In the last step nothing is freed any more after a failure: what lives there may be short.
    is_short = ~lives_on | (step == len(steps) - 1) | (ops.kind == OpKind.FAILED)
    chosen: Bools = _is_request(ops) & (step >= 0) & is_short
    chosen &= ~_is_one_of(ops.size, parameter_sizes)
    return chosen


def _reordered(ops: Operations, steps: Steps, order: I64) -> Operations:
    """Return the operations with the steps run in another order.

    A free in a later step than its allocation keeps its distance in steps and its place within the
    step. What the first step makes and keeps moves to the step that runs first.
    """
    n_steps = len(steps)
    place = np.empty(n_steps, np.int32)  # step -> when it runs
    place[order] = np.arange(n_steps, dtype=np.int32)
    step = _step_of(ops, steps)
    own = np.maximum(step, 0)
    begin = np.searchsorted(step, np.arange(n_steps + 1, dtype=np.int32))
    length = np.maximum(np.diff(begin), 1).astype(np.float64)
    born, dies = _life_in_steps(ops, step)
    kept_by_first = ((born == 0) & ((dies < 0) | (dies > 1)))[ops.allocation]
    origin = born[ops.allocation]
    is_moved = (ops.kind == OpKind.MALLOC) & (step >= 0) & kept_by_first
    is_late = np.isin(ops.kind, (*_FREES, OpKind.COMPLETE)) & (step >= 0) & (origin < step)
    follow = np.where(
        kept_by_first | (origin < 0), step, place[np.maximum(origin, 0)] + step - origin
    )
    del kept_by_first, origin  # columns of a long trace: the fewer at a time the better
    when = np.where(is_late, np.minimum(follow, n_steps - 1), np.where(is_moved, 0, place[own]))
    is_behind = is_late & (follow >= n_steps)
    del follow
    # Own operations keep their order; those that come from elsewhere keep their share of the step.
    at = np.arange(len(ops), dtype=np.float64)
    at[begin[0] :] -= begin[own[begin[0] :]]
    moved = np.flatnonzero(is_moved | is_late)
    at[moved] = at[moved] / length[own[moved]] * length[order[when[moved]]]
    at[is_behind] = np.inf
    when[step < 0] = -1
    del own, moved, is_moved, is_late, is_behind, step, born, dies
    sequence = np.lexsort((at, when))
    del at, when
    return _taken(ops, sequence)


def _step_of(ops: Operations, steps: Steps) -> I32:
    """Return the step of each operation, -1 before the first; ascending."""
    reached = np.maximum.accumulate(ops.row)
    starts = np.clip(steps.rows, 0, np.iinfo(np.uint32).max).astype(np.uint32)
    step = np.searchsorted(starts, reached, side="right")
    return (step - 1).astype(np.int32)


def _life_in_steps(ops: Operations, step: I32) -> tuple[I32, I32]:
    """Return per allocation the step that made it (-1: set-up) and freed it (-1: none)."""
    n = int(ops.allocation.max(initial=0)) + 1
    born, dies = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    is_made, is_freed = ops.kind == OpKind.MALLOC, np.isin(ops.kind, _FREES)
    born[ops.allocation[is_made]] = step[is_made]
    dies[ops.allocation[is_freed]] = step[is_freed]
    return born, dies
