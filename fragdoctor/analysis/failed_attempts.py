"""What a failed attempt left in memory when a later attempt fails too.

The exception holds its traceback, the traceback its frames, and the frames the tensors of the
attempt. The next attempt runs the same lines of the model again; whatever the earlier attempt made
at those lines and is still live is held only by the exception.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fragdoctor.analysis.result import OomEvent
from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.trace import Trace


def left_of_attempts(trace: Trace, ooms: Sequence[OomEvent], last: OomEvent) -> I64:
    """Return the rows of ``Lives`` that attempts before the last failure made and left behind.

    Empty unless the work after the previous failure repeats one of their stacks inside a module.
    """
    none = np.zeros(0, np.int64)
    earlier = [oom.row - trace.first_row for oom in ooms if oom.row < last.row]
    if not earlier:
        return none
    end, state = max(earlier), last.row - trace.first_row
    lives, in_module = trace.lives, trace.stacks.roles.in_module
    live = lives.allocated_at(state)
    left = live[(lives.start[live] >= 0) & (lives.start[live] < end)]
    again = lives.stack[(lives.start > end) & (lives.start < state)]
    made_again = left[is_among(lives.stack[left], again[again >= 0])]
    if not in_module[lives.stack[made_again]].any():
        return none
    begin = int(lives.start[made_again].min())
    return left[lives.start[left] >= begin].astype(np.int64)
