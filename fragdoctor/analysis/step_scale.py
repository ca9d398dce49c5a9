"""How much larger the failed step is than every earlier step, compared at the same lines."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.future.steps import Steps
from fragdoctor.model.snapshot import I64, Action
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

MIN_STEPS: Final = 2
"""Fewest earlier steps to compare a step with."""

MIN_BYTES: Final = MIB
"""Smaller requests are scalars, statistics and norm weights."""

LARGER: Final = 1.5
"""Multiple of the largest earlier step; the batches of most programs differ by less."""


class StepScale(Struct, frozen=True, eq=False):
    """How large the current step is, relative to earlier steps.

    Each line counts with its largest request, now and in all earlier steps.

    Attributes:
        step: the median of their ratios, weighted by bytes.
        line: the ratio of the line that asked last, or 0 if it asked for nothing before.
        rows: events of this step that ask for ``LARGER`` times what their line did before.
        usual_bytes: the largest request of each one's line in earlier steps.
    """

    step: float
    line: float
    rows: I64
    usual_bytes: I64

    @property
    def is_of_line(self) -> bool:
        """Whether it is the line that outgrew its earlier requests, and not the whole step."""
        return self.line >= LARGER * max(self.step, 1.0)


def step_scale(trace: Trace, state: int) -> StepScale | None:
    """Return how large the current step after ``state`` events is, relative to earlier steps.

    None with too few earlier steps or no common lines.
    """
    begins = Steps.of(trace).rows
    begins = begins[begins < state]
    if len(begins) <= MIN_STEPS:
        return None
    events = trace.events
    rows = np.flatnonzero(np.isin(events.action[: state + 1], (Action.ALLOC, Action.OOM)))
    rows = rows[events.stack[rows] >= 0]
    line, size = trace.stacks.lines_of(events.stack[rows]), events.size_bytes[rows]
    lines, at = np.unique(line, return_inverse=True)
    at, is_now = at.reshape(-1), rows >= begins[-1]
    largest = np.zeros((2, len(lines)), np.int64)
    np.maximum.at(largest, (is_now.astype(np.int64), at), size)
    before, now = largest
    ratio = np.where((now >= MIN_BYTES) & (lines >= 0), now / np.maximum(before, 1), 0.0)
    ratio[before == 0] = 0.0
    compared = ratio > 0
    of_model = is_now & trace.stacks.roles.in_module[events.stack[rows]]
    if of_model.any():
        compared &= np.bincount(at[of_model], minlength=len(lines)) > 0
    if not compared.any():
        return None
    order = np.argsort(ratio[compared])
    weight = now[compared][order]
    middle = int(np.searchsorted(np.cumsum(weight), weight.sum() / 2))
    larger = is_now & (ratio[at] >= LARGER)
    return StepScale(
        step=float(ratio[compared][order][middle]),
        line=float(ratio[at[-1]]) if rows[-1] == state else 0.0,
        rows=rows[larger],
        usual_bytes=before[at[larger]],
    )
