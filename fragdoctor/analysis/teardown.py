"""The end of a trace at which a program only lets go: its frees do not say what a block is for.

After a failure that nobody handles, and after the function that trains returns, everything is
freed. Taken for the end of a block's use, such a free makes temporaries of activations, of
parameters and of optimizer state.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.model.phases import TrainingPhase
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.passes import Passes
from fragdoctor.trace.trace import Trace

_NEVER: Final = -1


def end_of_work(trace: Trace, passes: Passes) -> int | None:
    """Return how many events come before the program only lets go; None where it never does.

    It does after a failure that no allocation follows, and where, after the last allocation, a
    block is freed that was made before the first step: the model goes, and with it, maybe before
    it, the state of the optimizer.
    """
    lives = trace.lives
    last_failure = _last(trace, Action.OOM)
    last_allocation = _last(trace, Action.ALLOC)
    if last_failure > last_allocation:
        return last_failure + 1
    forward = np.flatnonzero(passes.label == TrainingPhase.FORWARD)
    if last_allocation == _NEVER or not len(forward) or passes.label[0] != TrainingPhase.SETUP:
        return None
    first_step, last_step = (int(passes.first[at]) for at in (forward[0], forward[-1]))
    goes_late = (lives.free > last_allocation) & (lives.free != NEVER)
    goes_late &= lives.start >= 0
    if not (goes_late & (lives.start < first_step)).any():
        return None
    made_in = passes.label[passes.of_rows()[np.maximum(lives.start, 0)]]
    stays = (lives.start < first_step) | (made_in == TrainingPhase.OPTIMIZER)
    return int(lives.free[goes_late & stays & (lives.start < last_step)].min())


def _last(trace: Trace, action: Action) -> int:
    rows = np.flatnonzero(trace.events.action == action)
    return int(rows[-1]) if len(rows) else _NEVER
