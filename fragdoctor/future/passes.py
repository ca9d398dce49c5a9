"""Tells which phase of training each event of a trace belongs to: setup, forward, backward, step.

The roles of the stacks (``trace/stacks.py``) mark single events. A backward pass on a GPU runs in a
thread without Python, so events without a Python frame belong to it if other stacks show that the
program trains. Unmarked events belong to the pass in progress.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.model.arrays import is_among
from fragdoctor.model.phases import TrainingPhase
from fragdoctor.model.snapshot import I32, I64, U8, Action
from fragdoctor.trace import stacks as stack_roles
from fragdoctor.trace.trace import Trace

NOT_REACHED: Final = np.iinfo(np.int64).max

STILL_READ: Final = 8
"""Results of a model that its layers may still read, with or without a graph: these last results do
not count. If there are fewer than twice as many, the later half does not count."""

KEPT_SHARE: Final = 0.25
"""Share of what modules made before these results: in a training pass, more than this lives on."""

MIN_KEPT: Final = 3
"""Smallest number of results: the input of a residual layer lives on without training too."""


class Passes(Struct, frozen=True):
    """The passes of a device in order; pass i covers rows ``first[i]`` to ``first[i + 1]``.

    Attributes:
        label: ``uint8``, a ``TrainingPhase`` for each pass.
        first: one longer than ``label``; the last is the number of events.
        first_module: first row at which a module's call allocates, or ``NOT_REACHED``.
        is_cut: the trace ends with a failure in the middle of the last pass.
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

    def next_backward(self) -> I64:
        """Return for each pass the next later backward pass, or ``NOT_REACHED``."""
        index = np.where(self.label == TrainingPhase.BACKWARD, np.arange(len(self)), NOT_REACHED)
        after = np.append(index[1:], NOT_REACHED)
        result: I64 = np.minimum.accumulate(after[::-1])[::-1]
        return result


class RoleRuns(Struct):
    """Runs of consecutive events of one role: the role, and where each run begins.

    Attributes:
        label: ``int64``, role of each run (``stacks.FORWARD``, ``BACKWARD``, ``OPTIMIZER``).
        first: row of its first event.
    """

    label: I64
    first: I64

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def of(cls, trace: Trace) -> RoleRuns | None:
        """Return the runs of a trace, worked out only once."""
        return trace.once(find_runs)


def find_runs(trace: Trace) -> RoleRuns | None:
    """Return the runs of forward, backward and optimizer events in order.

    Returns None if the stacks show neither training nor a model. Without a sign of training,
    everything is forward, and events without a Python frame say nothing.
    """
    events, roles = trace.events, trace.stacks.roles
    if not roles.has_python or not len(events):
        return None
    if not roles.trains and not roles.in_module.any():
        return None
    role = roles.role[events.stack]
    role[events.action >= Action.SNAPSHOT] = stack_roles.NO_STACK
    frees = (events.action == Action.FREE_REQUESTED) | (events.action == Action.FREE_COMPLETED)
    if not trace.frees_tell:
        role[frees] = stack_roles.NO_STACK
    silent = stack_roles.BACKWARD if roles.trains else stack_roles.NO_STACK
    role[role == stack_roles.SILENT] = silent
    marked = np.flatnonzero(role != stack_roles.NO_STACK)
    if not len(marked):
        return None
    starts = _changes(role[marked])
    label = role[marked[starts]].astype(np.int64)
    is_alloc = (events.action[marked] == Action.ALLOC).astype(np.int64)
    # A run that only frees (a loss that goes out of scope) is not a pass of its own.
    idle = np.add.reduceat(is_alloc, starts) == 0
    idle &= ~np.isin(label, (stack_roles.OPTIMIZER, stack_roles.ZERO_GRAD))
    idle[0] = False
    label[idle] = -1
    label = _filled(label)
    # After a backward pass or a step, zero_grad belongs to the optimizer, else to the forward pass.
    is_zero = label == stack_roles.ZERO_GRAD
    before = _filled(np.where(is_zero, -1, label))
    is_first = np.cumsum(~is_zero) == 0
    is_forward = is_first | (before == stack_roles.FORWARD)
    label[is_zero] = np.where(is_forward, stack_roles.FORWARD, stack_roles.OPTIMIZER)[is_zero]
    kept = _changes(label)
    return RoleRuns(label[kept], marked[starts[kept]])


