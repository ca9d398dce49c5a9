"""The steps of a program: what it does over and over.

A training step lasts from one run of the optimizer to the next and includes all its micro-batches.
If optimizers take turns, as in a GAN, it lasts until each has had its turn. PyTorch marks these
runs (``Optimizer.step#``, from 2.6 on); without marks, stacks show them, and if nothing shows them,
a step ends with a backward pass. Calls of a model from places that most steps do not reach are an
evaluation, which is a step of its own. Without training, a step begins at the rarest place to
which the program returns over most of its work.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.future.passes import RoleRuns, find_optimizer_steps
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I32, I64, U8, Action, Bools
from fragdoctor.model.turns import period_of
from fragdoctor.trace import stacks
from fragdoctor.trace.trace import Trace

MIN_STEPS: Final = 4
"""Visits to a place that make rounds. If a model is called, two or three are enough where no place
comes more often; in a program without a model they may be a coincidence. Backward passes without an
optimizer are steps from this many on; fewer may be micro-batches of a first step."""

MAX_TRIED: Final = 200
"""The most places to try; these are the rarest."""

MIN_COVERED: Final = 0.5
"""Share of a program without training that its steps must cover."""


class StepKind(IntEnum):
    """The purpose of a step; OTHER is neither, or unknown."""

    TRAIN = 0
    EVALUATION = 1
    OTHER = 2


class Steps(Struct, frozen=True):
    """The steps of a device's trace, in order.

    Attributes:
        rows: row at which each begins; it lasts until the next one or the end.
        kind: ``uint8``, a ``StepKind`` for each step.
        is_last_complete: whether the last step was not cut off by a failure or the trace's end.
    """

    rows: I64
    kind: U8
    is_last_complete: bool

    @classmethod
    def of(cls, trace: Trace) -> Steps:
        """Return the steps of a trace, worked out only once."""
        return trace.once(find_steps)

    def __len__(self) -> int:
        return len(self.rows)

    def of_kind(self, kind: StepKind) -> I64:
        """Return the rows at which steps of a kind begin."""
        rows: I64 = self.rows[self.kind == kind]
        return rows

    @property
    def main_rows(self) -> I64:
        """Rows at which training steps begin; without training, those of all steps."""
        training = self.of_kind(StepKind.TRAIN)
        return training if len(training) else self.rows

    def at(self, rows: I64) -> I64:
        """Return the step that each event row is in, or -1 before the first step."""
        step: I64 = np.searchsorted(self.rows, rows, side="right").astype(np.int64) - 1
        return step


NO_STEPS: Final = Steps(np.zeros(0, np.int64), np.zeros(0, np.uint8), is_last_complete=True)


def find_steps(trace: Trace) -> Steps:
    """Return the steps of a device's trace, or no steps if nothing repeats."""
    report_progress("Looking for steps")
    if not trace.n_events:
        return NO_STEPS
    ends = _ends(trace)
    if ends is not None:
        return _training(trace, ends)
    return _without_training(trace)


# ---- with training -------------------------------------------------------------------------------


def _ends(trace: Trace) -> I64 | None:
    """Return the rows at which optimizer runs end, or None for a program without training.

    Optimizers that follow each other without a backward pass in between are one run.
    """
    runs = RoleRuns.of(trace) or RoleRuns(np.zeros(0, np.int64), np.zeros(0, np.int64))
    after = np.append(runs.first[1:], trace.n_events)[: len(runs)]
    is_backward, is_optimizer = (runs.label == r for r in (stacks.BACKWARD, stacks.OPTIMIZER))
    backward = runs.first[is_backward]
    marked = find_optimizer_steps(trace)
    if marked is not None:
        ends = marked[1]
    elif is_optimizer.any() or len(backward):
        ends = after[is_optimizer if is_optimizer.any() else is_backward]
        if not is_optimizer.any():
            # Fewer may be micro-batches of a first step. Passes that keep most of what they took
            # (create_graph) are inner steps of one that a later backward pass ends.
            n_whole = np.count_nonzero(_lets_go(trace, ends))
            if len(ends) < MIN_STEPS or 2 * n_whole < len(ends):
                ends = ends[:0]
        if trace.ends_in_failure and len(ends) and ends[-1] == trace.n_events:
            ends = ends[:-1]  # the failure at the end cut this one off
    else:
        return None
    ends = distinct(ends[ends > 0])
    if len(backward) and len(ends):
        n_before = np.searchsorted(backward, ends)
        ends = ends[np.append(n_before[1:] > n_before[:-1], True)]
    return ends


