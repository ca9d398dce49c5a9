"""The end of a trace at which a program only lets go: its frees do not say what a block is for.

After a failure that nobody handles, and after the function that trains returns, everything is
freed. Taken for the end of a block's use, such a free makes temporaries of activations, of
parameters and of optimizer state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.analysis.columns import DeviceColumns
from fragdoctor.analysis.lifetimes import ALIVE, Lifetimes
from fragdoctor.analysis.passes import FORWARD, OPTIMIZER, SETUP, Passes
from fragdoctor.model.snapshot import Action

_NEVER: Final = -1


def end_of_work(columns: DeviceColumns, lifetimes: Lifetimes, passes: Passes) -> int | None:
    """Return how many events come before the program only lets go; None where it never does.

    It does after a failure that no allocation follows, and where, after the last allocation, a
    block is freed that was made before the first step: the model goes, and with it, maybe before
    it, the state of the optimizer.
    """
    last_failure = _last(columns, Action.OOM)
    last_allocation = _last(columns, Action.ALLOC)
    if last_failure > last_allocation:
        return last_failure + 1
    forward = np.flatnonzero(passes.label == FORWARD)
    if last_allocation == _NEVER or not len(forward) or passes.label[0] != SETUP:
        return None
    first_step, last_step = (int(passes.first[at]) for at in (forward[0], forward[-1]))
    goes_late = (lifetimes.free > last_allocation) & (lifetimes.free != ALIVE)
    goes_late &= lifetimes.start >= 0
    if not (goes_late & (lifetimes.start < first_step)).any():
        return None
    made_in = passes.label[passes.of_rows()[np.maximum(lifetimes.start, 0)]]
    stays = (lifetimes.start < first_step) | (made_in == OPTIMIZER)
    return int(lifetimes.free[goes_late & stays & (lifetimes.start < last_step)].min())


def without_teardown(lifetimes: Lifetimes, end: int | None) -> Lifetimes:
    """Return the lifetimes as if the trace had ended after so many events."""
    if end is None:
        return lifetimes
    return replace(
        lifetimes,
        free=np.where(lifetimes.free >= end, ALIVE, lifetimes.free),
        done=np.where(lifetimes.done >= end, ALIVE, lifetimes.done),
    )


def _last(columns: DeviceColumns, action: Action) -> int:
    rows = np.flatnonzero(columns.action == action)
    return int(rows[-1]) if len(rows) else _NEVER
