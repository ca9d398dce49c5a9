"""The last steps of a trace, aligned: which request of one step is which of another.

Allocations are aligned by their stacks and their order, not by size, since sizes may differ from
step to step. What the alignment gives every allocation is its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.model.arrays import is_among, occurrence
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import WORKSPACE_BYTES, Operations, OpKind
from fragdoctor.trace.pass_alignment import align_by_size
from fragdoctor.trace.steps import StepKind, Steps
from fragdoctor.trace.trace import Trace

MAX_STEPS: Final = 64
"""Complete steps that are looked at, the last ones."""

MAX_OPERATIONS: Final = 400_000
"""Operations of these steps, together; two steps are looked at whatever they hold."""

MAX_CLASSES: Final = 12
"""Kinds of steps that the one under way is compared with."""

ALIGNED: Final = 64
"""Requests before the end by which a step is aligned with another."""

SURE: Final = 4
"""Requests in a row, each of the same size, that tell a place from others."""

NEW_SHARE: Final = 0.1
"""Share of the requests of a step that others need not have for it to be one of their kind."""

NEAR: Final = 12
"""Places around the expected one where a step may go on."""


@dataclass(frozen=True)
class StepWindow:
    """The last complete steps and the one under way, as operations; slots are of the window.

    Steps count from 0, the one under way is ``n_complete``. ``at`` is the first operation of each
    step, one longer.

    Attributes:
        kind, size, stream, pool: per operation.
        step: of each operation.
        allocation: id of the block.
        requests: positions of the allocations of each step.
        has_failed: the last operation is the failing request.
        unserved: operation of the failing request, and its stack, where it is the optimizer's in
            the first step: that step then counts as complete, up to it.
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
    unserved: tuple[np.void, int] | None
    starts_settled: bool
    counts: Bools
    rows: I64

    @classmethod
    def of(cls, trace: Trace, operations: Operations) -> StepWindow | None:
        """Return the window of a trace; None without a complete step that asked for anything."""
        steps = Steps.of(trace)
        if not len(steps):
            return None
        ops = operations.table
        n_past, has_failed = _cut(ops)
        reached = np.maximum.accumulate(ops["row"][:n_past])
        at = np.searchsorted(reached, steps.rows.astype(np.uint32))  # as narrow as the rows
        del reached
        is_open = has_failed or not steps.is_last_complete
        n_all = len(at) - (1 if is_open else 0)
        unserved = _unserved(trace, ops, n_past) if has_failed and not n_all else None
        if unserved is not None:
            n_all, has_failed, is_open = 1, False, False
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
        kind = part["kind"].copy()
        if has_failed:
            kind[-1] = OpKind.MALLOC
        is_made = kind == OpKind.MALLOC
        if at[-2] == at[0] and np.count_nonzero(is_made) > 1:
            return None  # requests in another order: nothing lies between the steps' beginnings
        step = np.repeat(np.arange(len(at) - 1), np.diff(at))
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
            unserved=unserved,
            starts_settled=first > 0 or trace.is_late,
            counts=counts if counts.any() else ~counts,
            rows=np.append(steps.rows, trace.n_events)[first : first + len(at) - 1],
        )


def _cut(ops: npt.NDArray[np.void]) -> tuple[int, bool]:
    """Return how many operations were before the failure at the end, and if there is one."""
    failed = np.flatnonzero(ops["kind"] == OpKind.FAILED)
    if not len(failed) or (ops["kind"][failed[-1] :] == OpKind.MALLOC).any():
        return len(ops), False
    return int(failed[-1]), True


def _unserved(trace: Trace, ops: npt.NDArray[np.void], failed: int) -> tuple[np.void, int] | None:
    """Return the failing request with its stack where an optimizer's step asked for it."""
    stack = int(trace.events.stack[ops["row"][failed]])
    roles = trace.stacks.roles
    return (ops[failed], stack) if roles.role[stack] == stacks.OPTIMIZER else None


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


