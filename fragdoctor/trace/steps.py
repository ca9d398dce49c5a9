"""The steps of a program: nothing marks them in a trace, but its stacks return.

A step is one iteration of the program's outer loop. Seen from the outside in, a stack is a path in
the program's call tree, and a loop shows where the program comes back to a line without having left
the function (``call_tree.h``). Which loop is the one of steps the backward passes say, in a program
that trains (``training_steps.py``); loops over forward passes between, before and after training
steps are evaluation. Without training the outermost loop that does most of the work is taken.
Without stacks PyTorch's own annotations of the optimizer's steps separate them, and without those
the rarest size that returns at even distances.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I64, U8, Action
from fragdoctor.trace import stacks
from fragdoctor.trace.call_tree import CallTree, Loop
from fragdoctor.trace.passes import (
    RoleRuns,
    find_optimizer_steps,
    is_training_forward,
    trained_until,
    training_ends,
)
from fragdoctor.trace.trace import Trace
from fragdoctor.trace.training_steps import after_setup, find_training_steps

MIN_STEPS: Final = 4
ENOUGH_STEPS: Final = 8
MAX_SPREAD: Final = 1.0
"""Deviation of the work of iterations, relative to its mean, up to which a loop is one of steps."""

MIN_COVERED: Final = 0.5
"""Share of the trace that the steps of a program without training cover."""


class StepKind(IntEnum):
    """What a step is for; OTHER is neither, or unknown."""

    TRAIN = 0
    EVALUATION = 1
    OTHER = 2


@frozen
class Steps:
    """The steps of a device's trace, in order.

    Attributes:
        rows: row at which each begins; it lasts to the next one or the end.
        kind: ``uint8``, a ``StepKind`` each.
        micro_rows: rows at which further passes of a step begin (gradient accumulation, the second
            network of a GAN).
        method: ``stacks``, ``annotations``, ``sizes`` or ``none``.
        is_last_complete: the last step was not cut off by a failure or the end of the trace.
    """

    rows: I64
    kind: U8
    micro_rows: I64
    method: str
    is_last_complete: bool

    @classmethod
    def of(cls, trace: Trace) -> Steps:
        """Return the steps of a trace, worked out once."""
        if cls not in trace.memo:
            trace.memo[cls] = find_steps(trace)
        found: Steps = trace.memo[cls]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def of_kind(self, kind: StepKind) -> I64:
        """Return the rows at which steps of a kind begin."""
        rows: I64 = self.rows[self.kind == kind]
        return rows

    @property
    def main_rows(self) -> I64:
        """Rows at which training steps begin; those of all steps of a program without training."""
        training = self.of_kind(StepKind.TRAIN)
        return training if len(training) else self.rows

    def at(self, rows: I64) -> I64:
        """Return the step that each event row is in; -1 before the first."""
        step: I64 = np.searchsorted(self.rows, rows, side="right").astype(np.int64) - 1
        return step


NO_STEPS: Final = Steps(
    np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), "none", True
)


def find_steps(trace: Trace) -> Steps:
    """Return the steps of a device's trace; none where no loop shows."""
    report_progress("Looking for steps")
    if not trace.n_events:
        return NO_STEPS
    tree = CallTree.of(trace)
    if tree is None:
        return _by_annotation(trace) or _by_size(trace)
    runs = RoleRuns.of(trace)
    if runs is not None and (runs.label == stacks.BACKWARD).any():
        return _with_training(trace, runs, tree)
    return _without_training(trace, tree)


def _steps(
    rows: list[tuple[int, StepKind]], micro: list[int], method: str, *, is_complete: bool
) -> Steps:
    ordered = sorted(set(rows))
    return Steps(
        np.array([row for row, _ in ordered], np.int64),
        np.array([kind for _, kind in ordered], np.uint8),
        np.array(sorted(micro), np.int64),
        method,
        is_complete,
    )


# ---- with training -----------------------------------------------------------------------------


def _with_training(trace: Trace, runs: RoleRuns, tree: CallTree) -> Steps:
    found = find_training_steps(trace, runs, tree)
    rows = [(row, StepKind.TRAIN) for row in found.rows]
    rows += [(row, StepKind.EVALUATION) for row in _evaluation(trace, runs, tree, found.rows)]
    trains_last = bool(rows) and max(rows)[1] == StepKind.TRAIN
    is_complete = found.is_last_complete or not trains_last
    is_complete &= not trace.ends_in_failure
    return _steps(rows, found.micro_rows, "stacks", is_complete=is_complete)


