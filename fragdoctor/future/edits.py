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
from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.operations import OPERATION, Operations, OpKind
from fragdoctor.trace.replay import Reproduction
from fragdoctor.units import MIB, format_size, plural


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
        new = np.zeros(len(wanted), OPERATION)
        new["kind"], new["row"] = OpKind.EMPTY_CACHE, wanted
        plain = f"V{OPERATION.itemsize}"  # as mere bytes, since numpy copies records field by field
        first, *others = np.split(ops.table.view(plain), ops.positions(wanted))
        parts = [
            part for pair in zip(new.view(plain)[:, None], others, strict=True) for part in pair
        ]
        return Operations(np.concatenate([first, *parts]).view(OPERATION))

    return Edit(f"empty_cache() at {len(wanted)} chosen points", change)


def sizes_padded(bucket_bytes: int) -> Edit:
    """Return the edit that pads requests above 1 MiB to multiples of a bucket.

    Raises:
        ConfigError: if the bucket is not positive.
    """
    if bucket_bytes < 1:
        raise ConfigError("The bucket must be at least one byte.")

    def change(_: Reproduction, ops: Operations) -> Operations:
        size, bucket = ops.size.copy(), np.uint64(bucket_bytes)
        is_padded = ops.is_request & (size > MIB) & (size < 2**50)
        size[is_padded] = (size[is_padded] + bucket - np.uint64(1)) // bucket * bucket
        return ops.with_size(size)

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
