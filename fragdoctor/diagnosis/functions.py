"""Lines of one function taken together: four lines that hold a fifth each are one holder.

A recorded frame has a file, a line and a bare name, and a file may hold many functions of one name
(``forward``). Lines are of one function where their names agree, one line of the program calls
both, and no line of another function, or of one with another caller, is recorded between them.
The lines of a script outside any function (``<module>``) are none.
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
    """Return the functions with several lines among the holders, most bytes first."""
    groups: dict[tuple[int, str, str, Location | None], dict[int, list[HolderReport]]] = {}
    for h in holders:
        if h.location is not None and h.held_bytes and not h.location.function.startswith("<"):
            key = (h.device, h.location.filename, h.location.function, _caller(h))
            groups.setdefault(key, {}).setdefault(h.location.line, []).append(h)
    found = []
    for (device, filename, function, caller), lines in groups.items():
        if snapshot is None:
            break
        # Lines of that name with another caller may be of a function of their own.
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
                        n_lines=len(members),
                        held_bytes=sum(h.held_bytes for h in members),
                        moment=members[0].moment,
                    )
                )
    return tuple(sorted(found, key=lambda f: -f.held_bytes))


def _caller(holder: HolderReport) -> Location | None:
    """Return the line that called the holder's function, past PyTorch's own; None without one."""
    outer = holder.stack[1:]
    return next((f for f in outer if classify_file(f.filename) in (USER, PACKAGE)), None)


def _other_lines(snapshot: Snapshot, filename: str, function: str) -> list[int]:
    """Return the recorded lines of a file that are of other named functions."""
    frames, strings = snapshot.frames, snapshot.strings
    ids = [i for i, text in enumerate(strings) if text == filename]
    rows = np.flatnonzero(np.isin(frames.filename, ids)).tolist()
    named = ((strings[int(frames.name[r])], int(frames.line[r])) for r in rows)
    return [line for name, line in named if name != function and not name.startswith("<")]


def _runs(lines: Sequence[int], others: Sequence[int]) -> list[list[int]]:
    """Return ascending lines, parted where one of another function lies between."""
    runs = [[lines[0]]]
    for last, line in pairwise(lines):
        if any(last < other < line for other in others):
            runs.append([])
        runs[-1].append(line)
    return runs
