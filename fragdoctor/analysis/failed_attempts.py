"""What a failed attempt left in memory when a later attempt fails too.

The exception holds its traceback, the traceback its frames, and the frames the tensors of the
attempt. The next attempt runs the same lines of the model again; whatever the earlier attempt made
at those lines and is still live is held only by the exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fragdoctor.analysis.result import OomEvent
from fragdoctor.model.arrays import is_among
from fragdoctor.model.finding import WORTH_SAYING
from fragdoctor.model.snapshot import I32, I64
from fragdoctor.trace.trace import Trace


class LeftMemory(NamedTuple):
    """What is left of failed attempts.

    Attributes:
        rows: the device's events that allocated it or failed before, ascending.
        n_bytes: its size.
    """

    rows: I64
    n_bytes: int


def left_of_attempts(trace: Trace, ooms: Sequence[OomEvent], last: OomEvent) -> LeftMemory | None:
    """Return what attempts before the last failure left behind, or None if little or nothing.

    Nothing unless the work after the previous failure repeats a line of a module that they reached,
    called from wherever: a handler calls the model again from a line of its own.
    """
    lives = trace.lives
    state = last.row
    caught = [oom.row for oom in ooms if oom.row < state]
    end = max(caught, default=0)
    live = lives.allocated_at(state)
    left = live[(lives.start[live] >= 0) & (lives.start[live] < end)]
    if not len(left):  # as in all runs that fail once
        return None
    again = lives.stack[(lives.start > end) & (lives.start < state)]
    again = np.append(again, np.int32(last.stack))  # the retry may fail at its first request
    inside = _inside_modules(trace, np.concatenate((lives.stack[left], again)))
    runs_again = (inside[: len(left)] >= 0) & is_among(inside[: len(left)], inside[len(left) :])
    if not runs_again.any():
        return None
    repeated = left[runs_again | is_among(lives.stack[left], again[again >= 0])]
    left = left[lives.start[left] >= lives.start[repeated].min()]
    n_bytes = int(lives.size_bytes[left].sum())
    if n_bytes < WORTH_SAYING * last.active_bytes:
        return None
    return LeftMemory(np.sort(np.append(lives.start[left], caught)).astype(np.int64), n_bytes)


def _inside_modules(trace: Trace, stack: I32) -> I64:
    """Return a number for the frames of each stack from its first module inward; -1 without one."""
    python, outside = trace.stacks.python, trace.stacks.outside
    numbers: dict[bytes, int] = {}
    ids, member = np.unique(stack, return_inverse=True)
    of_id = np.full(len(ids), -1, np.int64)
    for i, one in enumerate(ids.tolist()):
        if one >= 0 and trace.stacks.roles.in_module[one]:
            end = python.offsets[one + 1] - np.diff(outside.offsets[one : one + 2])[0]
            frames = python.frames[python.offsets[one] : end].tobytes()
            of_id[i] = numbers.setdefault(frames, len(numbers))
    return of_id[member.reshape(-1)]
