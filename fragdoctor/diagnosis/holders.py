"""Who holds the memory of a device at the report's moment: lines, functions, names, stranders.

A recorded frame has a file, a line and a bare name, and a file may have many functions with the
same name (``forward``). Two lines belong to one function, which is then one holder, if their names
agree, one line of the program calls both, and no recorded line between them has another function or
another caller. The lines of a script outside any function (``<module>``) are not taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from fragdoctor.analysis.attribution import find_holders, find_stranded_segments
from fragdoctor.analysis.owners import growth_of, held_twice, named_blocks
from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import (
    FunctionHolder,
    HolderReport,
    Moment,
    OwnerReport,
    SegmentReport,
    StranderReport,
)
from fragdoctor.model.finding import WORTH_SAYING, Location
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.rules.rule import Context
from fragdoctor.trace.stacks import PACKAGE, USER, classify_file
from fragdoctor.units import format_size

MAX_STRANDERS = 20
"""Groups of stranding blocks in a report; each of the others frees less than any of these."""

MAX_HOLDERS = 30
"""The most lines in a report."""


def strander_reports(context: Context, moment: DecidingMoment) -> tuple[StranderReport, ...]:
    """Return who strands free memory on one device, the costliest first."""
    a = moment.analysis
    at = a.n_events if moment.earlier_failure is None else moment.earlier_failure
    return tuple(
        StranderReport(
            device=a.device,
            n_blocks=strander.n_blocks,
            block_bytes=strander.block_bytes,
            stranded_bytes=strander.stranded_bytes,
            stack=context.user_stack(strander.stack),
            location=context.user_line(strander.stack),
            age_events=None if strander.oldest_event is None else at - strander.oldest_event,
            moment=Moment.FAILURE if moment.kind is Moment.FAILURE else Moment.END,
        )
        for strander in moment.stranders[:MAX_STRANDERS]
    )


def holder_reports(context: Context, moment: DecidingMoment) -> tuple[HolderReport, ...]:
    """Return live memory by line on one device at its moment, the largest first."""
    a = moment.analysis
    peak = None if a.timeline is None else a.timeline.peak_allocated_state
    states = [s for s in (peak, moment.earlier_failure) if s is not None]
    is_last = moment.kind is Moment.PEAK or moment.earlier_failure is not None
    at = len(states) if is_last else 0
    reports = [
        HolderReport(
            device=a.device,
            location=context.frame(h.frame) or context.user_line(h.stack),
            now_bytes=h.n_bytes[0],
            peak_bytes=None if peak is None else h.n_bytes[1],
            n_blocks=h.n_blocks[at],
            stack=context.user_stack(h.stack),
            within=context.line_of_library(h.stack) if h.frame >= 0 else None,
            module=h.module,
            categories=h.categories,
            failure_bytes=h.n_bytes[at] if moment.kind is Moment.FAILURE else None,
            moment=moment.kind,
        )
        for h in find_holders(a.trace, states, a.category)
    ]
    return tuple(sorted(reports, key=lambda h: -h.held_bytes)[:MAX_HOLDERS])


def segment_reports(moment: DecidingMoment | None) -> tuple[Sequence[SegmentReport], int]:
    """Return the segments with the most stranded free memory, and how many have any.

    The worst segment comes first. They show the moment of the stranding blocks.
    """
    if moment is None:
        return (), 0
    a = moment.analysis
    at = a.trace.layout if moment.earlier_failure is None else moment.layout
    return find_stranded_segments(at, a.device)


def function_holders(
    holders: Sequence[HolderReport], snapshot: Snapshot | None
) -> tuple[FunctionHolder, ...]:
    """Return the functions that have several lines among the holders, largest first."""
    groups: dict[tuple[int, str, str, Location | None], dict[int, list[HolderReport]]] = {}
    for h in holders:
        if h.location is not None and h.held_bytes and not h.location.function.startswith("<"):
            outer = (f for f in h.stack[1:] if classify_file(f.filename) in (USER, PACKAGE))
            key = (h.device, h.location.filename, h.location.function, next(outer, None))
            groups.setdefault(key, {}).setdefault(h.location.line, []).append(h)
    found = []
    for (device, filename, function, caller), lines in groups.items():
        if snapshot is None:
            break
        # Lines with the same name but another caller may belong to another function.
        others = _other_lines(snapshot, filename, function) + [
            line
            for key, of_key in groups.items()
            if key[:3] == (device, filename, function) and key[3] != caller
            for line in of_key
        ]
        for run in _runs(sorted(lines), others):
            members = [h for line in run for h in lines[line]]
            if len(members) > 1:
                found.append(
                    FunctionHolder(
                        device=device,
                        function=function,
                        filename=filename,
                        first_line=run[0],
                        last_line=run[-1],
                        held_bytes=sum(h.held_bytes for h in members),
                        moment=members[0].moment,
                    )
                )
    return tuple(sorted(found, key=lambda f: -f.held_bytes))


def _other_lines(snapshot: Snapshot, filename: str, function: str) -> list[int]:
    """Return the recorded lines of a file that belong to functions with other names."""
    frames, strings = snapshot.frames, snapshot.strings
    ids = [i for i, text in enumerate(strings) if text == filename]
    rows = np.flatnonzero(np.isin(frames.filename, ids)).tolist()
    named = ((strings[int(frames.name[r])], int(frames.line[r])) for r in rows)
    return [line for name, line in named if name != function and not name.startswith("<")]


def _runs(lines: Sequence[int], others: Sequence[int]) -> list[list[int]]:
    """Return ascending lines, split wherever a line of another function lies between them."""
    runs = [[lines[0]]]
    for last, line in pairwise(lines):
        if any(last < other < line for other in others):
            runs.append([])
        runs[-1].append(line)
    return runs


MAX_OWNERS: Final = 30


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
    if a is None or n_bytes < WORTH_SAYING * a.active_bytes or not cycles:
        return ""
    return (
        f"{format_size(n_bytes)} is kept by reference cycles ({cycles[0].owner.name}) that only "
        "Python's garbage collector frees: gc.collect() frees them, and a weakref.ref avoids the "
        "cycle."
    )


def twice_note(context: Context) -> str:
    """Return a note that two names hold the same weights, or "" if none do."""
    a = context.analysis
    live = 0 if a is None else a.active_bytes
    found = held_twice(context.case.censuses, int(WORTH_SAYING * live)) if live else None
    if found is None:
        return ""
    first, second, n_bytes = found
    return (
        f"{first.name or first.class_name} and {second.name or second.class_name} hold tensors of "
        f"the same sizes, {format_size(n_bytes)} each: the weights may be held twice."
    )
