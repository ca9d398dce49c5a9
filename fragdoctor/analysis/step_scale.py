"""How much larger the failed step is than every earlier step, compared at the same lines."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.future.steps import Steps
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

MIN_STEPS: Final = 2
"""Fewest earlier steps to compare a step with."""

MIN_BYTES: Final = MIB
"""Smaller requests are scalars, statistics and norm weights."""


def step_scale(trace: Trace, state: int) -> float | None:
    """Return how large the current step after ``state`` events is, relative to earlier steps.

    Each line counts with its largest request, now and in all earlier steps; the result is the
    median of their ratios, weighted by bytes. None with too few earlier steps or no common lines.
    """
    begins = Steps.of(trace).rows
    begins = begins[begins < state]
    if len(begins) <= MIN_STEPS:
        return None
    events = trace.events
    rows = np.flatnonzero(np.isin(events.action[: state + 1], (Action.ALLOC, Action.OOM)))
    rows = rows[events.stack[rows] >= 0]
    is_inside = trace.stacks.roles.in_module[events.stack[rows]]
    if is_inside[rows >= begins[-1]].any():
        rows = rows[is_inside]
    line, size = trace.stacks.lines_of(events.stack[rows]), events.size_bytes[rows]
    lines, at = np.unique(line, return_inverse=True)
    is_now = rows >= begins[-1]
    largest = np.zeros((2, len(lines)), np.int64)
    np.maximum.at(largest, (is_now.astype(np.int64), at.reshape(-1)), size)
    before, now = largest
    both = (now >= MIN_BYTES) & (before > 0) & (lines >= 0)
    if not both.any():
        return None
    ratio, weight = now[both] / before[both], now[both]
    order = np.argsort(ratio)
    middle = int(np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2))
    return float(ratio[order][middle])
