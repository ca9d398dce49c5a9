"""Who holds the memory of a device at the report's moment, by the program's own names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.owners import growth_of, held_twice, named_blocks
from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import OwnerReport
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_size

MAX_OWNERS: Final = 30
_NOTED_SHARE: Final = 0.1
"""Smallest share of the live memory that is worth a note."""


def owner_reports(context: Context, moment: DecidingMoment) -> tuple[OwnerReport, ...]:
    """Return who holds the live memory, largest first: names, and lines where no name is known.

    The result is empty if no census names a holder of any of this memory.
    """
    trace = moment.analysis.trace
    named = named_blocks(trace, context.case.censuses)
    if named is None:
        return ()
    rows = trace.lives.allocated_at(moment.state)
    place = named.of_row[rows].astype(np.int64)
    if not (place >= 0).any():
        return ()
    # Memory without a name goes by its lines, which are numbered on from the last owner.
    line = trace.stacks.lines_of(trace.lives.stack[rows]).astype(np.int64)
    group = np.where(place >= 0, place, len(named.owners) + 1 + line)
    sums = largest_groups(group, trace.lives.size_bytes[rows])
    reports = []
    for at in sums.group[:MAX_OWNERS].tolist():
        mine = rows[group == at]
        size = trace.lives.size_bytes[mine]
        lines = largest_groups(trace.stacks.lines_of(trace.lives.stack[mine]), size)
        owner = named.owners[at] if at < len(named.owners) else Owner("", HoldingKind.UNNAMED)
        growth = growth_of(owner, context.case.censuses)
        reports.append(
            OwnerReport(
                device=moment.analysis.device,
                owner=owner,
                held_bytes=int(size.sum()),
                n_blocks=len(mine),
                location=context.frame(int(lines.group[0])),
                moment=moment.kind,
                grown_bytes=None if growth is None else growth.n_bytes,
                n_items_before=None if growth is None else growth.n_items_before,
            )
        )
    return tuple(reports)


def cycle_note(owners: Sequence[OwnerReport], context: Context) -> str:
    """Return what only Python's garbage collector would free, or "" if that is little."""
    a = context.analysis
    cycles = [o for o in owners if o.owner.kind is HoldingKind.CYCLE and a and o.device == a.device]
    n_bytes = sum(o.held_bytes for o in cycles)
    if a is None or n_bytes < _NOTED_SHARE * a.active_bytes or not cycles:
        return ""
    return (
        f"{format_size(n_bytes)} are kept by reference cycles ({cycles[0].owner.name}) that only "
        "Python's garbage collector frees: gc.collect() frees them, and a weakref.ref avoids the "
        "cycle."
    )


def twice_note(context: Context) -> str:
    """Return a note that two names hold the same weights, or "" if none do."""
    a = context.analysis
    live = 0 if a is None else a.active_bytes
    found = held_twice(context.case.censuses, int(_NOTED_SHARE * live)) if live else None
    if found is None:
        return ""
    first, second, n_bytes = found
    return (
        f"{first.name or first.class_name} and {second.name or second.class_name} hold tensors of "
        f"the same sizes, {format_size(n_bytes)} each: the weights may be held twice."
    )
