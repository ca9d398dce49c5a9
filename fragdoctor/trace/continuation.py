"""The continuation of a trace: what the program would have asked for next.

A trace ends in the middle of a step. Its complete steps tell how that one goes on: the rest is
taken from the step whose stacks came in the same order, with sizes scaled where they vary between
steps. Then the recorded steps repeat in their order. A block is named by its slot, the stack that
allocated it and how often that stack had allocated before in the step; a free names the slot and
the age of the block in steps. So what a step keeps is kept, and what it frees of an earlier step is
freed, whichever step came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.steps import StepKind, Steps
from fragdoctor.trace.trace import Trace

FUTURE_OPERATION: Final = np.dtype(
    {
        "names": [name for name, _, _ in _ext.FUTURE_OP_FIELDS],
        "formats": [form for _, form, _ in _ext.FUTURE_OP_FIELDS],
        "offsets": [offset for _, _, offset in _ext.FUTURE_OP_FIELDS],
        "itemsize": _ext.FUTURE_OP_BYTES,
    }
)
"""One operation of the future, laid out as the native core has it (``future.h``)."""

KEPT: Final[int] = _ext.KEPT
REPLACED: Final[int] = _ext.REPLACED

MAX_STEPS: Final = 64
"""Complete steps that are looked at, the last ones."""

MAX_OPERATIONS: Final = 400_000
"""Operations of these steps, together; two steps are looked at whatever they hold."""

MAX_CLASSES: Final = 12
"""Kinds of steps that the one under way is compared with."""

ALIGNED: Final = 64
"""Requests before the end by which a step is aligned with another."""

NEAR: Final = 12
"""Places around the expected one where a step may go on."""

MISALIGNED: Final = 0.25
"""Share of bytes in requests whose sizes may differ where requests are aligned only roughly."""

SMALL: Final = 64 * 1024
"""Sizes below this may differ between steps that count as alike."""

MANY_STEPS: Final = 8
"""Steps of differing size from which on the largest so far tells much of those to come."""

BOUNDED: Final = 0.01
"""Share by which the largest two steps differ, up to which they are as large as steps get."""

ROUNDED: Final = 0.005
"""Share by which a step may differ from what sizes scaled to it say."""

GUESSED: Final = 0.008
"""The same where the step is not aligned request by request, or only a first one was complete."""

MAX_PREDICTORS: Final = 24
"""Patterns of sizes over the steps that others are told from; the largest."""

MIN_TREND: Final = 6
"""Steps from which on rising sizes are a trend although they do not rise evenly."""


@dataclass(frozen=True)
class Continuation:
    """What comes after the recorded operations.

    Attributes:
        native: the templates of steps, for the native core.
        lower, higher: futures that ask for less, and for more, where sizes are not known; None
            where they are.
        n_past: recorded operations that come before; what follows them (a failing request, and what
            its unwinding freed) is replaced by the future.
        n_complete: complete steps that it was made from.
        is_exact: the complete steps are alike to the byte, and the step under way began like them.
        varies: sizes differ between steps without a trend.
        grows: sizes rise from step to step.
        order: the steps that repeat, counted from the first that was looked at.
        period_steps: how many of them are steps of the program, not evaluation.
        counts_first: whether the step under way is one of the program's.
    """

    native: _ext.NativeFuture
    lower: _ext.NativeFuture | None
    higher: _ext.NativeFuture | None
    n_past: int
    n_complete: int
    is_exact: bool
    varies: bool
    grows: bool
    order: tuple[int, ...]
    period_steps: int
    counts_first: bool

    @property
    def period(self) -> int:
        """Number of steps until they repeat, evaluation included."""
        return len(self.order)


def continuation_of(trace: Trace, operations: Operations) -> Continuation | None:
    """Return how the program goes on after some requests; None where no complete step says so.

    Args:
        trace: of the device.
        operations: its requests, as recorded or edited.
    """
    window = _Window.of(trace, operations)
    if window is None:
        return None
    n_pools = int(operations.table["pool"].max(initial=0))
    return _Builder(window, n_pools).build()


@dataclass(frozen=True)
class _Window:
    """The last complete steps and the one under way, as operations; slots are of the window.

    Steps count from 0, the one under way is ``n_complete``. ``at`` is the first operation of each
    step, one longer.

    Attributes:
        kind, size, stream, pool: per operation.
        step: of each operation.
        allocation: id of the block.
        requests: positions of the allocations of each step.
        has_failed: the last operation is the failing request.
        starts_settled: whether steps before the window exist.
        counts: whether each step is one of the program's.
    """

    trace: Trace
    at: I64
    kind: npt.NDArray[np.uint8]
    size: I64
    stream: npt.NDArray[np.uint16]
    pool: npt.NDArray[np.uint16]
    allocation: I64
    step: I64
    stack: I64
    requests: list[I64]
    n_complete: int
    n_past: int
    has_failed: bool
    starts_settled: bool
    counts: Bools

    @classmethod
    def of(cls, trace: Trace, operations: Operations) -> _Window | None:
        """Return the window of a trace; None without a complete step."""
        steps = Steps.of(trace)
        if not len(steps):
            return None
        ops = operations.table
        n_past, has_failed = _cut(ops)
        reached = np.maximum.accumulate(ops["row"][:n_past]).astype(np.int64)
        at = np.searchsorted(reached, steps.rows)
        is_open = has_failed or not steps.is_last_complete
        n_all = len(at) - (1 if is_open else 0)
        if n_all < 1:
            return None
        at = np.append(at, n_past) if is_open else np.append(at, (n_past, n_past))
        first = max(0, n_all - MAX_STEPS)
        while first < n_all - 2 and n_past - at[first] > MAX_OPERATIONS:
            first += 1
        low, high = int(at[first]), n_past + (1 if has_failed else 0)
        part = ops[low:high]
        at = at[first:] - low
        at[-1] = high - low
        step = np.repeat(np.arange(len(at) - 1), np.diff(at))
        kind = part["kind"].copy()
        if has_failed:
            kind[-1] = OpKind.MALLOC
        is_made = kind == OpKind.MALLOC
        stack = np.full(len(part), -1, np.int64)
        stack[is_made] = trace.events.stack[part["row"][is_made]]
        allocation = part["allocation"].astype(np.int64)
        if has_failed:
            allocation[-1] = -1
        size = part["size"].astype(np.int64)
        requests = [low_ + np.flatnonzero(is_made[low_:high_]) for low_, high_ in pairwise(at)]
        of_kind = np.append(steps.kind, StepKind.TRAIN)[first : first + len(at) - 1]
        counts = of_kind != StepKind.EVALUATION
        return cls(
            trace=trace,
            at=at,
            kind=kind,
            size=size,
            stream=part["stream"],
            pool=part["pool"],
            allocation=allocation,
            step=step,
            stack=stack,
            requests=requests,
            n_complete=n_all - first,
            n_past=n_past,
            has_failed=has_failed,
            starts_settled=first > 0 or trace.is_late,
            counts=counts if counts.any() else ~counts,
        )


def _cut(ops: npt.NDArray[np.void]) -> tuple[int, bool]:
    """Return how many operations were before the failure at the end, and if there is one."""
    failed = np.flatnonzero(ops["kind"] == OpKind.FAILED)
    if not len(failed) or (ops["kind"][failed[-1] :] == OpKind.MALLOC).any():
        return len(ops), False
    return int(failed[-1]), True


def _slots(step: I64, stack: I64, size: I64, n_steps: int) -> tuple[I64, int]:
    """Return the slot of each of some allocations, and how many slots there are.

    A slot is a stack and how often it allocated before in the step; where a stack allocates a size
    equally often in every step, that size is counted by itself. So one allocation more (a workspace
    in the first backward pass, whose stack says nothing) does not shift all that follow.
    """
    if not len(step):
        return np.zeros(0, np.int64), 0
    own, stack_of = np.unique(stack, return_inverse=True)
    n_sizes = int(size.max()) + 1
    if n_sizes < 2**62 // max(len(own), 1):
        pairs, pair = np.unique(stack_of.reshape(-1) * n_sizes + size, return_inverse=True)
        pair = pair.reshape(-1)
        is_even = _even_pairs(pair, pairs // n_sizes, step, n_steps)
        group = np.where(is_even[pair], pair, len(pairs) + stack_of.reshape(-1))
    else:
        group = stack_of.reshape(-1)
    n_groups = int(group.max()) + 1
    key = step * n_groups + group
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(key[order]) > 0))
    nth = np.arange(len(step)) - np.repeat(begins, np.diff(np.append(begins, len(step))))
    occurrence = np.empty(len(step), np.int64)
    occurrence[order] = nth
    found, slot = np.unique(group * (int(nth.max()) + 1) + occurrence, return_inverse=True)
    return slot.reshape(-1), len(found)


def _even_pairs(pair: I64, stack_of_pair: I64, step: I64, n_complete: int) -> Bools:
    """Return which pairs of stack and size occur equally often in most complete steps."""
    n_pairs = len(stack_of_pair)
    count = np.bincount(pair * n_complete + step, minlength=n_pairs * n_complete)
    count = count.reshape(n_pairs, n_complete)
    stack_is_there = np.zeros((int(stack_of_pair.max()) + 1, n_complete), np.bool_)
    stack_is_there[stack_of_pair[pair], step] = True
    n_steps = stack_is_there.sum(axis=1)[stack_of_pair]
    last = n_complete - 1 - np.argmax(count[:, ::-1] > 0, axis=1)
    usual = count[np.arange(n_pairs), last]
    n_equal = ((count == usual[:, None]) & (count > 0)).sum(axis=1)
    result: Bools = (n_equal > 0) & (n_equal >= 0.8 * n_steps)
    return result


def _follow_blocks(
    kind: npt.NDArray[np.uint8], allocation: I64, step: I64, slot: I64, age: I64
) -> None:
    """Write slots and ages of frees, and the ages that allocations reach."""
    made = np.flatnonzero(kind == OpKind.MALLOC)
    made = made[allocation[made] >= 0]
    goes = np.flatnonzero((kind >= OpKind.FREE) & (kind <= OpKind.COMPLETE))
    if not len(made) or not len(goes):
        return
    base, top = int(allocation[made].min()), int(allocation[made].max())
    place = np.full(top - base + 1, -1, np.int64)
    place[allocation[made] - base] = made
    goes = goes[(allocation[goes] >= base) & (allocation[goes] <= top)]
    of = place[allocation[goes] - base]
    known = (of >= 0) & (of < goes)
    goes, of = goes[known], of[known]
    slot[goes] = slot[of]
    age[goes] = step[goes] - step[of]
    is_end = kind[goes] != OpKind.FREE_PENDING
    age[of[is_end]] = age[goes[is_end]]


class _Builder:
    """Makes the templates of a window.

    Attributes:
        slot: of the block an operation is about; -1 where it is older than the window, or none.
        age: of a free, steps since the block was made; of an allocation, steps that it lives, -1
            where it lived at the end.
        size: ``float64[n + 1, n_slots]``: the size in each slot by step, NaN where there is none.
        growth: bytes by which the size in each slot rises with every step.
    """

    def __init__(self, window: _Window, n_pools: int) -> None:
        self.w = window
        self.n = window.n_complete
        self.n_pools = n_pools
        self.sequences = [window.stack[at] for at in window.requests]
        self.classes = [hash(s.tobytes()) for s in self.sequences[: self.n]]
        self.period, self.start = self._period()
        self.found = self._match()
        if self.found is None:
            return
        self.slot, self.n_slots = self._assigned()
        self.age = np.full(len(window.kind), -1, np.int64)
        _follow_blocks(window.kind, window.allocation, window.step, self.slot, self.age)
        self.size = self._sizes()
        self.growth = self._growths()
        self.fate = self._fates()

    def _assigned(self) -> tuple[I64, int]:
        """Return the slot of each allocation; steps of one class share theirs place by place."""
        w = self.w
        result = np.full(len(w.kind), -1, np.int64)
        last = {c: t for t, c in enumerate(self.classes)}
        chosen = list(last.values())
        at = np.concatenate([w.requests[t] for t in chosen])
        step = np.repeat(np.arange(len(chosen)), [len(w.requests[t]) for t in chosen])
        result[at], n_slots = _slots(step, w.stack[at], w.size[at], len(chosen))
        for t, c in enumerate(self.classes):
            result[w.requests[t]] = result[w.requests[last[c]]]
        assert self.found is not None  # noqa: S101 - asked before
        like, n_same, is_same = self.found
        theirs, mine = w.requests[like][:n_same], w.requests[self.n]
        if is_same:
            result[mine] = result[theirs]
            return result, n_slots
        own, other = self.sequences[self.n], self.sequences[like][:n_same]
        k = min(len(own), len(other))
        differs = np.flatnonzero(own[:k] != other[:k])
        n_prefix = int(differs[0]) if len(differs) else k
        slot = np.full(len(own), -1, np.int64)
        slot[:n_prefix] = result[theirs[:n_prefix]]
        place = np.arange(len(own)) + n_same - len(own)
        near = place >= 0
        near[near] = other[place[near]] == own[near]
        near[:n_prefix] = False
        _, a, b = np.intersect1d(
            _numbered(own), _numbered(other), assume_unique=True, return_indices=True
        )
        # What has no stack of its own is counted from the end, where the two are aligned.
        tells = w.trace.stacks.roles.role[own] != stacks.SILENT
        later = (a >= n_prefix) & tells[a]
        slot[near] = result[theirs[place[near]]]
        slot[a[later]] = result[theirs[b[later]]]
        fresh = np.flatnonzero(slot < 0)
        slot[fresh] = n_slots + np.arange(len(fresh))
        result[mine] = slot
        return result, n_slots + len(fresh)

    # ---- what the steps are like -----------------------------------------------------------------

    def _sizes(self) -> npt.NDArray[np.float64]:
        """Return ``float64[n + 1, n_slots]``: the size in each slot, NaN where there is none."""
        w = self.w
        result = np.full((self.n + 1, max(self.n_slots, 1)), np.nan)
        made = np.flatnonzero(w.kind == OpKind.MALLOC)
        result[w.step[made], self.slot[made]] = w.size[made]
        return result

    def _growths(self) -> I64:
        """Return the bytes by which the size in each slot rises with every step."""
        size = self.size
        there = ~np.isnan(size)
        count = there.sum(axis=0)
        result = np.zeros(size.shape[1], np.int64)
        low, high = (
            np.nanmin(np.where(there, size, np.inf), axis=0),
            np.nanmax(np.where(there, size, -np.inf), axis=0),
        )
        for k in np.flatnonzero((count >= 3) & (high > low)).tolist():
            t = np.flatnonzero(there[:, k])
            values = size[t, k]
            result[k] = _slope(t, values)
        return result

    def _period(self) -> tuple[int, int]:
        """Return after how many steps the order of requests repeats, and from which step on."""
        c, n = self.classes, self.n
        for period in range(1, n):
            for start in range(min(3, n - period)):
                if n - start > period and all(
                    c[t] == c[t - period] for t in range(start + period, n)
                ):
                    return period, start
        start = 0 if self.w.starts_settled else 1
        return max(n - start, 1), start

    # ---- the match of the step under way ---------------------------------------------------------

    def _match(self) -> tuple[int, int, bool] | None:
        """Return the step that the one under way goes on like, and how many requests it has had.

        The last value says whether all of them were the same.
        """
        mine = self.sequences[self.n]
        if not len(mine):
            return self._before(), 0, True
        best: tuple[int, int, int] | None = None
        for t in range(self.n):
            other = self.sequences[t]
            k = min(len(mine), len(other))
            differs = np.flatnonzero(mine[:k] != other[:k])
            same = int(differs[0]) if len(differs) else k
            if best is None or (same, t) >= best[:2]:
                best = (same, t, same)
        assert best is not None  # noqa: S101 - there is a complete step
        same, t, _ = best
        if same == len(mine):
            before = self._before()
            if np.array_equal(self.sequences[before][:same], mine):
                t = before
            return t, same, True
        return self._aligned(mine)

    def _before(self) -> int:
        """Return the step one period before the one under way."""
        return max(0, self.n - self.period)

    def _aligned(self, mine: I64) -> tuple[int, int, bool] | None:
        """Return where a step with other requests in between or left out goes on.

        The k-th request of a stack is that of the other step: what lies before the end of the step
        under way tells by how much the two are shifted there.
        """
        own = _numbered(mine)
        best: tuple[int, int] | None = None
        seen: set[int] = set()
        for t in range(self.n - 1, -1, -1):
            if self.classes[t] in seen or len(seen) >= MAX_CLASSES:
                continue
            seen.add(self.classes[t])
            n_common = len(np.intersect1d(own, _numbered(self.sequences[t]), assume_unique=True))
            if mine[-1] in self.sequences[t] and (best is None or n_common > best[0]):
                best = n_common, t
        if best is None:
            return self._at_new_request(mine)
        t = best[1]
        other = self.sequences[t]
        theirs = _numbered(other)
        _, a, b = np.intersect1d(own, theirs, assume_unique=True, return_indices=True)
        near = np.argsort(a)[-ALIGNED:]
        shift = float(np.median((b - a)[near])) if len(near) else 0.0
        expected = len(mine) - 1 + shift
        places = np.flatnonzero(other == mine[-1])
        places = places[np.argsort(np.abs(places - expected), kind="stable")][:NEAR]
        sizes = self.w.size[self.w.requests[self.n]], self.w.size[self.w.requests[t]]
        alike = [_n_alike((mine, sizes[0]), (other, sizes[1]), at) for at in places.tolist()]
        return t, int(places[int(np.argmax(alike))]) + 1, False

    def _at_new_request(self, mine: I64) -> tuple[int, int, bool] | None:
        """Return where a step goes on whose failing request no other has; all others must match."""
        for t in range(self.n - 1, -1, -1):
            other = self.sequences[t]
            n_same = len(mine) - 1
            if n_same <= len(other) and np.array_equal(mine[:-1], other[:n_same]):
                return t, n_same, False
        return None

    # ---- fates -----------------------------------------------------------------------------------

    def _fates(self) -> I64:
        """Return for each allocation how many steps it lives, or KEPT or REPLACED."""
        w = self.w
        made = np.flatnonzero(w.kind == OpKind.MALLOC)
        fate = np.zeros(len(w.kind), np.int64)
        fate[made] = self.age[made]
        ended = made[self.age[made] >= 0]
        usual = np.full(self.n_slots, -1, np.int64)
        longest = np.full(self.n_slots, -1, np.int64)
        usual[self.slot[ended]] = self.age[ended]  # the last one stays
        np.maximum.at(longest, self.slot[ended], self.age[ended])
        lives = made[self.age[made] < 0]
        reached = self.n - w.step[lives]
        settled = (w.step[lives] < self.n) & ((w.step[lives] > 0) | w.starts_settled)
        n_kept = np.bincount(self.slot[lives][settled], minlength=self.n_slots)
        if self.n == 2 and not w.starts_settled:
            first = lives[w.step[lives] == 0]
            pair = set(zip(self.slot[first].tolist(), w.size[first].tolist(), strict=True))
            for i in lives[w.step[lives] == 1].tolist():
                n_kept[self.slot[i]] += (int(self.slot[i]), int(w.size[i])) in pair
        slot = self.slot[lives]
        result = np.where(n_kept[slot] >= 2, KEPT, np.where(reached > 0, REPLACED, 0))
        result = np.where(longest[slot] >= reached, longest[slot], result)
        result = np.where(usual[slot] >= reached, usual[slot], result)
        fate[lives] = result
        return fate

    # ---- templates -------------------------------------------------------------------------------

    def build(self) -> Continuation | None:
        """Return the continuation."""
        w = self.w
        if self.found is None:
            return None
        like, n_same, is_same = self.found
        self.n_same, self.is_same = n_same, is_same
        period, start = self.period, self.start
        is_single = self.n - start < 2 and not w.starts_settled
        is_alike = self.is_alike = self._began_alike(like)
        rest = self._rest(like, n_same, is_single=self.n == 1)
        varies = self._varies(start)
        grows = bool(self.growth.any())
        varies = varies or not is_alike
        is_equal = is_same and is_alike and not varies
        if varies or not is_equal:
            whole = max(period, (self.n + 1 - start) // period * period)
        else:
            whole = period
        order = list(range(max(0, self.n + 1 - whole), self.n + 1))
        begun = self._converted(np.arange(w.at[self.n], w.at[self.n + 1] - int(w.has_failed)))
        own = _joined(begun, rest) if w.has_failed or len(rest) else None
        if own is None or not w.at[-1] - w.at[self.n]:
            # Nothing is under way: the steps go on as they came.
            order = list(range(max(0, self.n - whole), self.n))
        elif is_equal and self.n - period >= start and self.n >= 2:
            order[-1] = self.n - period
        parts, first, origin, counts = [rest], [0, len(rest)], [0], [bool(w.counts[self.n])]
        cycle = []
        for t in order:
            part = own if t == self.n and own is not None else self._template(t)
            cycle.append(len(parts))
            parts.append(part)
            first.append(first[-1] + len(part))
            origin.append(t - self.n)
            counts.append(bool(w.counts[t]))
        if not w.at[-1] - w.at[self.n]:
            counts[0] = False
        table = _joined(*parts)

        def native(one: npt.NDArray[np.void]) -> _ext.NativeFuture:
            one.setflags(write=False)
            return _ext.NativeFuture(
                table=one.view(np.uint8),
                first=first,
                origin=origin,
                counts=[int(c) for c in counts],
                cycle=cycle,
                held=self._held(),
                n_slots=max(self.n_slots, 1),
                n_pools=self.n_pools,
            )

        is_exact = is_equal and not grows and not is_single and self.n >= 2
        lower, higher = self._scenarios(table, like, is_exact=is_exact, varies=varies)
        return Continuation(
            native=native(table),
            lower=None if lower is None else native(lower),
            higher=None if higher is None else native(higher),
            n_past=w.n_past,
            n_complete=self.n,
            is_exact=is_exact,
            varies=varies,
            grows=grows,
            order=tuple(order),
            period_steps=sum(counts[1:]),
            counts_first=counts[0],
        )

    def _scenarios(
        self, table: npt.NDArray[np.void], like: int, *, is_exact: bool, varies: bool
    ) -> tuple[npt.NDArray[np.void] | None, npt.NDArray[np.void] | None]:
        """Return futures that ask for less and for more, as far as is not known."""
        stretch = self._stretch(like) if varies else 0.0
        less, more = 0.0, 0.0
        if not is_exact:
            less = more = GUESSED if not self.is_same else ROUNDED
        more = max(more, stretch)
        is_periodic = 2 * self.period <= self.n - self.start
        irregular = self._irregular() & (not is_periodic)
        is_made = table["kind"] == OpKind.MALLOC
        passing = is_made & (table["age"] == 0)
        lower = higher = None
        if less or irregular.any():
            lower = table.copy()
            lower["size"][passing] = (table["size"][passing] * (1 - less)).astype(np.uint64)
            lower["age"][is_made & irregular[table["slot"]] & (table["age"] < 0)] = 0
        if more:
            higher = table.copy()
            chosen = passing
            if varies and self.n > 1:
                chosen = passing & self._varying()[table["slot"]]
            higher["size"][chosen] = (table["size"][chosen] * (1 + more)).astype(np.uint64)
        return lower, higher

    def _varying(self) -> Bools:
        """Return the slots whose sizes differ between steps."""
        there = ~np.isnan(self.size)
        low = np.where(there, self.size, np.inf).min(axis=0)
        high = np.where(there, self.size, -np.inf).max(axis=0)
        result: Bools = high > low
        return result

    def _stretch(self, like: int) -> float:
        """Return by what share the steps to come may be larger than the largest so far.

        Where the largest two are far apart a larger one is to be expected; where many are about as
        large as the largest there is a bound.
        """
        w = self.w
        total = [
            float(w.size[w.requests[t]].sum())
            for t in range(self.start, self.n)
            if self.classes[t] == self.classes[like]
        ]
        slot = self.slot[w.requests[like]]
        seen = self.size[self.n, slot]
        predicted = np.where(np.isnan(seen), self.predicted[slot], seen)
        total.append(float(predicted.sum()))
        x = np.sort(np.array(total))[::-1]
        if len(x) < 2 or not x[0]:
            return 1.0
        gap, spread = (x[0] - x[1]) / x[0], (x[0] - x[-1]) / x[0]
        if gap < BOUNDED / 10:
            return ROUNDED
        if gap < BOUNDED or len(x) > MANY_STEPS:
            return float(max(ROUNDED, gap, spread / len(x)))
        return float(min(max(2 * gap, 1.2 * spread * min(1.0, 8 / len(x))), 1.0))

    def _irregular(self) -> Bools:
        """Return the slots of what some steps keep and others do not make (a cache by shape)."""
        w = self.w
        made = np.flatnonzero((w.kind == OpKind.MALLOC) & (self.fate < 0))
        made = made[(w.step[made] < self.n) & (w.step[made] >= self.start)]
        n_steps = np.zeros(self.n_slots, np.int64)
        pairs = np.unique(self.slot[made] * (self.n + 1) + w.step[made])
        np.add.at(n_steps, pairs // (self.n + 1), 1)
        result: Bools = (n_steps > 0) & (n_steps < 0.7 * (self.n - self.start))
        return result

    def _template(self, step: int) -> npt.NDArray[np.void]:
        """Return a recorded step as future operations."""
        w = self.w
        return self._converted(np.arange(w.at[step], w.at[step + 1]))

    def _converted(self, at: I64) -> npt.NDArray[np.void]:
        w = self.w
        is_made = w.kind[at] == OpKind.MALLOC
        is_free = (w.kind[at] >= OpKind.FREE) & (w.kind[at] <= OpKind.COMPLETE)
        keep = is_made | (is_free & (self.slot[at] >= 0)) | (w.kind[at] == OpKind.EMPTY_CACHE)
        at, is_made = at[keep], is_made[keep]
        result = np.zeros(len(at), FUTURE_OPERATION)
        result["kind"] = w.kind[at]
        result["size"] = w.size[at]
        result["slot"] = np.maximum(self.slot[at], 0)
        result["age"] = np.where(is_made, self.fate[at], self.age[at])
        result["stream"] = w.stream[at]
        result["pool"] = w.pool[at]
        result["growth"] = np.where(is_made, self.growth[np.maximum(self.slot[at], 0)], 0)
        return result

    def _rest(self, like: int, n_same: int, *, is_single: bool) -> npt.NDArray[np.void]:
        """Return what is missing of the step under way, the failing request first."""
        w = self.w
        requests = w.requests[like]
        after = int(requests[n_same - 1]) + 1 if n_same else int(w.at[like])
        self.predicted = np.where(np.isnan(self.size[like]), 1, self.size[like])
        if not n_same and not w.has_failed and w.at[-1] == w.at[self.n]:
            return np.zeros(0, FUTURE_OPERATION)
        at = np.arange(after, w.at[like + 1])
        rest = self._converted(at)
        is_made = rest["kind"] == OpKind.MALLOC
        predicted = self.predicted = self._predicted(like)
        of = rest["slot"][is_made]
        rest["size"][is_made] = np.maximum(predicted[of], 1).astype(np.uint64)
        rest["growth"][is_made] = 0
        if is_single:
            rest = self._without_first_time(rest, like)
        if w.has_failed:
            own = self._converted(np.array([len(w.kind) - 1]))
            own["growth"] = 0
            is_known = n_same > 0 and w.stack[requests[n_same - 1]] == w.stack[-1]
            own["age"] = self.fate[requests[n_same - 1]] if is_known else 0
            rest = _joined(own, rest)
        return rest

    def _without_first_time(self, rest: npt.NDArray[np.void], like: int) -> npt.NDArray[np.void]:
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
        backward = np.flatnonzero(is_made & (role[rest["slot"]] == stacks.BACKWARD))
        result: npt.NDArray[np.void] = rest[~(again & ~of_backward)]
        if not len(backward) or not of_backward.any():
            return result
        # Gradients are freed before they are made again (set_to_none).
        freed = np.zeros(int(of_backward.sum()), FUTURE_OPERATION)
        freed["kind"], freed["slot"] = OpKind.FREE, rest["slot"][of_backward]
        freed["age"] = 1
        at = int(np.count_nonzero(~(again & ~of_backward)[: backward[0]]))
        return _joined(result[:at], freed, result[at:])

    def _held(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the window that live at its end: id, slot, born, age."""
        w = self.w
        made = np.flatnonzero((w.kind == OpKind.MALLOC) & (self.age < 0) & (w.allocation >= 0))
        made = made[self.fate[made] != KEPT]
        columns = (w.allocation[made], self.slot[made], w.step[made] - self.n, self.fate[made])
        return np.ascontiguousarray(np.stack(columns, axis=1).reshape(-1), np.int32)

    # ---- sizes -----------------------------------------------------------------------------------

    def _varies(self, start: int) -> bool:
        """Return whether sizes differ between like steps, other than by growing evenly."""
        w = self.w
        last: dict[int, tuple[I64, I64]] = {}
        for t in range(start, self.n):
            at = w.requests[t]
            size, grows = w.size[at], self.growth[self.slot[at]] != 0
            before = last.get(self.classes[t])
            if before is not None:
                fixed = ~(before[1] | grows)
                if _differs(before[0][fixed], size[fixed]):
                    return True
            last[self.classes[t]] = size, grows
        return False

    def _began_alike(self, like: int) -> bool:
        """Return whether the step under way has the sizes of another so far."""
        mine, theirs = self.size[self.n], self.size[like]
        both = ~np.isnan(mine) & ~np.isnan(theirs) & (self.growth == 0)
        if self.is_same:
            return not _differs(mine[both], theirs[both])
        # Some requests may not be aligned: but if batches differ, most sizes do.
        both[self.slot[self._silent()]] = False
        differs = both & (mine != theirs)
        return bool(theirs[differs].sum() <= MISALIGNED * max(theirs[both].sum(), 1.0))

    def _silent(self) -> I64:
        """Return the allocations whose stack does not tell them from others."""
        made = np.flatnonzero(self.w.kind == OpKind.MALLOC)
        is_silent = self.w.trace.stacks.roles.role[self.w.stack[made]] == stacks.SILENT
        result: I64 = made[is_silent]
        return result

    def _predicted(self, like: int) -> npt.NDArray[np.float64]:
        """Return the size expected in each slot of the step under way."""
        n = self.n
        past, seen = self.size[:n], self.size[n]
        result = self.size[like].copy()
        grows = self.growth != 0
        result[grows] += (self.growth * (n - like))[grows]
        low = np.nanmin(np.where(np.isnan(past), np.inf, past), axis=0)
        high = np.nanmax(np.where(np.isnan(past), -np.inf, past), axis=0)
        varies = (high > low) & ~grows
        known = ~np.isnan(seen)
        wanted = np.flatnonzero(varies & ~known & ~np.isnan(result))
        predictors = self._predictors(varies & known)
        self.weak = 0.0
        if len(wanted) and len(predictors):
            result[wanted] = self._fitted(wanted, predictors, result[wanted])
        self._scale_alike(result, like, usable=~varies & ~grows)
        return np.where(np.isnan(result), 1, result)

    def _scale_alike(self, result: npt.NDArray[np.float64], like: int, *, usable: Bools) -> None:
        """Change sizes that changed for the first time: what was as large changes alike."""
        was, now = self.size[like], self.size[self.n]
        both = usable & ~np.isnan(was) & ~np.isnan(now)
        changed = both & (was != now)
        if not self.is_same:
            changed[self.slot[self._silent()]] = False
        if not changed.any() or self.is_alike:
            return
        new = dict(zip(was[changed].tolist(), now[changed].tolist(), strict=True))
        fixed = set(was[both & ~changed].tolist())
        large = changed & (was > SMALL)
        ratio = float(np.median(now[large] / was[large])) if large.any() else 1.0
        keeps = np.zeros(len(was), np.bool_)
        kept = np.flatnonzero((self.w.kind == OpKind.MALLOC) & (self.age != 0))
        kept = kept[self.w.step[kept] == like]
        keeps[self.slot[kept]] = True
        for k in np.flatnonzero(usable & ~np.isnan(was) & np.isnan(now)).tolist():
            size = was[k].item()
            if size in new and size not in fixed:
                result[k] = new[size]
            elif size not in fixed and not keeps[k] and size > SMALL:
                result[k] = size * ratio

    def _predictors(self, usable: Bools) -> I64:
        """Return slots whose sizes tell those of others: of each pattern over the steps one."""
        at: I64 = np.flatnonzero(usable)
        if not len(at):
            return at
        part = self.size[: self.n, at]
        count = (~np.isnan(part)).sum(axis=0)
        at, part = at[count >= 2], part[:, count >= 2]
        if not len(at):
            return at
        scaled = np.round(part / np.nanmax(part, axis=0), 6)
        _, first = np.unique(np.nan_to_num(scaled, nan=-1), axis=1, return_index=True)
        chosen = at[np.sort(first)]
        biggest = np.argsort(-np.nanmax(self.size[: self.n, chosen], axis=0), kind="stable")
        result: I64 = chosen[biggest[:MAX_PREDICTORS]]
        return result

    def _fitted(
        self, wanted: I64, predictors: I64, fallback: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return sizes as affine functions of the predictor that explains each best."""
        past, seen = self.size[: self.n], self.size[self.n]
        y = past[:, wanted]
        best = np.full(len(wanted), np.inf)
        result = fallback.copy()
        for p in predictors.tolist():
            x = past[:, p : p + 1]
            both = ~np.isnan(x) & ~np.isnan(y)
            m = both.sum(axis=0)
            xs, ys = np.where(both, x, 0.0), np.where(both, y, 0.0)
            safe = np.maximum(m, 1)
            mx, my = xs.sum(axis=0) / safe, ys.sum(axis=0) / safe
            dx, dy = np.where(both, x - mx, 0.0), np.where(both, y - my, 0.0)
            vx = (dx * dx).sum(axis=0)
            slope = np.divide((dx * dy).sum(axis=0), vx, out=np.zeros_like(vx), where=vx > 0)
            off = np.where(both, dy - slope * dx, 0.0)
            error = np.sqrt((off * off).sum(axis=0) / safe) / np.maximum(my, 1)
            value = my + slope * (seen[p] - mx)
            better = (vx > 0) & (m >= 2) & (error < best) & (value > 0)
            best[better], result[better] = error[better], value[better]
        finite = np.isfinite(best)
        self.weak = float((np.where(finite, best, 1.0) * fallback).sum() / max(fallback.sum(), 1))
        return result


def _n_alike(mine: tuple[I64, I64], other: tuple[I64, I64], at: int) -> int:
    """Return how many of the last requests equal those that end at a place of another step."""
    k = min(len(mine[0]), at + 1, ALIGNED)
    (stack, size), (stack_there, size_there) = (
        (mine[0][-k:], mine[1][-k:]),
        (other[0][at + 1 - k : at + 1], other[1][at + 1 - k : at + 1]),
    )
    same = stack == stack_there
    rises = np.sign(np.diff(size)) == np.sign(np.diff(size_there))  # sizes may be scaled
    return int(np.count_nonzero(same & (size == size_there)) + np.count_nonzero(same[1:] & rises))


def _numbered(sequence: I64) -> I64:
    """Return each stack with how often it came before, as one number."""
    order = np.argsort(sequence, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(sequence[order]) > 0))
    nth = np.empty(len(sequence), np.int64)
    nth[order] = np.arange(len(sequence)) - np.repeat(
        begins, np.diff(np.append(begins, len(sequence)))
    )
    return (sequence + 1) * 2**31 + nth


def _joined(*parts: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return tables of future operations after each other; ``concatenate`` would repack them."""
    result = np.empty(sum(len(part) for part in parts), FUTURE_OPERATION)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result


def _differs(mine: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether sizes differ by more than what rounds away."""
    return bool(((mine != other) & (np.maximum(mine, other) > SMALL)).any())


def _slope(t: I64, values: npt.NDArray[np.float64]) -> int:
    """Return the bytes a size rises by per step; 0 where it does not rise steadily."""
    steps = np.diff(t)
    rises = np.diff(values)
    slope = rises[-1] / steps[-1]
    if (rises == slope * steps).all():
        return int(slope)
    if len(t) < MIN_TREND or (rises < 0).any() or np.count_nonzero(rises) < 3:
        return 0
    dt, dv = t - t.mean(), values - values.mean()
    total = float((dv * dv).sum())
    fit = float((dt * dv).sum()) ** 2 / (float((dt * dt).sum()) * total) if total else 0.0
    return int((dt * dv).sum() / (dt * dt).sum()) if fit >= 0.8 else 0
