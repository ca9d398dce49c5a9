"""The continuation of a trace: what the program would have asked for next.

A trace ends in the middle of a step. Its complete steps tell how that one goes on: the rest is
taken from the step whose stacks came in the same order, with sizes scaled where they vary between
steps. Then the recorded steps repeat in their order. A block is named by its slot, the stack that
allocated it and how often that stack had allocated before in the step; a free names the slot and
the age of the block in steps. So what a step keeps is kept, and what it frees of an earlier step is
freed, whichever step came before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.futures import (
    FUTURE_OPERATION,
    KEPT,
    Spread,
    Table,
    fates_of,
    joined,
    with_gradients_freed,
    without_growth,
)
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.optimizer_rest import OptimizerRest
from fragdoctor.trace.step_alignment import StepWindow
from fragdoctor.trace.step_sizes import ROUNDED, SizedSteps
from fragdoctor.trace.trace import Trace

ENOUGH: Final = 3
"""Complete steps that must be alike for the next ones to be known."""

MANY_RISES: Final = 5
"""Rises from which on steps are believed to become larger at half the pace at least."""

GUESSED: Final = 0.008
"""The same where the step is not aligned request by request, or only a first one was complete."""


@dataclass(frozen=True)
class Continuation:
    """What comes after the recorded operations.

    Attributes:
        native: the templates of steps, for the native core.
        make_again, make_lower, make_higher: make the futures of these names.
        n_past: recorded operations that come before; what follows them (a failing request, and what
            its unwinding freed) is replaced by the future.
        n_complete: complete steps that it was made from.
        is_exact: the complete steps are alike to the byte, and the step under way began like them.
        varies: sizes differ between steps without a trend.
        grows: sizes rise from step to step.
        stretch: share by which steps to come may be larger than the largest so far.
        rises: steps only ever became larger.
        is_evaluating: an evaluation was cut off, and none before came to its end: how long it
            lasts is not known.
        is_new: a good part of what the step under way did, no complete one did; or it keeps more.
        first: what was missing of the first step, where that failed in the optimizer; None else.
        order: the steps that repeat, counted from the first that was looked at.
        period_steps: how many of them are steps of the program, not evaluation.
        counts_first: whether the step under way is one of the program's.
        rows: event row at which each complete step began, and that under way.
        first_kept_bytes: what the first step keeps beside gradients and state, and every step may.
    """

    native: _ext.NativeFuture
    make_again: Callable[[], _ext.NativeFuture]
    make_lower: Callable[[], _ext.NativeFuture | None]
    make_higher: Callable[[], _ext.NativeFuture | None]
    n_past: int
    n_complete: int
    is_exact: bool
    varies: bool
    grows: bool
    stretch: float
    rises: bool
    is_evaluating: bool
    is_new: bool
    first: OptimizerRest | None
    order: tuple[int, ...]
    period_steps: int
    counts_first: bool
    rows: I64
    first_kept_bytes: int

    @property
    def period(self) -> int:
        """Number of steps until they repeat, evaluation included."""
        return len(self.order)

    @cached_property
    def again(self) -> _ext.NativeFuture:
        """The future without growth: each step as it was."""
        return self.make_again()

    @cached_property
    def lower(self) -> _ext.NativeFuture | None:
        """The future that asks for less, where sizes are not known; None where they are."""
        return self.make_lower()

    @cached_property
    def higher(self) -> _ext.NativeFuture | None:
        """The future that asks for more, where sizes are not known; None where they are."""
        return self.make_higher()


def continuation_of(trace: Trace, operations: Operations) -> Continuation | None:
    """Return how the program goes on after some requests; None where no complete step says so.

    Args:
        trace: of the device.
        operations: its requests, as recorded or edited.
    """
    window = StepWindow.of(trace, operations)
    if window is None:
        return None
    n_pools = int(operations.table["pool"].max(initial=0))
    return _Builder(window, n_pools).build()


class _Builder(SizedSteps):
    """Makes the templates of a window.

    Attributes:
        fate: of each allocation, how many steps it lives, or KEPT or REPLACED.
    """

    def __init__(self, window: StepWindow, n_pools: int) -> None:
        super().__init__(window)
        self.n_pools = n_pools
        if self.found is not None:
            self.fate = fates_of(self)

    def build(self) -> Continuation | None:
        """Return the continuation."""
        w = self.w
        if self.found is None:
            return None
        if w.unserved is not None:
            return self._after_optimizer(*w.unserved)
        like, n_same, is_same = self.found
        start, is_alike = self.start, self.is_alike
        varies = self._varies(start)
        rises = self._rises(like)
        even = self.growth
        if rises:
            self.growth = np.where(even, even, self.trend)
        rest = self._rest(like, n_same, is_single=self.n == 1)
        grows = bool(self.growth.any())
        varies = (varies or not is_alike) and not rises
        is_equal = is_same and is_alike and not varies
        goes_on = w.has_failed or len(rest) > 0
        order = self._order(goes_on, is_equal=is_equal, rises=rises)
        ends = w.at[1:] - np.where(np.arange(self.n + 1) == self.n, int(w.has_failed), 0)
        steps = self._converted(*(np.arange(w.at[t], ends[t]) for t in order))
        if goes_on:
            steps = [
                joined(s, rest) if t == self.n else s for t, s in zip(order, steps, strict=True)
            ]
        counts = [bool(w.counts[t]) for t in (self.n, *order)]
        if not any(counts[1:]):  # what goes on is evaluation alone: its steps are the program's
            counts = [True] * len(counts)
        if not w.at[-1] - w.at[self.n]:
            counts[0] = False
        is_exact = is_equal and not grows and self.n - start >= ENOUGH
        stretch = self._stretch(like) if varies else 0.0
        spread = self._spread(is_exact=is_exact, varies=varies, stretch=stretch)
        if rises:  # steps that became larger may have become as large as they get
            pace = 0.5 if self.n_rises >= MANY_RISES else 0.0
            spread = replace(spread, slowed=(pace, even != 0))
        table = joined(rest, *steps)
        native = self._native(
            [len(rest), *map(len, steps)], [0, *(t - self.n for t in order)], counts, self._held()
        )
        known = native(table)

        def other(table: Table | None) -> _ext.NativeFuture | None:
            return None if table is None else native(table)

        return Continuation(
            native=known,
            make_again=lambda: native(without_growth(table)) if grows else known,
            make_lower=lambda: other(spread.lower(table)),
            make_higher=lambda: other(spread.higher(table)),
            n_past=w.n_past,
            n_complete=self.n,
            is_exact=is_exact,
            varies=varies,
            grows=grows,
            stretch=stretch,
            rises=rises,
            is_evaluating=self._is_first_evaluation(like),
            is_new=self.does_more or self.keeps_more,
            first=None,
            order=tuple(order),
            period_steps=sum(counts[1:]),
            counts_first=counts[0],
            rows=w.rows,
            first_kept_bytes=self.first_kept_bytes(),
        )

    def _is_first_evaluation(self, like: int) -> bool:
        """Return whether an evaluation is under way and none before was followed by training."""
        counts = self.w.counts[: self.n]
        if counts.all() or not counts.any() or (counts[-1] and counts[like]):
            return False
        ended = ~counts[:-1] & counts[1:]
        return not bool(ended.any()) and not (bool(counts[like]) and self.is_same)

    def _native(
        self,
        n_ops: list[int],
        origin: list[int],
        counts: list[bool],
        held: npt.NDArray[np.int32],
    ) -> Callable[[Table], _ext.NativeFuture]:
        """Return what takes templates, the rest of a step and then the others, as native ones."""
        n_slots, n_pools = max(self.n_slots, 1), self.n_pools

        def native(table: Table) -> _ext.NativeFuture:
            table.setflags(write=False)
            return _ext.NativeFuture(
                table=table.view(np.uint8),
                first=np.cumsum([0, *n_ops]).tolist(),
                origin=origin,
                counts=[int(c) for c in counts],
                cycle=list(range(1, len(n_ops))),
                held=held,
                n_slots=n_slots,
                n_pools=n_pools,
            )

        return native

    def _after_optimizer(self, request: np.void, stack: int) -> Continuation | None:
        """Return how a program goes on that failed in the optimizer's step of its first step.

        The state that is missing is made, and every further step is like the first one, but has
        its state already. The gradients go before the forward pass, or, in the future that asks
        for more, only before the backward pass; that one also has what the optimizer may still
        need in passing.
        """
        w, todo = self.w, OptimizerRest.of(self.w, self.age, request, stack)
        if todo is None:
            return None
        own = todo.made
        self.fate[own] = np.where(todo.is_state, KEPT, 0)
        held = self._held()
        self.age[own[~todo.is_state]] = 0
        sizes = [int(request["size"]), *todo.state, *todo.passing, *todo.possible]
        rest = np.zeros(len(sizes), FUTURE_OPERATION)
        rest["kind"], rest["slot"] = OpKind.MALLOC, self.n_slots
        rest["stream"], rest["pool"] = request["stream"], request["pool"]
        rest["size"] = sizes
        rest["age"][: 1 + len(todo.state)] = KEPT
        rest["age"][0] = KEPT if todo.request_is_state else 0
        self.n_slots += 1
        (first,) = self._converted(np.arange(w.at[0], w.at[1]))
        again = self._without_first_time(first, 0)
        goes = (again["kind"] == OpKind.FREE) & (again["age"] == 1)
        goes &= np.isin(again["slot"], self.slot[todo.gradients])
        early = joined(again[goes], again[~goes])

        def native(begun: Table, then: Table) -> _ext.NativeFuture:
            then = joined(then, begun[begun["age"] == 0])
            n_ops = [len(begun), len(then)]
            return self._native(n_ops, [0, 0], [True, True], held)(joined(begun, then))

        known, higher = native(rest[: len(rest) - len(todo.possible)], early), native(rest, again)
        return Continuation(
            native=known,
            make_again=lambda: known,
            make_lower=lambda: None,
            make_higher=lambda: higher,
            n_past=w.n_past,
            n_complete=1,
            is_exact=False,
            varies=False,
            grows=False,
            stretch=0.0,
            rises=False,
            is_evaluating=False,
            is_new=False,
            first=todo,
            order=(1,),
            period_steps=1,
            counts_first=True,
            rows=w.rows,
            first_kept_bytes=self.first_kept_bytes(),
        )

    def _order(self, goes_on: bool, *, is_equal: bool, rises: bool) -> list[int]:
        """Return the steps that repeat.

        Args:
            goes_on: the step under way is known to its end.
            is_equal: all steps of a period are alike, and the one under way began like them.
            rises: steps do not become smaller again, so that only the last one goes on.
        """
        w, n = self.w, self.n
        period, start = self.period, self.start
        whole = period if is_equal else max(period, (n + 1 - start) // period * period)
        if rises:
            whole = 1
        if not goes_on or not w.at[-1] - w.at[n]:
            # Nothing is under way: the steps go on as they came.
            return list(range(max(0, n - whole), n))
        order = list(range(max(0, n + 1 - whole), n + 1))
        if is_equal and n - period >= start and n >= 2:
            order[-1] = n - period
        return order

    def _spread(self, *, is_exact: bool, varies: bool, stretch: float) -> Spread:
        """Return how far steps may be from what is expected, as far as that is not known."""
        less = 0.0
        if not is_exact:
            less = max(GUESSED if not self.is_same else ROUNDED, self.weak)
        return Spread(
            less=less,
            more=max(less, stretch),
            irregular=self._irregular() & (not self.is_periodic),
            trend=self.trend,
            varies=self._varying() if varies and self.n > 1 else None,
            slowed=None,
        )

    def _irregular(self) -> Bools:
        """Return the slots of what some steps keep and others do not make (a cache by shape)."""
        w = self.w
        made = np.flatnonzero((w.kind == OpKind.MALLOC) & (self.fate < 0))
        made = made[(w.step[made] < self.n) & (w.step[made] >= self.start)]
        n_steps = np.zeros(self.n_slots, np.int64)
        pairs = distinct(self.slot[made] * (self.n + 1) + w.step[made])
        np.add.at(n_steps, pairs // (self.n + 1), 1)
        result: Bools = (n_steps > 0) & (n_steps < 0.7 * (self.n - self.start))
        return result

    def _converted(self, *parts: I64) -> list[Table]:
        """Return recorded operations, a list for each part of them, as future ones."""
        w, at = self.w, np.concatenate(parts)
        kind, slot = w.kind[at], self.slot[at]
        is_made = kind == OpKind.MALLOC
        is_free = (kind >= OpKind.FREE) & (kind <= OpKind.COMPLETE)
        keep = is_made | (is_free & (slot >= 0)) | (kind == OpKind.EMPTY_CACHE)
        n_before = np.append(0, np.cumsum(keep))
        at, slot, is_made = at[keep], np.maximum(slot[keep], 0), is_made[keep]
        result = np.zeros(len(at), FUTURE_OPERATION)
        result["kind"] = kind[keep]
        result["size"] = w.size[at]
        result["slot"] = slot
        result["age"] = np.where(is_made, self.fate[at], self.age[at])
        result["stream"] = w.stream[at]
        result["pool"] = w.pool[at]
        result["growth"] = np.where(is_made, self.growth[slot], 0)
        ends = n_before[np.cumsum([0, *map(len, parts)])].tolist()
        return [result[low:high] for low, high in pairwise(ends)]

    def _rest(self, like: int, n_same: int, *, is_single: bool) -> Table:
        """Return what is missing of the step under way, the failing request first."""
        w = self.w
        requests = w.requests[like]
        after = int(requests[n_same - 1]) + 1 if n_same else int(w.at[like])
        if not n_same and not w.has_failed and w.at[-1] == w.at[self.n]:
            return np.zeros(0, FUTURE_OPERATION)
        at = np.arange(after, w.at[like + 1])
        (rest,) = self._converted(at)
        is_made = rest["kind"] == OpKind.MALLOC
        of = rest["slot"][is_made]
        rest["size"][is_made] = np.maximum(self.predicted[of], 1).astype(np.uint64)
        if is_single:
            rest = self._without_first_time(rest, like)
        if self.in_pass is not None:
            rest = self._with_overdue_frees(rest)
        if w.has_failed:
            (own,) = self._converted(np.array([len(w.kind) - 1]))
            is_known = n_same > 0 and w.stack[requests[n_same - 1]] == w.stack[-1]
            own["age"] = self.fate[requests[n_same - 1]] if is_known else 0
            rest = joined(own, rest)
        return rest

    def _with_overdue_frees(self, rest: Table) -> Table:
        """Return the rest with frees of what the other step had freed by now.

        It goes by the end of the pass that is under way.
        """
        w = self.w
        made = w.requests[self.n]
        made = made[(self.age[made] < 0) & (self.fate[made] == 0) & (w.allocation[made] >= 0)]
        freed = rest["slot"][(rest["kind"] == OpKind.FREE) & (rest["age"] == 0)]
        slots = self.slot[made][~is_among(self.slot[made], freed)]
        overdue = np.zeros(len(slots), FUTURE_OPERATION)
        overdue["kind"], overdue["slot"] = OpKind.FREE, slots
        of_stack = w.trace.stacks.roles.role[w.stack]
        telling = self.slot[(w.kind == OpKind.MALLOC) & (of_stack != stacks.SILENT)]
        behind = (rest["kind"] == OpKind.MALLOC) & is_among(rest["slot"], telling)
        end = int(np.append(np.flatnonzero(behind), len(rest))[0])
        return joined(rest[:end], overdue, rest[end:])

    def _without_first_time(self, rest: Table, like: int) -> Table:
        """Return the rest without what only a first step makes (optimizer state, workspaces)."""
        w = self.w
        made = w.requests[like]
        lives = made[self.age[made] < 0]
        is_old = np.zeros(self.n_slots, np.bool_)
        is_old[self.slot[lives]] = True
        role = np.full(self.n_slots, stacks.NO_STACK, np.int64)
        of_stack = w.trace.stacks.roles.role[w.stack[made]]
        role[self.slot[made]] = np.where(of_stack == stacks.SILENT, stacks.BACKWARD, of_stack)
        is_made = rest["kind"] == OpKind.MALLOC
        again = is_made & is_old[rest["slot"]]
        of_backward = again & (role[rest["slot"]] == stacks.BACKWARD)
        # What else a backward pass keeps (workspaces) is there already.
        older = w.trace.lives.start < w.rows[0]
        is_gradient = is_among(rest["size"], w.trace.lives.requested_bytes[older])
        of_backward &= is_gradient
        gone = again & ~of_backward
        result: Table = rest[~gone]
        if not of_backward.any():
            return result
        in_pass = np.where(is_made, role[rest["slot"]], stacks.NO_STACK)[~gone]
        return with_gradients_freed(result, in_pass, of_backward[~gone], is_gradient[~gone])

    def _held(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the window that live at its end: id, slot, born, age."""
        w = self.w
        made = np.flatnonzero((w.kind == OpKind.MALLOC) & (self.age < 0) & (w.allocation >= 0))
        made = made[self.fate[made] != KEPT]
        now = self.n if w.unserved is None else 0
        columns = (w.allocation[made], self.slot[made], w.step[made] - now, self.fate[made])
        return np.ascontiguousarray(np.stack(columns, axis=1).reshape(-1), np.int32)
