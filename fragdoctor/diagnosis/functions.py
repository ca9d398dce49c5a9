"""Lines of one function taken together: four lines that hold a fifth each are one holder.

A recorded frame has a file, a line and a bare name, and a file may hold many functions of one name
(``forward``). Lines are of one function where their names agree, one line of the program calls
both, and no line of another function, or of one with another caller, is recorded between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fragdoctor.model.diagnosis import FunctionHolder, HolderReport
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.stacks import PACKAGE, USER, classify_file


def function_holders(
    holders: Sequence[HolderReport], snapshot: Snapshot | None
) -> tuple[FunctionHolder, ...]:
    """Return the functions with several lines among the holders, most bytes first."""
    groups: dict[tuple[int, str, str, Location | None], list[HolderReport]] = {}
    for h in holders:
        if h.location is not None and h.held_bytes:
            key = (h.device, h.location.filename, h.location.function, _caller(h))
            groups.setdefault(key, []).append(h)
    found = []
    for (device, filename, function, caller), lines in groups.items():
        if len(lines) == 1 or snapshot is None:
            continue
        # Lines of that name with another caller may be of a function of their own.
        others = _other_lines(snapshot, filename, function) + [
            h.location.line
            for key, of_key in groups.items()
            if key[:3] == (device, filename, function) and key[3] != caller
            for h in of_key
            if h.location is not None
        ]
        for run in _runs(lines, others):
            numbers = [line for h in run if h.location is not None for line in [h.location.line]]
            found.append(
                FunctionHolder(
                    device=device,
                    function=function,
                    filename=filename,
                    first_line=min(numbers),
                    last_line=max(numbers),
                    n_lines=len(run),
                    held_bytes=sum(h.held_bytes for h in run),
                    moment=run[0].moment,
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


def _runs(lines: Sequence[HolderReport], others: Sequence[int]) -> list[list[HolderReport]]:
    """Return lines in order, parted where another function lies between; several lines each."""
    runs: list[list[HolderReport]] = []
    last = 0
    for h in sorted(lines, key=lambda h: h.location.line if h.location is not None else 0):
        line = 0 if h.location is None else h.location.line
        if runs and not any(last < other < line for other in others):
            runs[-1].append(h)
        else:
            runs.append([h])
        last = line
    return [run for run in runs if len(run) > 1]
