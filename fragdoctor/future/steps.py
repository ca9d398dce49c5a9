"""The steps of a program: what it does over and over.

A step of training lasts from one run of the optimizer to the next, micro-batches inside. Where
optimizers take turns, as in a GAN, it lasts until they come round again. PyTorch marks these runs
(``Optimizer.step#``, from 2.6 on); elsewhere stacks show them, and where nothing shows them a step
ends with a backward pass. Calls of a model from places that most steps do not come to are an
evaluation, which is a step of its own. Without training a step is a round of the outermost loop
that does most of the work (``loops.py``).
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.future.call_tree import CallTree, Loop
from fragdoctor.future.passes import RoleRuns, find_optimizer_steps
from fragdoctor.model.arrays import distinct, is_among, median
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I64, U8, Action, Bools
from fragdoctor.model.turns import period_of
from fragdoctor.trace import stacks
from fragdoctor.trace.trace import Trace

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
        method: ``marks``, ``stacks``, ``sizes`` or ``none``: what they were told by.
        is_last_complete: the last step was not cut off by a failure or the end of the trace.
    """

    rows: I64
    kind: U8
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


NO_STEPS: Final = Steps(np.zeros(0, np.int64), np.zeros(0, np.uint8), "none", True)


def find_steps(trace: Trace) -> Steps:
    """Return the steps of a device's trace; none where nothing repeats."""
    report_progress("Looking for steps")
    if not trace.n_events:
        return NO_STEPS
    ends, method = _ends(trace)
    if ends is not None:
        return _training(trace, ends, method)
    tree = CallTree.of(trace)
    return _by_size(trace) if tree is None else _without_training(trace, tree)


# ---- with training -------------------------------------------------------------------------------


def _ends(trace: Trace) -> tuple[I64 | None, str]:
    """Return the rows at which runs of the optimizer end; None for a program without training.

    Optimizers that follow each other without a backward pass between are one run.
    """
    runs = RoleRuns.of(trace)
    label = np.zeros(0, np.int64) if runs is None else runs.label
    after = np.zeros(0, np.int64) if runs is None else np.append(runs.first[1:], trace.n_events)
    backward = np.zeros(0, np.int64) if runs is None else runs.first[label == stacks.BACKWARD]
    marked = find_optimizer_steps(trace)
    if marked is not None:
        ends, method = marked[1], "marks"
    elif (label == stacks.OPTIMIZER).any():
        ends, method = after[label == stacks.OPTIMIZER], "stacks"
    elif len(backward):
        ends, method = after[label == stacks.BACKWARD], "stacks"
        if len(ends) < MIN_STEPS:  # micro-batches of a first step, as far as is known
            ends = ends[:0]
        return (ends[:-1] if _is_under_way(trace, ends) else ends), method
    else:
        return None, ""
    if method == "stacks" and _is_under_way(trace, ends):
        ends = ends[:-1]
    ends = distinct(ends[ends > 0])
    if len(backward) and len(ends):
        n_before = np.searchsorted(backward, ends)
        ends = ends[np.append(n_before[1:] > n_before[:-1], True)]
    return ends, method


def _is_under_way(trace: Trace, ends: I64) -> bool:
    """Return whether the last of some passes was cut off by the failure at the end."""
    return trace.ends_in_failure and len(ends) > 0 and int(ends[-1]) == trace.n_events


def _training(trace: Trace, ends: I64, method: str) -> Steps:
    turns = _turns(trace, ends)
    period = period_of(turns[1:] if trace.is_late else turns)  # of the first, a part may be missing
    ends = ends[period - 1 :: period]
    action = trace.events.action
    asks = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    first = _first_start(trace, ends, asks)
    edges = np.append([first] if first is not None else [], ends).astype(np.int64)
    edges = np.append(edges, trace.n_events)
    rows: list[tuple[int, StepKind]] = []
    is_complete = True
    models = _ModelCalls(trace, edges)
    for i, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        is_open = i == len(edges) - 2
        begins = int(asks[at]) if (at := int(np.searchsorted(asks, low))) < len(asks) else high
        if begins >= high or (
            is_open and not trace.ends_in_failure and not models.any_between(low, high)
        ):
            continue
        evaluated = models.evaluated_until(low, high)
        if evaluated is not None:
            rows.append((begins, StepKind.EVALUATION))
            is_complete = not is_open or not trace.ends_in_failure
            begins = int(asks[min(int(np.searchsorted(asks, evaluated)), len(asks) - 1)])
        if evaluated is None or evaluated < high:
            rows.append((begins, StepKind.TRAIN))
            is_complete = not is_open
    return Steps(
        np.array([row for row, _ in rows], np.int64),
        np.array([kind for _, kind in rows], np.uint8),
        method,
        is_complete and not trace.ends_in_failure,
    )


def _turns(trace: Trace, ends: I64) -> list[int]:
    """Return what tells runs of different optimizers apart: who called the backward passes."""
    roles, stack = trace.stacks.roles, trace.events.stack
    is_call = (roles.role[stack] == stacks.BACKWARD) & (trace.events.action == Action.ALLOC)
    calls = np.flatnonzero(is_call & (trace.stacks.lines_of(stack) >= 0))
    at = np.searchsorted(calls, np.append(0, ends)).tolist()
    return [hash(distinct(stack[calls[low:high]]).tobytes()) for low, high in pairwise(at)]