class AlignedSteps:
    """The steps of a window, aligned.

    Attributes:
        w, n: the window, and its number of complete steps; the step under way is the n-th.
        sequences: the stacks of each step's allocations.
        classes: equal for steps with the same allocations.
        period, start: after how many steps the classes repeat, from which step on.
        found: the step that the one under way goes on like, how many requests of it came before,
            and whether all of them were the same; None where there is none.
        does_more: a good part of what the step under way did, no complete one did.
        in_pass: where a backward pass is under way, the requests without a stack of their own, and
            which of the other step they are; None elsewhere.
        slot: of the block an operation is about; -1 where it is older than the window, or none.
        age: of a free, steps since the block was made; of an allocation, steps that it lives, -1
            where it lived at the end.
    """

    def __init__(self, window: StepWindow) -> None:
        self.w = window
        self.n = window.n_complete
        self.sequences = [window.stack[at] for at in window.requests]
        self.classes = [hash(s.tobytes()) for s in self.sequences[: self.n]]
        self.period, self.start = self._period()
        self.does_more = False
        self.in_pass: tuple[I64, I64] | None = None
        self.found = self._match()
        self.slot, self.n_slots = np.zeros(0, np.int64), 0
        self.age = np.full(len(window.kind), -1, np.int64)
        if self.found is None:
            return
        self.slot, self.n_slots = self._assigned()
        _follow_blocks(window.kind, window.allocation, window.step, self.slot, self.age)

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
            self._numbered(self.n),
            self._numbered(like)[:n_same],
            assume_unique=True,
            return_indices=True,
        )
        # What has no stack of its own is counted from the end, where the two are aligned.
        tells = w.trace.stacks.roles.role[own] != stacks.SILENT
        later = (a >= n_prefix) & tells[a]
        slot[near] = result[theirs[place[near]]]
        slot[a[later]] = result[theirs[b[later]]]
        if self.in_pass is not None:
            silent = np.flatnonzero(~tells)
            slot[silent[silent >= self.in_pass[0][0]]] = -1
            slot[self.in_pass[0]] = result[theirs[self.in_pass[1]]]
        fresh = np.flatnonzero(slot < 0)
        slot[fresh] = n_slots + np.arange(len(fresh))
        result[mine] = slot
        return result, n_slots + len(fresh)

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

    def _match(self) -> tuple[int, int, bool] | None:
        """Return the step that the one under way goes on like, and how many requests it has had.

        The last value says whether all of them were the same.
        """
        mine = self.sequences[self.n]
        if not len(mine):
            return self._before(), 0, True
        same = 0
        for other in self.sequences[: self.n]:
            k = min(len(mine), len(other))
            differs = np.flatnonzero(mine[:k] != other[:k])
            same = max(same, int(differs[0]) if len(differs) else k)
        if same == len(mine):
            return self._like(mine), same, True
        return self._aligned(mine)

    def _like(self, mine: I64) -> int:
        """Return which step the one under way is like that began with the same requests.

        The one a period before; else the last one of a kind that came more than once.
        """
        k, before = len(mine), self._before()
        same = [t for t in range(self.n) if np.array_equal(self.sequences[t][:k], mine)]
        if self.is_periodic and before in same:
            return before
        return max(same, key=lambda t: (self.classes.count(self.classes[t]) > 1, t))

    @property
    def is_periodic(self) -> bool:
        """Whether a whole period was seen to come again."""
        return 2 * self.period <= self.n - self.start

    def _before(self) -> int:
        """Return the step one period before the one under way; the last one without a period."""
        return max(0, self.n - (self.period if self.is_periodic else 1))

    def _aligned(self, mine: I64) -> tuple[int, int, bool] | None:
        """Return where a step with other requests in between or left out goes on.

        The k-th request of a stack is that of the other step: what lies before the end of the step
        under way tells by how much the two are shifted there.
        """
        own = self._numbered(self.n)
        best: tuple[int, int] | None = None
        seen: set[int] = set()
        for t in range(self.n - 1, -1, -1):
            if self.classes[t] in seen or len(seen) >= MAX_CLASSES:
                continue
            seen.add(self.classes[t])
            n_common = len(np.intersect1d(own, self._numbered(t), assume_unique=True))
            if mine[-1] in self.sequences[t] and (best is None or n_common > best[0]):
                best = n_common, t
        if best is None:
            return self._at_new_request(mine)
        self.does_more = len(own) - best[0] > NEW_SHARE * len(own)
        t = best[1]
        other = self.sequences[t]
        theirs = self._numbered(t)
        _, a, b = np.intersect1d(own, theirs, assume_unique=True, return_indices=True)
        near = np.argsort(a)[-ALIGNED:]
        shift = float(np.median((b - a)[near])) if len(near) else 0.0
        expected = len(mine) - 1 + shift
        places = np.flatnonzero(other == mine[-1])
        places = places[np.argsort(np.abs(places - expected), kind="stable")][:NEAR]
        sizes = self.w.size[self.w.requests[self.n]], self.w.size[self.w.requests[t]]
        role = self.w.trace.stacks.roles.role
        is_silent = role[mine] == stacks.SILENT, role[other] == stacks.SILENT
        tells = ~is_silent[0][a]
        self.in_pass = align_by_size(sizes, is_silent, (a[tells], b[tells]))
        if self.in_pass is not None:
            return t, int(self.in_pass[1][-1]) + 1, False
        place = max(
            places.tolist(), key=lambda at: _likeness((mine, sizes[0]), (other, sizes[1]), at)
        )
        return t, place + 1, False

    def _at_new_request(self, mine: I64) -> tuple[int, int, bool] | None:
        """Return where a step goes on whose failing request no other has; all others must match."""
        for t in range(self.n - 1, -1, -1):
            other = self.sequences[t]
            n_same = len(mine) - 1
            if n_same <= len(other) and np.array_equal(mine[:-1], other[:n_same]):
                return t, n_same, False
        return None

    def _numbered(self, step: int) -> I64:
        """Return each stack of a step with how often it came before there, as one number.

        A workspace, which the first product of a line makes as well, does not count.
        """
        sequence, size = self.sequences[step], self.w.size[self.w.requests[step]]
        is_workspace = is_among(size, WORKSPACE_BYTES)
        is_workspace &= np.append(False, sequence[1:] == sequence[:-1])
        key = 2 * (sequence + 1) + is_workspace
        result: I64 = key * 2**31 + occurrence(key)
        return result

    def _silent(self) -> I64:
        """Return the allocations whose stack does not tell them from others."""
        made = np.flatnonzero(self.w.kind == OpKind.MALLOC)
        is_silent = self.w.trace.stacks.roles.role[self.w.stack[made]] == stacks.SILENT
        result: I64 = made[is_silent]
        return result


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
    nth = occurrence(key)
    found, slot = np.unique(group * (int(nth.max()) + 1) + nth, return_inverse=True)
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


def _likeness(mine: tuple[I64, I64], other: tuple[I64, I64], at: int) -> tuple[int, int]:
    """Return how much the last requests are like those that end at a place of another step.

    How many at the very end are the same, as far as that says enough, and how many there are alike.
    """
    k = min(len(mine[0]), at + 1, ALIGNED)
    (stack, size), (stack_there, size_there) = (
        (mine[0][-k:], mine[1][-k:]),
        (other[0][at + 1 - k : at + 1], other[1][at + 1 - k : at + 1]),
    )
    same = stack == stack_there
    rises = np.sign(np.diff(size)) == np.sign(np.diff(size_there))  # sizes may be scaled
    equal = same & (size == size_there)
    differs = np.flatnonzero(~equal[::-1])
    n_last = int(differs[0]) if len(differs) else k
    n_alike = int(np.count_nonzero(equal) + np.count_nonzero(same[1:] & rises))
    return min(n_last, SURE), n_alike