def _training(trace: Trace, ends: I64) -> Steps:
    turns = _turns(trace, ends)
    period = period_of(turns[1:] if trace.lives.n_initial else turns)  # the first may be cut
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
        is_complete and not trace.ends_in_failure,
    )


def _turns(trace: Trace, ends: I64) -> list[int]:
    """Return what tells runs of different optimizers apart: the callers of the backward passes."""
    roles, stack = trace.stacks.roles, trace.events.stack
    is_call = (roles.role[stack] == stacks.BACKWARD) & (trace.events.action == Action.ALLOC)
    calls = np.flatnonzero(is_call & (trace.stacks.lines_of(stack) >= 0))
    at = np.searchsorted(calls, np.append(0, ends)).tolist()
    return [hash(distinct(stack[calls[low:high]]).tobytes()) for low, high in pairwise(at)]


def _first_start(trace: Trace, ends: I64, asks: I64) -> int | None:
    """Return where the first step begins, or None if the recording lacks its beginning.

    A recording that began inside the program holds the whole first step if that step makes as many
    requests as the next one.
    """
    if not trace.is_cut:
        return min(after_setup(trace), int(np.append(ends, trace.n_events)[0]))
    if len(ends) < 2:
        return None if len(ends) else 0
    n_before = np.searchsorted(asks, np.append(0, ends[:2]))
    is_whole = n_before[1] - n_before[0] >= n_before[2] - n_before[1]
    return 0 if is_whole else None


class _ModelCalls:
    """Where the program calls models, and which of these places belong to training.

    A backward pass follows the last call of a forward pass. Other places belong to training if most
    steps reach them.
    """

    def __init__(self, trace: Trace, edges: I64) -> None:
        self._rows = trace.module_rows
        self._trains = np.ones(len(self._rows), np.bool_)
        n_complete = len(edges) - 2
        place = trace.stacks.places[trace.events.stack[self._rows]].astype(np.int64)
        if n_complete < 2:  # a single step does not show what most steps reach
            self._trains = ~_evaluates(trace, self._rows, place, int(edges[-2]))
            return
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
        """Return where the evaluation at the start of a step ends, or None if there is none."""
        first, end = np.searchsorted(self._rows, (low, high))
        trains: Bools = self._trains[first:end]
        if not len(trains) or trains[0]:
            return None
        if not trains.any():
            return high
        return int(self._rows[first + int(trains.argmax()) - 1]) + 1


def _evaluates(trace: Trace, calls: I64, place: I64, since: int) -> Bools:
    """Return which calls of a model come from places that let go of their memory, since a row."""
    rows, of_visit = _model_visits(trace, since)
    result = np.zeros(len(calls), np.bool_)
    for one in distinct(of_visit).tolist():
        visits = rows[of_visit == one]
        if len(visits) >= MIN_STEPS and _lets_go(trace, visits).all():
            result |= (calls >= since) & (place == one)
    return result


def evaluation_rounds(trace: Trace) -> I64:
    """Return where the rounds of an evaluation in progress begin: model calls from one place.

    Returns no rows unless the recording ends in an evaluation, in a program that trains.
    """
    steps = Steps.of(trace)
    is_under_way = len(steps) > 0 and steps.kind[-1] == StepKind.EVALUATION
    if not is_under_way or not (len(steps) == 1 or len(steps.of_kind(StepKind.TRAIN))):
        return np.zeros(0, np.int64)
    rows, place = _model_visits(trace, int(steps.rows[-1]))
    places, count = np.unique(place, return_counts=True)
    rounds: I64 = rows[place == places[count.argmax()]] if len(rows) else rows
    return rounds


