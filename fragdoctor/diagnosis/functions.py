"""Lines of one function taken together: four lines that each hold a fifth are one holder.

A recorded frame has a file, a line and a bare name, and a file may have many functions with the
same name (``forward``). Two lines belong to one function if their names agree, one line of the
program calls both, and no recorded line between them has another function or another caller.
The lines of a script outside any function (``<module>``) are not taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fragdoctor.model.diagnosis import FunctionHolder, HolderReport
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.stacks import PACKAGE, USER, classify_file


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
