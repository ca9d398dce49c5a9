"""An autograd graph that an evaluation builds, though no backward pass will use it.

With gradients on, a model keeps what its backward pass would need; without, it lets go of each
result as soon as the next layer has read it. How much of what the model makes it keeps, the forward
passes of training show: an evaluation that keeps about as much has its gradients on.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.kept import LARGE_SHARE, MOST, shared_frame
from fragdoctor.analysis.result import IdleGraph
from fragdoctor.future.passes import MIN_KEPT, RoleRuns
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I64
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.trace import Trace

STILL_READ: Final = 8
"""Results of a model that its layers may still read, graph or not: the last ones do not count; of
fewer than twice as many, the later half."""

LIKE_TRAINING: Final = 0.5
"""Share that is kept, over that of a forward pass of training. Of the programs in ``tests/truth``
an evaluation under ``no_grad`` has 0.13 at the most."""


def find_idle_graph(trace: Trace) -> IdleGraph | None:
    """Return the graph of the evaluation that failed; None where it builds none that matters."""
    steps, runs = Steps.of(trace), RoleRuns.of(trace)
    is_evaluating = len(steps) > 1 and steps.kind[-1] == StepKind.EVALUATION
    if not is_evaluating or runs is None or not len(trace.oom_rows):
        return None
    trained = steps.of_kind(StepKind.TRAIN)
    backward = runs.first[runs.label == roles_of.BACKWARD]
    if not len(trained) or not (backward > trained[-1]).any():
        return None
    usual, _ = _kept_of(trace, int(trained[-1]), int(backward[backward > trained[-1]][0]))
    failed = int(trace.oom_rows[-1])
    share, rows = _kept_of(trace, int(steps.rows[-1]), failed)
    lives = trace.lives_of_program
    size = lives.size_bytes[rows]
    live_bytes = int(trace.totals.at([failed])[0, 0])
    if share < LIKE_TRAINING * usual or not usual or size.sum() < LARGE_SHARE * live_bytes:
        return None
    called_at = shared_frame(trace, trace.stacks.outside, lives.stack[rows], size, MOST)
    return IdleGraph(called_at, int(size.sum()), share, usual)


def _kept_of(trace: Trace, low: int, high: int) -> tuple[float, I64]:
    """Return the share of bytes that modules made between two rows and that live at the second.

    And the rows of the lives that do. The last few results do not count.
    """
    lives = trace.lives_of_program
    made = trace.module_rows[(trace.module_rows >= low) & (trace.module_rows < high)]
    made = made[: len(made) - min(STILL_READ, (len(made) + 1) // 2)]
    rows = np.flatnonzero(is_among(lives.start, made))
    kept = rows[lives.free[rows] >= high]
    if len(kept) < MIN_KEPT:
        return 0.0, kept
    return float(lives.size_bytes[kept].sum() / max(lives.size_bytes[rows].sum(), 1)), kept