def _first_start(trace: Trace, ends: I64, asks: I64) -> int | None:
    """Return where the first step begins; None where the recording lacks its beginning.

    A recording that began within the program holds the whole of the first step if that asks as
    often as the next one.
    """
    if not trace.is_late:
        return min(after_setup(trace), int(np.append(ends, trace.n_events)[0]))
    if len(ends) < 2:
        return None if len(ends) else 0
    n_before = np.searchsorted(asks, np.append(0, ends[:2]))
    is_whole = n_before[1] - n_before[0] >= n_before[2] - n_before[1]
    return 0 if is_whole else None


class _ModelCalls:
    """From where in the program models are called, and which of these places are of training.

    A backward pass follows the last call of a forward pass. Other places are of training if most
    steps come to them.
    """

    def __init__(self, trace: Trace, edges: I64) -> None:
        tree = CallTree.of(trace)
        self._rows = trace.module_rows if tree is not None else np.zeros(0, np.int64)
        self._trains = np.ones(len(self._rows), np.bool_)
        n_complete = len(edges) - 2
        if tree is None or not len(self._rows) or n_complete < 2:
            return  # one step does not show what most steps come to
        visit = tree.visit_at(self._rows)
        place = np.where(visit >= 0, tree.visit_node[np.maximum(visit, 0)], -1).astype(np.int64)
        step = np.searchsorted(edges, self._rows, side="right") - 1
        whole = (step >= 0) & (step < n_complete)
        scale = int(place.max(initial=0)) + 2
        pairs = distinct(step[whole] * scale + place[whole] + 1)
        places, n_steps = np.unique(pairs % scale - 1, return_counts=True)
        usual = places[2 * n_steps > n_complete]
        runs = RoleRuns.of(trace)
        if runs is not None:
            before = np.searchsorted(self._rows, runs.first[runs.label == stacks.BACKWARD]) - 1
            usual = np.append(usual, place[before[before >= 0]])
        self._trains = is_among(place, usual)

    def any_between(self, low: int, high: int) -> bool:
        """Return whether a model is called between two rows."""
        first, end = np.searchsorted(self._rows, (low, high))
        return bool(end > first)

    def evaluated_until(self, low: int, high: int) -> int | None:
        """Return where the evaluation at the beginning of a step ends; None where there is none."""
        first, end = np.searchsorted(self._rows, (low, high))
        trains: Bools = self._trains[first:end]
        if not len(trains) or trains[0]:
            return None
        if not trains.any():
            return high
        return int(self._rows[first + int(trains.argmax()) - 1]) + 1


def evaluation_rounds(trace: Trace) -> I64:
    """Return where the rounds of an evaluation under way begin: calls of a model from one place.

    None where the recording does not end in one, in a program that trains.
    """
    steps, tree = Steps.of(trace), CallTree.of(trace)
    is_under_way = len(steps) > 1 and steps.kind[-1] == StepKind.EVALUATION
    if tree is None or not is_under_way or not len(steps.of_kind(StepKind.TRAIN)):
        return np.zeros(0, np.int64)
    calls = trace.module_rows[trace.module_rows >= steps.rows[-1]]
    visit = tree.visit_at(calls)
    first = np.append(True, visit[1:] != visit[:-1])[: len(calls)]
    calls, place = calls[first], tree.visit_node[visit[first]]
    places, count = np.unique(place, return_counts=True)
    rounds: I64 = calls[place == places[count.argmax()]] if len(places) else calls
    return rounds


def after_setup(trace: Trace) -> int:
    """Return the first row that allocates after the model was made; the number of rows without."""
    is_alloc = trace.events.action == Action.ALLOC
    built = np.flatnonzero(is_alloc & trace.stacks.roles.makes_model[trace.events.stack])
    called = trace.module_rows
    if len(called):
        built = built[built < called[0]]
    after = int(built[-1]) + 1 if len(built) else 0
    later = np.flatnonzero(is_alloc[after:])
    return after + int(later[0]) if len(later) else trace.n_events


# ---- without training ----------------------------------------------------------------------------


def _without_training(trace: Trace, tree: CallTree) -> Steps:
    """Return the rounds of the outermost loop that does most of the work."""
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
    starts = distinct(np.array(rows, np.int64))
    kinds = np.full(len(starts), kind, np.uint8)
    return Steps(starts, kinds, "stacks", not trace.ends_in_failure)


def _entry(tree: CallTree, node: int, visit: int) -> int:
    """Return the visit at which the program came to a node, before a visit."""
    depth = int(tree.depth[node])
    paths = tree.paths_of(tree.visit_node[:visit])
    is_there = depth < paths.shape[1] and paths[:, min(depth, paths.shape[1] - 1)] == node
    outside = np.flatnonzero(~np.broadcast_to(is_there, visit))
    return int(outside[-1]) + 1 if len(outside) else 0


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
        if covered >= MIN_COVERED * int(n_allocs[-1]) and median(visits) >= 2 and is_even:
            wide.append(loop)
    wide.sort(key=lambda loop: (loop.depth, loop.low))
    return next(iter(wide), None)


def _first_pass(trace: Trace) -> Steps:
    """Return the one step of a program that failed in its first forward pass; else none."""
    if not (len(trace.module_rows) and trace.ends_in_failure):
        return NO_STEPS
    row, kind = np.array([after_setup(trace)], np.int64), np.array([StepKind.TRAIN], np.uint8)
    return Steps(row, kind, "stacks", is_last_complete=False)


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
    kinds = np.full(len(best), StepKind.OTHER, np.uint8)
    return Steps(best, kinds, "sizes", not trace.ends_in_failure)
