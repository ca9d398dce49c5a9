"""Code-level what-ifs, as edits of the list of requests.

Each function returns an ``Edit``: a name for people, and a change that ``simulate`` applies to the
requests of the reproduction before replaying them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I32, I64, U64
from fragdoctor.trace.operations import OPERATION, Operations, OpKind, is_free
from fragdoctor.trace.replay import Reproduction
from fragdoctor.units import MIB, format_size, plural

MIN_STEPS = 2
_PIECE = 1 << 20  # operations to process at a time where columns for all of them take much memory


class Edit(Struct, frozen=True):
    """A change of the code.

    Attributes:
        name: what the change does, for people.
        change: returns the changed requests of a reproduction; raises SimulationError if the trace
            does not say enough for it.
    """

    name: str
    change: Callable[[Reproduction, Operations], Operations]

    def apply(self, reproduction: Reproduction) -> _ext.NativeOps:
        """Return the changed requests.

        Raises:
            SimulationError: if the trace does not say enough for this change.
        """
        changed = self.change(reproduction, Operations.of(reproduction.operations))
        return changed.native(reproduction.operations)


def combined(edits: Sequence[Edit]) -> Edit:
    """Return the edit that applies several edits, each to the result of the ones before it."""

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


def largest_step_first() -> Edit:
    """Return the edit that runs the step with the most active memory first, the rest in order.

    Whatever the first step makes and keeps (optimizer state, gradient buffers) is then made in the
    step that runs first.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        steps = steps_of(reproduction)
        peaks = reproduction.trace.totals.envelope("active_bytes", steps.rows + 1).high
        largest = int(np.where(is_among(steps.rows, steps.main_rows), peaks, 0).argmax())
        order = [largest, *(i for i in range(len(steps)) if i != largest)]
        return _reordered(ops, steps, np.array(order, np.int64))

    return Edit("largest batch first", change)


def sizes_padded(bucket_bytes: int, from_bytes: int = MIB) -> Edit:
    """Return the edit that pads requests above ``from_bytes`` to multiples of a bucket.

    Raises:
        ConfigError: if the bucket is not positive.
    """
    if bucket_bytes < 1:
        raise ConfigError("The bucket must be at least one byte.")

    def padded(size: U64) -> U64:
        bucket = np.uint64(bucket_bytes)
        return (size + bucket - np.uint64(1)) // bucket * bucket

    def change(_: Reproduction, ops: Operations) -> Operations:
        is_padded = ops.is_request & (ops.size > from_bytes) & (ops.size < 2**50)
        table = ops.table.copy()
        for low in range(0, len(table), _PIECE):  # piece by piece, to save memory
            size, chosen = table["size"][low : low + _PIECE], is_padded[low : low + _PIECE]
            size[chosen] = padded(size[chosen])
        return Operations(table)

    return Edit(f"sizes padded to {format_size(bucket_bytes)}", change)


def blocks_freed(addresses: Sequence[int], row: int | None = None) -> Edit:
    """Return the edit that removes blocks that are live at the end of the trace.

    They are never made (or, if older than the trace, freed before it). If an event row is given,
    they are freed just before it instead.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        allocations = _live_at_end(reproduction, addresses)
        if row is not None:
            return ops.with_ends(allocations, np.full(len(allocations), row, np.int64))
        old = allocations[allocations < reproduction.trace.lives.n_initial]
        rest = ops.without(ops.marked(allocations))
        return rest.with_ends(old, np.zeros(len(old), np.int64))

    return Edit(f"without {plural(len(set(addresses)), 'block')}", change)


def without_noted(note: str) -> Edit:
    """Return the edit that leaves out requests with this note in the trace (``user_metadata``)."""

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        trace = reproduction.trace
        events = trace.snapshot.events
        notes = events.user_metadata[events.device_slice(trace.device)]
        lives = trace.lives
        rows = np.arange(lives.n_initial, lives.n_regular)
        texts = trace.snapshot.strings
        is_noted = [n >= 0 and texts[n] == note for n in notes[lives.start[rows]].tolist()]
        return ops.without(ops.marked(rows[is_noted]))

    return Edit(f"without {note}", change)


def leak_removed(allocations: I64, ends: I64) -> Edit:
    """Return the edit that frees each allocation before the row at which its step ends.

    An allocation whose step is still in progress at the end of the trace stays.
    """

    def change(reproduction: Reproduction, ops: Operations) -> Operations:
        is_closed = ends <= reproduction.trace.n_events
        return ops.with_ends(allocations[is_closed].astype(np.uint32), ends[is_closed])

    return Edit(f"{plural(len(allocations), 'survivor')} freed at the end of their step", change)


# ---- building blocks of the edits ------------------------------------------------------------


def steps_of(reproduction: Reproduction, least: int = MIN_STEPS) -> Steps:
    """Return the steps of a trace, at least this many.

    Raises:
        SimulationError: if the steps cannot be told apart.
    """
    steps = Steps.of(reproduction.trace)
    if len(steps) < least:
        raise SimulationError(
            "The steps of this trace cannot be told apart.",
            hint='Record with context="all", over more than one step.',
        )
    return steps


def _with_calls(ops: Operations, rows: I64) -> Operations:
    new = np.zeros(len(rows), OPERATION)
    new["kind"], new["row"] = OpKind.EMPTY_CACHE, rows
    return Operations(np.insert(ops.table, ops.positions(rows), new))


def _live_at_end(reproduction: Reproduction, addresses: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the allocations that lie at these addresses at the end of the trace.

    Raises:
        SimulationError: if no allocation lies at one of them.
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
    is_late = ops.is_end & (step >= 0) & (origin < step)
    follow = np.where(
        kept_by_first | (origin < 0), step, place[np.maximum(origin, 0)] + step - origin
    )
    del kept_by_first, origin  # columns of a long trace are large: keep few at a time
    when = np.where(is_late, np.minimum(follow, n_steps - 1), np.where(is_moved, 0, place[own]))
    is_behind = is_late & (follow >= n_steps)
    del follow
    # A step's own operations keep their order; operations from elsewhere keep their relative place.
    at = np.arange(len(ops), dtype=np.float64)
    at[begin[0] :] -= begin[own[begin[0] :]]
    moved = np.flatnonzero(is_moved | is_late)
    at[moved] = at[moved] / length[own[moved]] * length[order[when[moved]]]
    at[is_behind] = np.inf
    when[step < 0] = -1
    del own, moved, is_moved, is_late, is_behind, step, born, dies
    sequence = np.lexsort((at, when))
    del at, when
    return Operations(ops.table[sequence])


def _step_of(ops: Operations, steps: Steps) -> I32:
    """Return the step of each operation, -1 before the first; ascending."""
    reached = np.maximum.accumulate(ops.row)
    starts = np.clip(steps.rows, 0, np.iinfo(np.uint32).max).astype(np.uint32)
    step = np.searchsorted(starts, reached, side="right")
    return (step - 1).astype(np.int32)


def _life_in_steps(ops: Operations, step: I32) -> tuple[I32, I32]:
    """Return the steps that made (-1: setup) and freed (-1: none) each allocation."""
    n = int(ops.allocation.max(initial=0)) + 1
    born, dies = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    is_made, is_freed = ops.kind == OpKind.MALLOC, is_free(ops.kind)
    born[ops.allocation[is_made]] = step[is_made]
    dies[ops.allocation[is_freed]] = step[is_freed]
    return born, dies
