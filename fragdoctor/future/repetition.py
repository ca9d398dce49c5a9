"""What comes after a recording whose steps repeat: the rest of the current step, then more steps.

The rest is taken from the complete step that the current one resembles. Then the last period of
steps repeats; sizes that rise evenly keep rising. A block is named by its slot, which is the place
of its allocation in a step; a free names the slot and the age of the block in steps. So whatever
the steps keep stays, and whatever they free of an earlier step is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.future.alignment import Requests, align
from fragdoctor.future.window import StepWindow
from fragdoctor.model.arrays import median, occurrence
from fragdoctor.model.snapshot import I64
from fragdoctor.model.trend import POSSIBLE_P, trend_of
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.trace import Trace

F64 = npt.NDArray[np.float64]

MAX_KINDS: Final = 12
"""The most kinds of steps, told apart by the order of their requests, to align; the latest ones."""

MIN_EVEN: Final = 5
"""Over this many steps a size must rise evenly before it is taken to keep rising, and what steps
ask for in all must not rise before later steps are taken to be like them."""

FUTURE_OPERATION: Final = np.dtype(
    {
        "names": [name for name, _, _ in _ext.FUTURE_OP_FIELDS],
        "formats": [form for _, form, _ in _ext.FUTURE_OP_FIELDS],
        "offsets": [offset for _, _, offset in _ext.FUTURE_OP_FIELDS],
        "itemsize": _ext.FUTURE_OP_BYTES,
    }
)
"""One operation of the future, laid out as in the native core (``future.h``)."""

FutureOperations = npt.NDArray[np.void]


class StepDoubt(Struct, frozen=True):
    """The share by which a coming step may differ from what is expected of it, and why."""

    share: float
    reason: str


class Repetition(Struct, frozen=True, dict=True):
    """What comes after the recorded operations.

    Attributes:
        play: makes the future in which coming steps ask for this many times what is expected.
        n_past: recorded operations that come before the future; it replaces what follows them (a
            failing request, and what its unwinding freed).
        n_complete: complete steps that it was made from.
        is_exact: whether they are equal to the byte, and the current step began like them.
        doubt: by how much a coming step may differ from what is expected of it.
        grows: whether sizes rise from step to step.
        period: how many steps there are until they repeat, including evaluation.
        period_steps: how many of them are steps of the program, not evaluation.
        counts_first: whether the current step is one of the program's.
        steps: the aligned steps that it was made from.
    """

    play: Callable[[float], _ext.NativeFuture]
    n_past: int
    n_complete: int
    is_exact: bool
    doubt: StepDoubt
    grows: bool
    period: int
    period_steps: int
    counts_first: bool
    steps: AlignedSteps

    @cached_property
    def expected(self) -> _ext.NativeFuture:
        """The future as expected."""
        return self.play(1.0)


def repetition_of(trace: Trace, operations: Operations) -> Repetition | None:
    """Return how the program continues after some requests, or None if no complete step says so."""
    window = StepWindow.of(trace, operations)
    if window is None:
        return None
    steps = AlignedSteps(window)
    if steps.like < 0:
        return None
    return _repeated(steps, int(operations.table["pool"].max(initial=0)))


class AlignedSteps:
    """The steps of a window, aligned request by request.

    Attributes:
        w, n: the window, and its number of complete steps; the current step is the n-th.
        kinds: equal for steps that make the same requests in the same order.
        like, n_same: the complete step that the current one resembles, and how many of its requests
            the current one has already made; -1 if there is no such step.
        slot: ``int64[k]``: the slot of an operation's block; -1 if the block is older than the
            window, or the operation has no block.
        age: ``int64[k]``: for a free, steps since the block was made; for an allocation, steps that
            it lives, -1 if it lived at the end.
        fate: ``int64[k]``: for an allocation, steps that it lives, or KEPT, or REPLACED.
        size: ``float64[n + 1, n_slots]``: the size in each slot by step, NaN if there is none.
        growth: ``int64[n_slots]``: bytes by which the size in each slot rises with every step.
    """

    def __init__(self, window: StepWindow) -> None:
        self.w, self.n = window, window.n_complete
        self._align()
        if self.like < 0:
            return
        self.size = np.full((self.n + 1, max(self.n_slots, 1)), np.nan)
        made = np.flatnonzero(window.kind == OpKind.MALLOC)
        self.size[window.step[made], self.slot[made]] = window.size[made]
        self.growth = self._growths()
        self.period = self._period([self._exactly(t) for t in range(self.n)])

    def _align(self) -> None:
        """Match the requests of all steps, and find what becomes of each block."""
        window = self.w
        role = window.trace.stacks.roles.role[window.stack]
        tells = ~np.isin(role, (stacks.SILENT, stacks.NO_STACK))
        self._requests = [
            Requests(window.stack[at], window.size[at], tells[at]) for at in window.requests
        ]
        self.kinds = [hash(r.site.tobytes()) for r in self._requests[: self.n]]
        self.period = self._period(self.kinds)
        self._unlike = 0.0
        self.like: int
        self.like, self.n_same, own = self._match()
        if self.like < 0:
            return
        self.slot: I64
        self.n_slots: int
        self.slot, self.n_slots = self._slots(own)
        self.age = np.full(len(window.kind), -1, np.int64)
        self._follow_blocks()
        self.fate = self._fates()

    def _exactly(self, step: int) -> int:
        """Return a number that is equal for steps whose requests are equal except for growth."""
        at = self.w.requests[step]
        size = self.w.size[at] - self.growth[self.slot[at]] * step
        return hash((self.kinds[step], size.tobytes()))

    def _period(self, keys: list[int]) -> int:
        """Return after how many steps the steps repeat exactly, or all of them if they do not.

        The first steps of the window may differ from those that repeat.
        """
        n = self.n
        for period in range(1, n):
            differs = [t for t in range(n - period) if keys[t] != keys[t + period]]
            start = differs[-1] + 1 if differs else 0
            if n - start >= 2 * period and start <= period:
                return period
        return n

    def _match(self) -> tuple[int, int, I64]:
        """Return the step that the current one resembles, its requests so far, and their mates."""
        own, n = self._requests[self.n], self.n
        # Of a period the same turn; where nothing comes again the latest.
        recent = list(dict.fromkeys([n - self.period or n - 1, *range(n - 1, -1, -1)]))
        nothing = np.zeros(0, np.int64)
        if not len(own):
            return recent[0], 0, nothing
        seen: set[int] = set()
        best: tuple[int, int, int, I64, I64] | None = None
        for t in recent:
            other = self._requests[t]
            if self.kinds[t] in seen or len(seen) >= MAX_KINDS:
                continue
            seen.add(self.kinds[t])
            if np.array_equal(other.site[: len(own)], own.site):
                return t, len(own), np.arange(len(own))
            at, mate = align(own, other, is_cut=True)
            if not len(at) or at[-1] != len(own) - 1:
                continue  # this step does not have the last request, the one that failed
            n_left_out = len(own) + int(mate[-1]) + 1 - 2 * len(at)
            if best is None or n_left_out < best[0]:
                best = n_left_out, t, int(mate[-1]) + 1, at, mate
        if best is None:
            return -1, 0, nothing
        _, t, n_same, at, mate = best
        theirs = self._requests[t].size[:n_same]
        paired = int(own.size[at].sum() + theirs[mate].sum())
        self._unlike = 1 - paired / max(int(own.size.sum() + theirs.sum()), 1)
        mates = np.full(len(own), -1, np.int64)
        mates[at] = mate
        return t, n_same, mates

    def _slots(self, mates: I64) -> tuple[I64, int]:
        """Return the slot of each allocation, and how many slots there are.

        Steps of one kind share their slots position by position; other kinds are aligned with the
        step that the current one resembles.
        """
        w, base = self.w, self._requests[self.like]
        result = np.full(len(w.kind), -1, np.int64)
        of_kind: dict[int, I64] = {self.kinds[self.like]: np.arange(len(base))}
        extra: dict[tuple[int, int], int] = {}
        for t in range(self.n - 1, -1, -1):
            kind = self.kinds[t]
            if kind not in of_kind:
                own = self._requests[t]
                slot = np.full(len(own), -1, np.int64)
                if len(of_kind) < MAX_KINDS:
                    at, mate = align(own, base)
                    slot[at] = mate
                of_kind[kind] = self._filled(own, slot, len(base), extra)
            result[w.requests[t]] = of_kind[kind]
        own = self._requests[self.n]
        slot = np.full(len(own), -1, np.int64)
        slot[mates >= 0] = of_kind[self.kinds[self.like]][mates[mates >= 0]]
        result[w.requests[self.n]] = self._filled(own, slot, len(base), extra)
        return result, len(base) + len(extra)

    @staticmethod
    def _filled(own: Requests, slot: I64, n_base: int, extra: dict[tuple[int, int], int]) -> I64:
        """Return slots, adding slots by stack and number for requests the other step lacks."""
        at = np.flatnonzero(slot < 0)
        number = occurrence(own.site[at])
        for i, key in zip(
            at.tolist(), zip(own.site[at].tolist(), number.tolist(), strict=True), strict=True
        ):
            slot[i] = n_base + extra.setdefault(key, len(extra))
        return slot

    def _follow_blocks(self) -> None:
        """Set the slots and ages of frees, and the ages that allocations reach."""
        w, slot, age = self.w, self.slot, self.age
        made = np.flatnonzero(w.kind == OpKind.MALLOC)
        made = made[w.allocation[made] >= 0]
        goes = np.flatnonzero((w.kind >= OpKind.FREE) & (w.kind <= OpKind.COMPLETE))
        if not len(made) or not len(goes):
            return
        base, top = int(w.allocation[made].min()), int(w.allocation[made].max())
        place = np.full(top - base + 1, -1, np.int64)
        place[w.allocation[made] - base] = made
        goes = goes[(w.allocation[goes] >= base) & (w.allocation[goes] <= top)]
        of = place[w.allocation[goes] - base]
        known = (of >= 0) & (of < goes)
        goes, of = goes[known], of[known]
        slot[goes] = slot[of]
        age[goes] = w.step[goes] - w.step[of]
        is_end = w.kind[goes] != OpKind.FREE_PENDING
        age[of[is_end]] = age[goes[is_end]]

    def _fates(self) -> I64:
        """Return for each allocation how many steps it lives, or KEPT or REPLACED.

        A block that lives at the end lives as long as others of its slot did, if those reached its
        age; else it is kept, if two steps kept theirs, or goes when its slot is allocated again.
        """
        w, slots = self.w, self.n_slots
        made = np.flatnonzero(w.kind == OpKind.MALLOC)
        fate = np.zeros(len(w.kind), np.int64)
        fate[made] = self.age[made]
        ended = made[self.age[made] >= 0]
        usual, longest = np.full((2, slots), -1, np.int64)
        usual[self.slot[ended]] = self.age[ended]  # the last assignment wins
        np.maximum.at(longest, self.slot[ended], self.age[ended])
        lives = made[self.age[made] < 0]
        slot, reached = self.slot[lives], self.n - w.step[lives]
        settled = (w.step[lives] < self.n) & ((w.step[lives] > 0) | w.is_late)
        n_kept = np.bincount(slot[settled], minlength=slots)
        result = np.where(n_kept[slot] >= 2, _ext.KEPT, np.where(reached > 0, _ext.REPLACED, 0))
        result = np.where(longest[slot] >= reached, longest[slot], result)
        result = np.where(usual[slot] >= reached, usual[slot], result)
        fate[lives] = result
        return fate

    def _growths(self) -> I64:
        """Return the bytes by which the size in each slot rises with every step."""
        result = np.zeros(self.size.shape[1], np.int64)
        there = ~np.isnan(self.size)
        count = there.sum(axis=0)
        at = np.flatnonzero(count >= MIN_EVEN)
        if not len(at):
            return result
        # In each slot, sort the steps that have a size first: after them come NaNs.
        t = np.argsort(~there[:, at], axis=0, kind="stable")
        values = np.take_along_axis(self.size[:, at], t, axis=0)
        steps, rises = np.diff(t, axis=0), np.diff(values, axis=0)
        last, slot = count[at] - 2, np.arange(len(at))
        slope = rises[last, slot] / steps[last, slot]
        is_past = np.arange(len(rises))[:, None] > last
        is_even = ((rises == slope * steps) | is_past).all(axis=0)
        result[at[is_even]] = slope[is_even].astype(np.int64)
        return result

    # ---- what the current step will ask for ------------------------------------------------------

    @cached_property
    def asked(self) -> F64:
        """The size in each slot of the current step: as requested if it was, else as expected."""
        seen = self.size[self.n]
        return np.where(np.isnan(seen), self._predicted(), seen)

    def _predicted(self) -> F64:
        """Return the size expected in each slot of the current step.

        Sizes that were equal change alike; sizes not seen yet change like the rest on the whole.
        """
        was, now = self.size[self.like], self.size[self.n]
        result = was + self.growth * (self.n - self.like)
        both = ~np.isnan(was) & ~np.isnan(now) & (self.growth == 0)
        # Requests without a stack were aligned by size, so they cannot show that sizes changed.
        own = self.w.requests[self.n]
        both[self.slot[own[~self._requests[self.n].tells]]] = False
        changed = both & (was != now)
        if changed.any():
            ratio = median(now[changed] / was[changed])
            new = {size: size for size in was[both].tolist()}
            new |= dict(zip(was[changed].tolist(), now[changed].tolist(), strict=True))
            unseen = np.flatnonzero((self.growth == 0) & ~np.isnan(was) & np.isnan(now))
            result[unseen] = [new.get(size, size * ratio) for size in was[unseen].tolist()]
        return np.where(np.isnan(result), 1, result)

    @cached_property
    def may_rise(self) -> bool:
        """Whether the complete steps ask for more and more, or are too few to tell."""
        totals = [self.w.size[at].sum() for at in self.w.requests[:-1]]
        return self.n < MIN_EVEN or trend_of(totals).p_rise <= POSSIBLE_P

    def doubt(self) -> StepDoubt:
        """Return what the complete steps leave unexplained: the largest of three shares."""
        return max(
            (
                StepDoubt(self._spread(), "later steps may be larger than those recorded"),
                StepDoubt(
                    self._unlike, "the step that failed makes requests that no complete step made"
                ),
                StepDoubt(
                    self._unexplained(),
                    "the step that failed holds more than other steps did by then",
                ),
            ),
            key=lambda doubt: doubt.share,
        )

    def _spread(self) -> float:
        """Return the share by which a coming step may exceed the largest so far.

        This is the range of n sizes drawn alike, over n: the average excess of the next record.
        """
        w = self.w
        totals = [float(self.asked[self.slot[w.requests[self.like]]].sum())]
        for t in range(self.n):
            if self.kinds[t] == self.kinds[self.like]:
                at = w.requests[t]
                grown = self.growth[self.slot[at]] * (self.n - t)
                totals.append(float((w.size[at] + grown).sum()))
        x = np.array(totals)
        return float(np.ptp(x) / (len(x) * x.max())) if x.max() else 0.0

    def _unexplained(self) -> float:
        """Return the share of live memory that the current step holds beyond what it should.

        It is compared with the step that it resembles, at the same request.
        """
        w = self.w
        if not self.n_same or not w.has_failed:
            return 0.0
        theirs = w.requests[self.like][: self.n_same]
        rows = [w.rows[self.like], w.row[theirs[-1]], w.rows[self.n], w.row[-1]]
        live = w.trace.totals.at(rows)[:, 0].astype(np.int64).tolist()
        scale = self.asked[self.slot[theirs]].sum() / max(w.size[theirs].sum(), 1)
        more = live[3] - live[2] - (live[1] - live[0]) * scale
        return float(max(more, 0) / max(live[3], 1))


def _repeated(s: AlignedSteps, n_pools: int) -> Repetition:
    w, n = s.w, s.n
    rest = _rest(s)
    goes_on = w.has_failed or len(rest) > 0
    order = _order(s, goes_on=goes_on)
    ends = w.at[1:] - np.where(np.arange(n + 1) == n, int(w.has_failed), 0)
    steps = _converted(s, *(np.arange(w.at[t], ends[t]) for t in order))
    if goes_on:
        steps = [_joined(x, rest) if t == n else x for t, x in zip(order, steps, strict=True)]
    counts = [bool(w.counts[t]) for t in (n, *order)]
    if not any(counts[1:]):  # only evaluation continues: its steps count as the program's
        counts = [True] * len(counts)
    if not w.at[-1] - w.at[n]:
        counts[0] = False
    grows = bool(s.growth.any())
    table, doubt = _joined(rest, *steps), s.doubt()
    held, n_ops = _held(s), [len(rest), *map(len, steps)]

    def play(times: float) -> _ext.NativeFuture:
        asked = table
        if times != 1.0:
            asked = table.copy()
            passes = (asked["kind"] == OpKind.MALLOC) & (asked["age"] == 0)
            asked["size"][passes] = (asked["size"][passes] * times).astype(np.uint64)
        asked.setflags(write=False)
        return _ext.NativeFuture(
            table=asked.view(np.uint8),
            first=np.cumsum([0, *n_ops]).tolist(),
            origin=[0, *(t - n for t in order)],
            counts=[int(c) for c in counts],
            cycle=list(range(1, len(n_ops))),
            held=held,
            n_slots=max(s.n_slots, 1),
            n_pools=n_pools,
        )

    return Repetition(
        play=play,
        n_past=w.n_past,
        n_complete=n,
        is_exact=n > 1 and not doubt.share and not grows,
        doubt=doubt,
        grows=grows,
        period=len(order),
        period_steps=sum(counts[1:]),
        counts_first=counts[0],
        steps=s,
    )


def _order(s: AlignedSteps, *, goes_on: bool) -> list[int]:
    """Return the steps that repeat: the last period, with the current step as its last."""
    n, whole = s.n, s.period
    if not goes_on or not s.w.at[-1] - s.w.at[n]:
        return list(range(max(0, n - whole), n))
    return list(range(max(0, n + 1 - whole), n + 1))


def _rest(s: AlignedSteps) -> FutureOperations:
    """Return what is missing from the current step, starting with the failing request."""
    w = s.w
    requests = w.requests[s.like]
    if not s.n_same and not w.has_failed and w.at[-1] == w.at[s.n]:
        return np.zeros(0, FUTURE_OPERATION)
    after = int(requests[s.n_same - 1]) + 1 if s.n_same else int(w.at[s.like])
    (rest,) = _converted(s, np.arange(after, w.at[s.like + 1]))
    is_made = rest["kind"] == OpKind.MALLOC
    rest["size"][is_made] = np.maximum(s.asked[rest["slot"][is_made]], 1).astype(np.uint64)
    if s.n == 1 and not w.is_late:
        rest = _without_first_time(s, rest)
    if w.has_failed:
        (own,) = _converted(s, np.array([len(w.kind) - 1]))
        own["age"] = s.fate[requests[s.n_same - 1]] if s.n_same else 0
        rest = _joined(own, rest)
    return rest


def _without_first_time(s: AlignedSteps, rest: FutureOperations) -> FutureOperations:
    """Return the rest without what only a first step makes, to stay (optimizer state, workspaces).

    Gradients that live at its end are freed before the next backward pass, as ``zero_grad`` does
    since PyTorch 2.0 (``set_to_none``).
    """
    made = s.w.requests[0]
    stays = made[s.age[made] < 0]
    role = s.w.trace.stacks.roles.role[s.w.stack[stays]]
    is_gradient = stacks.is_backward(role)
    is_made = rest["kind"] == OpKind.MALLOC
    result: FutureOperations = rest[~(is_made & np.isin(rest["slot"], s.slot[stays[~is_gradient]]))]
    again = (result["kind"] == OpKind.MALLOC) & np.isin(result["slot"], s.slot[stays[is_gradient]])
    if not again.any():
        return result
    role = s.w.trace.stacks.roles.role[s.w.stack[made]]
    in_backward = s.slot[made[stacks.is_backward(role)]]
    begins = (result["kind"] == OpKind.MALLOC) & np.isin(result["slot"], in_backward)
    first = int(begins.argmax())
    frees = np.zeros(np.count_nonzero(again), FUTURE_OPERATION)
    frees["kind"], frees["slot"], frees["age"] = OpKind.FREE, result["slot"][again], 1
    return _joined(result[:first], frees, result[first:])


def _converted(s: AlignedSteps, *parts: I64) -> list[FutureOperations]:
    """Return recorded operations as future ones, one list for each part."""
    w, at = s.w, np.concatenate(parts)
    kind, slot = w.kind[at], s.slot[at]
    is_made = kind == OpKind.MALLOC
    is_free = (kind >= OpKind.FREE) & (kind <= OpKind.COMPLETE)
    keep = is_made | (is_free & (slot >= 0)) | (kind == OpKind.EMPTY_CACHE)
    n_before = np.append(0, np.cumsum(keep))
    at, slot, is_made = at[keep], np.maximum(slot[keep], 0), is_made[keep]
    result = np.zeros(len(at), FUTURE_OPERATION)
    result["kind"] = kind[keep]
    result["size"] = w.size[at]
    result["slot"] = slot
    result["age"] = np.where(is_made, s.fate[at], s.age[at])
    result["stream"] = w.stream[at]
    result["pool"] = w.pool[at]
    result["growth"] = np.where(is_made, s.growth[slot], 0)
    ends = n_before[np.cumsum([0, *map(len, parts)])].tolist()
    return [result[low:high] for low, high in pairwise(ends)]


def _held(s: AlignedSteps) -> npt.NDArray[np.int32]:
    """Return the blocks of the window that live at its end: ID, slot, born, age."""
    w = s.w
    made = np.flatnonzero((w.kind == OpKind.MALLOC) & (s.age < 0) & (w.allocation >= 0))
    made = made[s.fate[made] != _ext.KEPT]
    columns = (w.allocation[made], s.slot[made], w.step[made] - s.n, s.fate[made])
    return np.ascontiguousarray(np.stack(columns, axis=1).reshape(-1), np.int32)


def _joined(*parts: FutureOperations) -> FutureOperations:
    """Return operations one after another; ``concatenate`` would repack them."""
    result = np.empty(sum(len(part) for part in parts), FUTURE_OPERATION)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result
