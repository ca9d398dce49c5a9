"""The last steps of a trace as operations, from which a continuation is made."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.trace import Trace

MAX_STEPS: Final = 64
"""The most complete steps in a window; these are the last ones."""

MAX_OPERATIONS: Final = 400_000
"""The most operations in these steps together; two steps are always taken, however large."""


class StepWindow(Struct, frozen=True, dict=True):
    """The last complete steps and the current one, as k operations.

    Steps count from 0; the current one is ``n_complete``.

    Attributes:
        at: ``int64[n_complete + 2]``, first operation of each step, and the end.
        table: the operations, the failing request as one that is served.
        kind, size: of each operation.
        step: step of each operation.
        allocation: the block that each operation concerns, -1 for the failing request.
        stack: stack of each allocation, -1 elsewhere.
        requests: positions of the allocations of each step.
        n_past: operations of the trace before the part that the future replaces.
        has_failed: whether the last operation is the failing request.
        is_late: whether there are steps before the window.
        counts: whether each step is one of the program's; evaluation steps are not.
        rows: event row at which each step begins.
    """

    trace: Trace
    at: I64
    table: npt.NDArray[np.void]
    kind: npt.NDArray[np.uint8]
    size: I64
    step: I64
    allocation: I64
    stack: I64
    requests: list[I64]
    n_complete: int
    n_past: int
    has_failed: bool
    is_late: bool
    counts: Bools
    rows: I64

    def is_resized(self, other: StepWindow) -> bool:
        """Return whether its operations equal those of another window except for their sizes."""
        names = ("at", "kind", "allocation", "stack")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    @classmethod
    def of(cls, trace: Trace, operations: Operations) -> StepWindow | None:
        """Return the window of a trace, or None if no complete step asked for anything."""
        steps = Steps.of(trace)
        if not len(steps):
            return None
        ops = operations.table
        has_failed = bool((ops["kind"][-1:] == OpKind.FAILED).any())
        n_past = len(ops) - int(has_failed)
        reached = np.maximum.accumulate(ops["row"][:n_past])
        at = np.searchsorted(reached, steps.rows.astype(np.uint32))  # as narrow as the rows
        del reached
        is_open = has_failed or not steps.is_last_complete
        n_all = len(at) - int(is_open)
        if n_all < 1:
            return None
        at = np.append(at, [n_past] * (2 - int(is_open)))
        first = max(0, n_all - MAX_STEPS)
        while first < n_all - 2 and n_past - at[first] > MAX_OPERATIONS:
            first += 1
        low, high = int(at[first]), n_past + int(has_failed)
        part = ops[low:high].copy()
        at = at[first:] - low
        at[-1] = high - low
        allocation = part["allocation"].astype(np.int64)
        if has_failed:
            part["kind"][-1], allocation[-1] = OpKind.MALLOC, -1
        is_made = part["kind"] == OpKind.MALLOC
        if at[-2] == at[0] and np.count_nonzero(is_made) > 1:
            return None  # edited requests in another order: nothing lies between the step starts
        stack = np.full(len(part), -1, np.int64)
        stack[is_made] = trace.events.stack[part["row"][is_made]]
        of_kind = np.append(steps.kind, StepKind.TRAIN)[first : first + len(at) - 1]
        counts = of_kind != StepKind.EVALUATION
        return cls(
            trace=trace,
            at=at,
            table=part,
            kind=part["kind"],
            size=part["size"].astype(np.int64),
            step=np.repeat(np.arange(len(at) - 1), np.diff(at)),
            allocation=allocation,
            stack=stack,
            requests=[a + np.flatnonzero(is_made[a:b]) for a, b in pairwise(at.tolist())],
            n_complete=n_all - first,
            n_past=n_past,
            has_failed=has_failed,
            is_late=first > 0 or trace.is_cut,
            counts=counts if counts.any() else ~counts,
            rows=np.append(steps.rows, trace.n_events)[first : first + len(at) - 1],
        )
