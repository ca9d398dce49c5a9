"""An autograd graph that an evaluation builds, though no backward pass will use it.

With gradients on, a model keeps what its backward pass would need; with gradients off, it frees
each result as soon as the next layer has read it. The forward passes of training show what share a
model keeps with gradients on: an evaluation that keeps about as much has them on too.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.analysis.kept import LARGE_SHARE, MOST, shared_frame
from fragdoctor.analysis.result import IdleGraph
from fragdoctor.future.passes import RoleRuns, kept_of
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.trace import Trace

LIKE_TRAINING: Final = 0.5
"""The share that an evaluation keeps, relative to a forward pass of training, from which on its
gradients count as on. In ``tests/truth``, evaluations under ``no_grad`` have at most 0.13."""


def find_idle_graph(trace: Trace) -> IdleGraph | None:
    """Return the graph of the evaluation that failed, or None if it builds none that matters."""
    steps, runs = Steps.of(trace), RoleRuns.of(trace)
    is_evaluating = len(steps) > 1 and steps.kind[-1] == StepKind.EVALUATION
    if not is_evaluating or runs is None or not len(trace.oom_rows):
        return None
    trained = steps.of_kind(StepKind.TRAIN)
    backward = runs.first[runs.label == roles_of.BACKWARD]
    if not len(trained) or not (backward > trained[-1]).any():
        return None
    usual, _ = kept_of(trace, int(trained[-1]), int(backward[backward > trained[-1]][0]))
    failed = int(trace.oom_rows[-1])
    share, rows = kept_of(trace, int(steps.rows[-1]), failed)
    lives = trace.lives_of_program
    size = lives.size_bytes[rows]
    live_bytes = int(trace.totals.at([failed])[0, 0])
    if share < LIKE_TRAINING * usual or not usual or size.sum() < LARGE_SHARE * live_bytes:
        return None
    called_at = shared_frame(trace, trace.stacks.outside, lives.stack[rows], size, MOST)
    return IdleGraph(called_at, int(size.sum()), share, usual)