def _evaluation(trace: Trace, runs: RoleRuns, tree: CallTree, starts: list[int]) -> list[int]:
    """Return where steps of evaluation begin: forward passes behind the training of a step."""
    trained = training_ends(trace, runs)
    found: list[int] = []
    edges = [*starts, trace.n_events]
    for low, high in pairwise(edges):
        if high == trace.n_events and trace.ends_in_failure and _trains_on(trace, runs, starts):
            break
        at = int(np.searchsorted(trained, high, side="right")) - 1
        begin = int(trained[at]) if at >= 0 else low
        first, behind = np.searchsorted(trace.module_rows, (begin, high))
        if low < begin < high and first < behind:
            found += _iterations(tree, begin, high, trace.module_rows[first:behind])
    return found


def _trains_on(trace: Trace, runs: RoleRuns, starts: list[int]) -> bool:
    """Return whether the last step, cut off, still has training to do after its backward passes.

    So it is where steps have an optimizer and this one did not come to it, or had more backward
    passes: gradients are accumulated, or several models are trained in turn. Of a first step, a
    forward pass that keeps what it makes says so.
    """
    of = np.searchsorted(np.array(starts), runs.first, side="right") - 1
    n_updates, n_backward = (
        np.bincount(of[(runs.label == role) & (of >= 0)], minlength=len(starts))
        for role in (stacks.OPTIMIZER, stacks.BACKWARD)
    )
    if len(starts) < 2:
        failed = int(trace.oom_rows[-1])
        return not n_updates[-1] or is_training_forward(trace, trained_until(trace, failed), failed)
    if n_updates[:-1].any():
        return bool(n_updates[-1] < np.median(n_updates[:-1]))
    return bool(n_backward[-1] < n_backward[:-1].max())


def _iterations(tree: CallTree, low: int, high: int, calls: I64) -> list[int]:
    """Return where iterations of the outermost loop over forward passes begin among some rows."""
    turns = np.arange(*np.searchsorted(tree.turn_row, (low, high)))
    nodes, first = np.unique(tree.turn_node[turns], return_index=True)
    for node in nodes[np.lexsort((first, tree.depth[nodes]))].tolist():
        mine = turns[tree.turn_node[turns] == node]
        target = tree.lines_of(tree.turn_target[mine])
        mine = mine[target == target.min()]
        at = tree.turn_row[mine]
        n_calls = np.diff(np.searchsorted(calls, np.append(at, high)))
        if np.count_nonzero(n_calls) >= 0.5 * len(at) and calls[0] < at[0]:
            entry = _entry(tree, node, int(tree.turn_visit[mine[0]]), low)
            return [int(tree.visit_row[entry]), *at.tolist()]
    behind = tree.visit_row[np.searchsorted(tree.visit_row, low) :]  # none where only frees follow
    return [min([int(calls[0]), *behind[:1].tolist()])]


def _entry(tree: CallTree, node: int, visit: int, low: int = 0) -> int:
    """Return the visit at which the program came to a node, before a visit but not before a row."""
    since = int(np.searchsorted(tree.visit_row, low))
    depth, last = int(tree.depth[node]), visit
    width = 16
    while last > since:  # piece by piece, backwards: most loops are short
        piece = max(since, last - width)
        paths = tree.paths_of(tree.visit_node[piece:last])
        is_there = depth < paths.shape[1] and paths[:, min(depth, paths.shape[1] - 1)] == node
        outside = np.flatnonzero(~np.broadcast_to(is_there, last - piece))
        if len(outside):
            return piece + int(outside[-1]) + 1
        last, width = piece, width * 4
    return last


# ---- without training --------------------------------------------------------------------------


def _without_training(trace: Trace, tree: CallTree) -> Steps:
    """Return the iterations of the outermost loop that does most of the work."""
    loop = _busiest(trace, tree)
    if loop is None:
        return _first_pass(trace)
    kind = StepKind.EVALUATION if len(trace.module_rows) else StepKind.OTHER
    rows = tree.turn_row[loop.turns].tolist()
    visit = int(tree.turn_visit[loop.turns[0]])
    entry = _entry(tree, loop.node, visit)
    if entry or not trace.is_late:
        paths = tree.paths_of(tree.visit_node[entry : visit + 1])
        inside = np.flatnonzero(loop.holds(tree, paths))
        rows = [int(tree.visit_row[entry + int(inside[0])]), *rows]
    is_complete = not trace.ends_in_failure
    return _steps([(int(r), kind) for r in rows], [], "stacks", is_complete=is_complete)


