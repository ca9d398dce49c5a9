"""What a failed attempt left in memory when a later attempt fails too.

The exception holds its traceback, the traceback its frames, and the frames the tensors of the
attempt. The next attempt runs the same lines of the model again; whatever the earlier attempt made
at those lines and is still live is held only by the exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from fragdoctor.analysis.result import OomEvent
from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.trace import Trace

MIN_LEFT: Final = 0.1
"""An attempt that leaves less than this share of live memory is not why the next one fails."""


class LeftMemory(NamedTuple):
    """What is left of failed attempts.

    Attributes:
        starts: the device's events that allocated it, ascending.
        n_bytes: its size.
        row: the event after the last of the attempts.
    """

    starts: I64
    n_bytes: int
    row: int


def left_of_attempts(trace: Trace, ooms: Sequence[OomEvent], last: OomEvent) -> LeftMemory | None:
    """Return what attempts before the last failure left behind, or None if little or nothing.

    Nothing unless the work after the previous failure repeats one of their stacks inside a module.
    """
    lives, in_module = trace.lives, trace.stacks.roles.in_module
    state = last.row - trace.first_row
    end = max((oom.row - trace.first_row for oom in ooms if oom.row < last.row), default=0)
    live = lives.allocated_at(state)
    left = live[(lives.start[live] >= 0) & (lives.start[live] < end)]
    again = lives.stack[(lives.start > end) & (lives.start < state)]
    repeated = left[is_among(lives.stack[left], again[again >= 0])]
    if not in_module[lives.stack[repeated]].any():
        return None
    left = left[lives.start[left] >= lives.start[repeated].min()]
    n_bytes = int(lives.size_bytes[left].sum())
    if n_bytes < MIN_LEFT * last.active_bytes:
        return None
    return LeftMemory(np.sort(lives.start[left]).astype(np.int64), n_bytes, end + 1)