def find_passes(trace: Trace, runs: RoleRuns, first_step: int) -> Passes:
    """Return the passes of a program.

    Everything before the row at which the first step begins is setup.
    """
    events = trace.events
    label = np.array([_LABELS[int(x)] for x in range(3)], np.uint8)[runs.label]
    first = np.append(runs.first, len(events))
    first[0] = 0
    if label[0] == TrainingPhase.FORWARD and 0 < first_step < first[1]:
        first = np.insert(first, 1, first_step)
        label = np.insert(label, 0, TrainingPhase.SETUP).astype(np.uint8)
    rows = trace.module_rows
    at = np.searchsorted(rows, first[:-1])
    padded = np.append(rows, NOT_REACHED)
    first_module = np.where(padded[at] < first[1:], padded[at], NOT_REACHED)
    return Passes(label, first, first_module, trace.ends_in_failure)


def last_phase(labels: U8) -> TrainingPhase:
    """Return the phase that ends a step: the optimizer's, or the backward pass if there is none."""
    has_step = bool((labels == TrainingPhase.OPTIMIZER).any())
    return TrainingPhase.OPTIMIZER if has_step else TrainingPhase.BACKWARD


def _changes(labels: npt.NDArray[np.integer[Any]]) -> I64:
    """Return where the label differs from the one before it; the first one does."""
    return np.flatnonzero(np.append(True, labels[1:] != labels[:-1]))


def _filled(label: I64) -> I64:
    """Return the labels with each -1 replaced by the label before it."""
    last = np.maximum.accumulate(np.where(label >= 0, np.arange(len(label)), 0))
    return label[last]


_LABELS: Final = {
    stack_roles.FORWARD: TrainingPhase.FORWARD,
    stack_roles.BACKWARD: TrainingPhase.BACKWARD,
    stack_roles.OPTIMIZER: TrainingPhase.OPTIMIZER,
}

# ---- without stacks ----------------------------------------------------------------------------

_STEP: Final = re.compile(r"Optimizer\.step#")
MAX_ANNOTATIONS: Final = 200_000


def find_optimizer_steps(trace: Trace) -> tuple[I64, I64] | None:
    """Return the rows at which annotated optimizer steps begin, and those at which they end.

    PyTorch (from 2.6 on) records their times in every snapshot. It notes the current device, which
    is the first one if a model spans several: a device without marks of its own uses the steps of
    the others. Returns None if there are none.
    """
    named = [a for a in trace.snapshot.annotations if _STEP.match(a.name[:100])][:MAX_ANNOTATIONS]
    marks = [a for a in named if a.device in (trace.device, -1)] or named
    times = trace.events.time_us
    if not marks or not len(times) or int(times.min()) < 0:
        return None
    times = np.maximum.accumulate(times)
    rows = np.searchsorted(times, [mark.time_us for mark in marks], side="left").astype(np.int64)
    begins = np.array([mark.stage == "START" for mark in marks], np.bool_)
    return rows[begins], rows[~begins]


def is_training_forward(trace: Trace, failed: int) -> bool:
    """Return whether the failing request is in a forward pass that keeps what backward needs.

    A teacher may run first and keep nothing, so the last model that was called counts by itself.
    """
    roles, rows = trace.stacks.roles, trace.module_rows
    if roles.role[trace.events.stack[failed]] != stack_roles.FORWARD:
        return False
    made = trace.lives.stack[(trace.lives.start >= 0) & (trace.lives.start < failed)]
    called = rows[_changes(trace.stacks.places[trace.events.stack[rows]])[: len(rows)]]
    since = {0, *called[called < failed][-1:].tolist()}
    return bool(roles.checkpoints[made].any()) or any(
        kept_of(trace, low, failed)[0] > KEPT_SHARE for low in since
    )


def kept_of(trace: Trace, low: int, high: int) -> tuple[float, I64]:
    """Return the share of the bytes that modules made between two rows and that live at the second.

    Also return the rows of ``lives_of_program`` that do. Results that layers may still read do not
    count.
    """
    lives = trace.lives_of_program
    made = trace.module_rows[(trace.module_rows >= low) & (trace.module_rows < high)]
    made = made[: len(made) - min(STILL_READ, (len(made) + 1) // 2)]
    rows = np.flatnonzero(is_among(lives.start, made))
    kept = rows[lives.free[rows] >= high]
    if len(kept) < MIN_KEPT:
        return 0.0, kept
    return float(lives.size_bytes[kept].sum() / max(lives.size_bytes[rows].sum(), 1)), kept