def _model_visits(trace: Trace, since: int) -> tuple[I64, I32]:
    """Return where the program begins to call a model, from a row on, and from which place."""
    rows, apart = _visits(trace, _apart(trace))
    chosen = (rows >= since) & (apart % 2 == 1)
    return rows[chosen], apart[chosen] // 2


def _apart(trace: Trace) -> I32:
    """Return the place of each stack, with the work inside models set apart; -1 without one."""
    places, in_module = trace.stacks.places, trace.stacks.roles.in_module
    result: I32 = np.where(places >= 0, 2 * places + in_module, -1)
    return result


def _visits(trace: Trace, places: I32) -> tuple[I64, I32]:
    """Return where the program moves to another place, judged by its requests, and to which place.

    ``places`` has a place for each stack, or -1 for none.
    """
    action = trace.events.action
    rows = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    place = places[trace.events.stack[rows]]
    rows, place = rows[place >= 0], place[place >= 0]
    begins = np.append(True, place[1:] != place[:-1])[: len(rows)]
    return rows[begins], place[begins]


def after_setup(trace: Trace) -> int:
    """Return the first row that allocates after the model is built, or else the number of rows."""
    is_alloc = trace.events.action == Action.ALLOC
    built = np.flatnonzero(is_alloc & trace.stacks.roles.makes_model[trace.events.stack])
    called = trace.module_rows
    if len(called):
        built = built[built < called[0]]
    after = int(built[-1]) + 1 if len(built) else 0
    later = np.flatnonzero(is_alloc[after:])
    return after + int(later[0]) if len(later) else trace.n_events


# ---- without training ----------------------------------------------------------------------------


def _without_training(trace: Trace) -> Steps:
    """Return the rounds that begin at the rarest place, or no steps if stacks tell no places."""
    places = trace.stacks.places
    visits = _visits(trace, places)
    if len(visits[0]) < MIN_STEPS:  # one line does everything: set apart its work outside the model
        visits = _visits(trace, _apart(trace))
    rounds = _rounds(trace, *visits)
    if rounds is None and len(trace.module_rows) and trace.ends_in_failure:
        # The program failed in its first forward pass, which is its one step.
        row, train = np.array([after_setup(trace)], np.int64), np.array([StepKind.TRAIN], np.uint8)
        return Steps(row, train, is_last_complete=False)
    if rounds is None:
        return NO_STEPS
    kind = StepKind.EVALUATION if len(trace.module_rows) else StepKind.OTHER
    kinds = np.full(len(rounds), kind, np.uint8)
    return Steps(rounds, kinds, not trace.ends_in_failure)


def _rounds(trace: Trace, rows: I64, key: I32) -> I64 | None:
    """Return the visits to the rarest place that the program returns to over most of all visits.

    Visits that end before a model is first called only build or copy it. None if no place fits.
    """
    if not len(rows):
        return None
    _, member, count = np.unique(key, return_inverse=True, return_counts=True)
    order = np.argsort(member.reshape(-1), kind="stable")  # places, by key
    ends = np.cumsum(count)
    first = order[ends - count]
    rarest = np.lexsort((first, count, count < MIN_STEPS))
    calls = trace.module_rows[:1].tolist()
    enough, least = (2, calls[0]) if calls else (MIN_STEPS, 0)
    for c in rarest[count[rarest] >= enough][:MAX_TRIED].tolist():
        at = order[ends[c] - count[c] : ends[c]]
        gaps = np.diff(at)
        covered = (at[-1] - at[0] + gaps.mean()) / len(rows)
        if covered < MIN_COVERED or rows[at[-1]] < least:
            continue
        if count[c] >= MIN_STEPS or _lets_go(trace, rows[at]).all():
            return rows[at]
    return None


def _lets_go(trace: Trace, rounds: I64) -> Bools:
    """Return which rounds free most of what they took, as calls without a graph do.

    The calls of a forward pass that trains keep what they took for the backward pass.
    """
    before = trace.totals.allocated_bytes[rounds]
    _, high = trace.totals.envelope("allocated_bytes", rounds)
    result: Bools = 2 * np.diff(before) < high[:-1] - before[:-1]
    return result