def _busiest(trace: Trace, tree: CallTree) -> Loop | None:
    """Return the outermost loop with enough iterations that covers enough of the trace.

    A loop of a handful of iterations gives way to an inner one with more, as epochs do to steps.
    What ends before a model is first called only makes it, or copies it.
    """
    n_allocs = np.cumsum(trace.events.action == Action.ALLOC)
    wide: list[Loop] = []
    for loop in tree.loops:
        if len(loop.turns) < MIN_STEPS - 1:
            continue
        at = tree.turn_row[loop.turns]
        if len(trace.module_rows) and at[-1] < trace.module_rows[0]:
            continue
        n_turns = len(at)  # one whole iteration less lies between them, one more are there
        covered = int(n_allocs[at[-1]] - n_allocs[at[0]]) * (n_turns + 1) / (n_turns - 1)
        visits = np.diff(tree.turn_visit[loop.turns])
        is_even = float(visits.std()) <= MAX_SPREAD * float(visits.mean())
        if covered >= MIN_COVERED * int(n_allocs[-1]) and np.median(visits) >= 2 and is_even:
            wide.append(loop)
    wide.sort(key=lambda loop: (loop.depth, loop.low))
    many = [loop for loop in wide if len(loop.turns) + 1 >= ENOUGH_STEPS]
    return next(iter(many or wide), None)


def _first_pass(trace: Trace) -> Steps:
    """Return the one step of a program that failed in its first forward pass; else none."""
    if not (len(trace.module_rows) and trace.ends_in_failure):
        return NO_STEPS
    return _steps([(after_setup(trace), StepKind.TRAIN)], [], "stacks", is_complete=False)


# ---- without stacks ----------------------------------------------------------------------------


def _by_annotation(trace: Trace) -> Steps | None:
    """Return the steps that end with annotated steps of an optimizer; None without any.

    The set-up cannot be separated from the first step.
    """
    ends = find_optimizer_steps(trace)
    if ends is None:
        return None
    first, end = ends
    is_alloc = trace.events.action == Action.ALLOC
    after = np.append(np.flatnonzero(is_alloc), trace.n_events)
    starts = distinct(after[np.searchsorted(after, np.append(0, end))])
    rows = [int(r) for r in starts if r < trace.n_events]
    if not rows:  # steps of which no allocation is left
        return None
    # Of a step that was running when the recording began only its end is there.
    goes_on = len(first) > 0 and rows[-1] < int(first[-1])
    is_complete = not trace.ends_in_failure and goes_on
    return _steps([(r, StepKind.TRAIN) for r in rows], [], "annotations", is_complete=is_complete)


def _by_size(trace: Trace) -> Steps:
    """Return the allocations of the rarest size that returns at even distances."""
    lives = trace.lives
    born = slice(lives.n_initial, lives.n_regular)
    rows, size = lives.start[born].astype(np.int64), lives.requested_bytes[born]
    if not len(rows):
        return NO_STEPS
    _, member, count = np.unique(size, return_inverse=True, return_counts=True)
    order = np.argsort(member.reshape(-1), kind="stable")
    ends = np.cumsum(count)
    candidates = np.flatnonzero(count >= MIN_STEPS)
    best: I64 | None = None
    for c in candidates[np.argsort(count[candidates], kind="stable")][:200].tolist():
        at = rows[order[ends[c] - count[c] : ends[c]]]
        gaps = np.diff(at)
        spread = float(gaps.std() / max(1.0, gaps.mean()))
        covered = (at[-1] - at[0] + gaps.mean()) / max(1, trace.n_events)
        if covered < MIN_COVERED or spread > 0.35 or gaps.mean() < 4:
            continue
        if best is None or len(at) < len(best):
            best = at
    if best is None:
        return NO_STEPS
    is_complete = not trace.ends_in_failure
    return _steps([(int(r), StepKind.OTHER) for r in best], [], "sizes", is_complete=is_complete)
