"""Which phase of training each event of a trace is in: passes of setup, forward, backward, step.

The roles of the stacks (``stack_roles.py``) mark single events. A backward pass on a GPU runs in a
thread without Python, so events without a Python frame belong to it, in a program that shows in
its other stacks that it trains. What is not marked belongs to the pass that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I32, I64, U8, Action, Bools
from fragdoctor.trace import stacks as stack_roles
from fragdoctor.trace.columns import Events
from fragdoctor.trace.stacks import StackRoles
from fragdoctor.trace.trace import Trace

SETUP, FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2, 3
BOTH: Final = 4
"""Forward and backward, not told apart."""
NOT_REACHED: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a device in order; pass i covers rows ``first[i]`` to ``first[i + 1]``.

    Attributes:
        label: ``SETUP`` .. ``BOTH``.
        first: one longer than ``label``; the last is the number of events.
        first_module: first row at which a module's call allocates; ``NOT_REACHED`` without one.
        is_cut: the trace ends with a failure, in the middle of the last pass.
    """

    label: U8
    first: I64
    first_module: I64
    is_cut: bool

    def __len__(self) -> int:
        return len(self.label)

    def of_rows(self) -> I32:
        """Return the pass of each row."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.first))

    def next_of(self, label: int) -> I64:
        """Return for each pass the next later one with a label; ``NOT_REACHED`` without one."""
        index = np.where(self.label == label, np.arange(len(self)), NOT_REACHED)
        after = np.append(index[1:], NOT_REACHED)
        result: I64 = np.minimum.accumulate(after[::-1])[::-1]
        return result


@dataclass(slots=True)
class _Runs:
    """Events of one role in a row: where they begin, and what they did."""

    label: I64
    first: I64
    n_allocs: I64
    n_module: I64


def find_passes(trace: Trace, *, is_late: bool, frees_tell: bool) -> Passes | None:
    """Return the passes of a program; None where its stacks show neither training nor a model.

    Without a sign of training all is setup and forward, and what has no Python frame says nothing.

    Args:
        trace: of the device.
        is_late: memory was live before the first event.
        frees_tell: the stack of a free says who freed; with ``context="alloc"`` it repeats who
            allocated, or there is none.
    """
    events, roles = trace.events, trace.stacks.roles
    if not roles.has_python or not len(events):
        return None
    if not roles.trains and not roles.in_module.any():
        return None
    role = roles.role[events.stack]
    role[events.action >= Action.SNAPSHOT] = stack_roles.NO_STACK
    frees = (events.action == Action.FREE_REQUESTED) | (events.action == Action.FREE_COMPLETED)
    if not frees_tell:
        role[frees] = stack_roles.NO_STACK
    silent = stack_roles.BACKWARD if roles.trains else stack_roles.NO_STACK
    role[role == stack_roles.SILENT] = silent
    marked = np.flatnonzero(role != stack_roles.NO_STACK)
    if not len(marked):
        return None
    runs = _runs(events, roles, role[marked], marked)
    # What frees but makes nothing (a loss that goes out of scope) is no pass of its own.
    is_step = np.isin(runs.label, (stack_roles.OPTIMIZER, stack_roles.ZERO_GRAD))
    idle = (runs.n_allocs == 0) & ~is_step
    idle[0] = False
    runs.label[idle] = -1
    runs.label = _filled(runs.label)
    runs = _merged(runs)
    _place_zero_grad(runs)
    runs = _merged(runs)
    _join_clipping(runs)
    runs = _merged(runs)
    if not frees_tell:
        runs = _with_silent_steps(events, runs)
    return _with_setup(events, roles, runs, is_late=is_late)


def _runs(events: Events, roles: StackRoles, role: I32, marked: I64) -> _Runs:
    """Return the runs of equal roles among the marked rows."""
    fresh = np.append(True, role[1:] != role[:-1])
    starts = np.flatnonzero(fresh)
    is_alloc = events.action[marked] == Action.ALLOC
    in_module = is_alloc & roles.in_module[events.stack[marked]]
    return _Runs(
        label=role[starts].astype(np.int64),
        first=marked[starts],
        n_allocs=np.add.reduceat(is_alloc.astype(np.int64), starts),
        n_module=np.add.reduceat(in_module.astype(np.int64), starts),
    )


def _merged(runs: _Runs) -> _Runs:
    """Return the runs with neighbours of one label taken together."""
    starts = np.flatnonzero(np.append(True, runs.label[1:] != runs.label[:-1]))
    return _Runs(
        runs.label[starts],
        runs.first[starts],
        np.add.reduceat(runs.n_allocs, starts),
        np.add.reduceat(runs.n_module, starts),
    )


def _filled(label: I64) -> I64:
    """Return the labels with each -1 replaced by the label before it."""
    last = np.maximum.accumulate(np.where(label >= 0, np.arange(len(label)), 0))
    return label[last]


def _place_zero_grad(runs: _Runs) -> None:
    """Give ``zero_grad`` to the optimizer after a backward pass or a step, else to the forward."""
    is_zero = runs.label == stack_roles.ZERO_GRAD
    before = _filled(np.where(is_zero, -1, runs.label))
    before[np.cumsum(~is_zero) == 0] = stack_roles.FORWARD
    after_backward = before != stack_roles.FORWARD
    runs.label[is_zero & after_backward] = stack_roles.OPTIMIZER
    runs.label[is_zero & ~after_backward] = stack_roles.FORWARD


def _join_clipping(runs: _Runs) -> None:
    """Give user code between a backward pass and the step (norms, clipping) to the step."""
    label = runs.label
    if len(label) < 3:
        return
    middle = (
        (label[1:-1] == stack_roles.FORWARD)
        & (label[:-2] == stack_roles.BACKWARD)
        & (label[2:] == stack_roles.OPTIMIZER)
        & (runs.n_module[1:-1] == 0)
    )
    label[1:-1][middle] = stack_roles.OPTIMIZER


def _with_silent_steps(events: Events, runs: _Runs) -> _Runs:
    """Give what a backward pass only frees after its last allocation to a step of its own.

    Where frees have no stacks (``context="alloc"``) a step that allocates nothing leaves no mark.
    """
    end = np.append(runs.first[1:], len(events))
    allocs = np.flatnonzero(events.action == Action.ALLOC)
    last = allocs[np.maximum(np.searchsorted(allocs, end) - 1, 0)] + 1
    after = np.append(runs.label[1:], -1)
    chosen = (runs.label == stack_roles.BACKWARD) & (last < end) & (last > runs.first)
    chosen &= (after == stack_roles.FORWARD) | (after == -1)
    at = np.flatnonzero(chosen) + 1
    zeros = np.zeros(len(at), np.int64)
    return _Runs(
        np.insert(runs.label, at, stack_roles.OPTIMIZER),
        np.insert(runs.first, at, last[chosen]),
        np.insert(runs.n_allocs, at, zeros),
        np.insert(runs.n_module, at, zeros),
    )


_LABELS: Final = {
    stack_roles.FORWARD: FORWARD,
    stack_roles.BACKWARD: BACKWARD,
    stack_roles.OPTIMIZER: OPTIMIZER,
}


def _with_setup(events: Events, roles: StackRoles, runs: _Runs, *, is_late: bool) -> Passes:
    """Return the passes, with the building of the model told from the first forward pass."""
    label = np.array([_LABELS[int(x)] for x in range(3)], np.uint8)[runs.label]
    first = np.append(runs.first, len(events))
    first[0] = 0
    is_alloc = events.action == Action.ALLOC
    in_module = is_alloc & roles.in_module[events.stack]
    if label[0] == FORWARD:
        begin = _first_forward(events, roles, is_alloc, (first, label), is_late=is_late)
        if begin > 0:
            first = np.insert(first, 1, begin)
            label = np.insert(label, 0, SETUP).astype(np.uint8)
    rows = np.flatnonzero(in_module)
    at = np.searchsorted(rows, first[:-1])
    padded = np.append(rows, NOT_REACHED)
    first_module = np.where(padded[at] < first[1:], padded[at], NOT_REACHED)
    failed = np.flatnonzero(events.action != Action.SNAPSHOT)
    is_cut = bool(len(failed)) and bool(events.action[failed[-1]] == Action.OOM)
    return Passes(label, first, first_module, is_cut)


def _first_forward(
    events: Events,
    roles: StackRoles,
    is_alloc: Bools,
    passes: tuple[I64, U8],
    *,
    is_late: bool,
) -> int:
    """Return the row at which the first step begins; 0 where the first pass has no setup.

    A step begins where a line allocates that does so again in a later forward pass. With one step
    it begins after the last time that a model is built before the first call of a module.
    """
    first, label = passes
    end = int(first[1])
    rows = np.flatnonzero(is_alloc[:end])
    stack = events.stack[:end][rows]
    builds = roles.makes_model[stack]
    is_later = np.repeat(label == FORWARD, np.diff(first)) & is_alloc
    is_later[:end] = False
    returns = rows[np.isin(stack, np.unique(events.stack[is_later])) & ~builds]
    built, called = rows[builds], rows[roles.in_module[stack]]
    if len(called):
        built = built[built < called[0]]
    after_building = int(built[-1]) + 1 if len(built) else 0
    if not len(returns):
        return after_building if after_building < end else 0
    begin = int(min([returns[0], *called[:1]]))
    # A recording that began in the middle of a run has no setup.
    return begin if after_building or (rows[0] < begin and not is_late) else 0
