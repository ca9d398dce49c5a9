"""What comes after a recording whose steps repeat: the rest of the current step, then more steps.

The rest is taken from the complete step that the current one resembles. Then the last period of
steps repeats; sizes that rise evenly keep rising. A block is named by its slot, which is the place
of its allocation in a step; a free names the slot and the age of the block in steps. So whatever
the steps keep stays, and whatever they free of an earlier step is freed.
"""

from __future__ import annotations

from functools import cached_property
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.future.alignment import Requests, align
from fragdoctor.future.window import StepWindow
from fragdoctor.model.arrays import is_among, median, occurrence
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.model.trend import LIKELY_P, POSSIBLE_P, trend_of
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.trace import Trace

F64 = npt.NDArray[np.float64]

MAX_KINDS: Final = 12
"""The most kinds of steps, told apart by the order of their requests, to align; the latest ones."""

MIN_EVEN: Final = 5
"""Over this many steps a size must rise evenly before it is taken to keep rising, and what steps
ask for in all must not rise before later steps are taken to be like them. With three, six likely
answers are wrong that are open now; eight change nothing (``tools/ablate.py``)."""

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


class BoundedContainer(Struct, frozen=True, eq=False):
    """A container with a limit that is filling up.

    Attributes:
        rows: the blocks that it holds, as rows of ``Lives``.
        n_blocks: how many blocks it holds once it is full.
    """

    rows: I64
    n_blocks: int


LARGER: Final = "later steps may be larger than those recorded"

_MATCHES: Final = (
    "_requests", "kinds", "like", "n_same", "_unlike", "slot", "n_slots", "age", "fate",
    "n_filling",
)  # fmt: skip
"""What aligned steps take from those of the run as recorded, if an edit changed only sizes."""


class AlignedSteps:
    """The steps of a window, aligned request by request.

    Attributes:
        w, n: the window, and its number of complete steps; the current step is the n-th.
        kinds: equal for steps that make the same requests in the same order.
        period: after how many steps they repeat.
        like, n_same: the complete step that the current one resembles, and how many of its requests
            the current one has already made; -1 if there is no such step.
        slot: ``int64[k]``: the slot of an operation's block; -1 if the block is older than the
            window, or the operation has no block.
        age: ``int64[k]``: for a free, steps since the block was made; for an allocation, steps that
            it lives, -1 if it lived at the end.
        fate: ``int64[k]``: for an allocation, steps that it lives, or KEPT, or REPLACED.
        size: ``float64[n + 1, n_slots]``: the size in each slot by step, NaN if there is none.
        growth: ``int64[n_slots]``: bytes by which the size in each slot rises with every step.
        n_filling: how many steps it takes to fill a container with a limit, or 0 without one.
    """

    def __init__(
        self,
        window: StepWindow,
        recorded: AlignedSteps | None = None,
        container: BoundedContainer | None = None,
    ) -> None:
        """Align the steps of a window.

        If an edit changed only sizes, the matches are those of the steps as recorded: which request
        another one resembles does not depend on what an edit makes of their sizes.
        """
        self.w, self.n, self.n_filling = window, window.n_complete, 0
        self.container: BoundedContainer | None = (
            container if recorded is None else recorded.container
        )
        if recorded is not None and window.is_resized(recorded.w):
            for name in _MATCHES:
                setattr(self, name, getattr(recorded, name))
        else:
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
        self.like: int
        self.n_same: int
        self.like, self.n_same, at, mate = self._match()
        if self.like >= 0:
            self.slot: I64
            self.n_slots: int
            self.slot, self.n_slots = self._slots(at, mate)
            self.age = self._ages()
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

    def _match(self) -> tuple[int, int, I64, I64]:
        """Return the step that the current one resembles, its requests so far, and their mates."""
        own, n = self._requests[self.n], self.n
        latest: dict[int, int] = {}  # of each kind; first of all the same turn of the last period
        for t in (n - self.period or n - 1, *range(n - 1, -1, -1)):
            latest.setdefault(self.kinds[t], t)
        nothing = np.zeros(0, np.int64)
        if not len(own):
            self._unlike = 0.0
            return next(iter(latest.values())), 0, nothing, nothing
        best, least = (-1, 0, nothing, nothing), 2**62
        for t in list(latest.values())[:MAX_KINDS]:
            other = self._requests[t]
            if np.array_equal(other.site[: len(own)], own.site):
                best = t, len(own), np.arange(len(own)), np.arange(len(own))
                break
            at, mate = align(own, other, is_cut=True)
            if not len(at) or at[-1] != len(own) - 1:
                continue  # this step does not have the last request, the one that failed
            n_left_out = len(own) + int(mate[-1]) + 1 - 2 * len(at)
            if n_left_out < least:
                best, least = (t, int(mate[-1]) + 1, at, mate), n_left_out
        t, n_same, at, mate = best
        theirs = self._requests[t].size[:n_same]
        paired = int(own.size[at].sum() + theirs[mate].sum())
        self._unlike = 1 - paired / max(int(own.size.sum() + theirs.sum()), 1)
        return best

    def _slots(self, at: I64, mate: I64) -> tuple[I64, int]:
        """Return the slot of each allocation, and how many slots there are.

        Steps of one kind share their slots position by position; other kinds are aligned with the
        step that the current one resembles.
        """
        w, base = self.w, self._requests[self.like]
        result = np.full(len(w.kind), -1, np.int64)
        of_kind: dict[int, I64] = {self.kinds[self.like]: np.arange(len(base))}
        extra: dict[tuple[int, int], int] = {}

        def slots_of(own: Requests, at: I64, mate: I64) -> I64:
            slot = np.full(len(own), -1, np.int64)
            slot[at] = mate
            alone = np.flatnonzero(slot < 0)  # the other step lacks these: by stack and number
            site = own.site[alone]
            keys = zip(site.tolist(), occurrence(site).tolist(), strict=True)
            slot[alone] = [len(base) + extra.setdefault(key, len(extra)) for key in keys]
            return slot

        for t in range(self.n - 1, -1, -1):
            kind, own = self.kinds[t], self._requests[t]
            if kind not in of_kind:
                pairs = align(own, base) if len(of_kind) < MAX_KINDS else (at[:0], mate[:0])
                of_kind[kind] = slots_of(own, *pairs)
            result[w.requests[t]] = of_kind[kind]
        result[w.requests[self.n]] = slots_of(self._requests[self.n], at, mate)
        return result, len(base) + len(extra)

    def _ages(self) -> I64:
        """Return the ages of frees and those that allocations reach; set the slots of frees."""
        w, age = self.w, np.full(len(self.w.kind), -1, np.int64)
        made = np.flatnonzero((w.kind == OpKind.MALLOC) & (w.allocation >= 0))
        goes = np.flatnonzero((w.kind >= OpKind.FREE) & (w.kind <= OpKind.COMPLETE))
        place = np.full(int(w.allocation.max(initial=0)) + 1, -1, np.int64)
        place[w.allocation[made]] = made
        of = place[w.allocation[goes]]
        known = (of >= 0) & (of < goes)
        goes, of = goes[known], of[known]
        self.slot[goes] = self.slot[of]
        age[goes] = w.step[goes] - w.step[of]
        is_end = w.kind[goes] != OpKind.FREE_PENDING
        age[of[is_end]] = age[goes[is_end]]
        return age

    def _fates(self) -> I64:
        """Return for each allocation how many steps it lives, or KEPT or REPLACED.

        A block that lives at the end lives as long as others of its slot did, if those reached its
        age; else it is kept, if two steps kept theirs, or goes when its slot is allocated again.
        What a container with a limit keeps goes as soon as so many steps have filled it anew.
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
        if self.container is not None:
            is_item = is_among(w.allocation[lives], self.container.rows)
            if is_item.any():
                n_each = int(is_item.sum()) / (self.n + 1 - int(w.step[lives[is_item]].min()))
                self.n_filling = int(np.ceil(self.container.n_blocks / n_each))
                goes = (result == _ext.KEPT) & is_among(slot, slot[is_item])
                result = np.where(goes, self.n_filling, result)
        fate[lives] = result
        return fate

    def _growths(self) -> I64:
        """Return the bytes by which the size in each slot rises with every step, evenly."""
        there, slot = ~np.isnan(self.size), np.arange(self.size.shape[1])
        first, last = there.argmax(axis=0), self.n - there[::-1].argmax(axis=0)
        was = self.size[first, slot]
        slope = (self.size[last, slot] - was) / np.maximum(last - first, 1)
        even = was + slope * (np.arange(self.n + 1)[:, None] - first)
        is_even = (~there | (self.size == even)).all(axis=0) & (there.sum(axis=0) >= MIN_EVEN)
        return np.where(is_even, slope, 0).astype(np.int64)

    # ---- what the current step will ask for ------------------------------------------------------

    @cached_property
    def asked(self) -> F64:
        """The size in each slot of the current step: as requested if it was, else as expected.

        Sizes that were equal change alike; sizes not seen yet change like the rest on the whole.
        Blocks that outlive their step do not depend on the batch.
        """
        was, now = self.size[self.like], self.size[self.n]
        is_new = np.isnan(now)
        result = np.where(is_new, was + self.growth * (self.n - self.like), now)
        both = ~np.isnan(was) & ~is_new & (self.growth == 0)
        # Requests without a stack were aligned by size, so they cannot show that sizes changed.
        own = self.w.requests[self.n]
        both[self.slot[own[~self._requests[self.n].tells]]] = False
        changed = both & (was != now)
        if changed.any():
            ratio = median(now[changed] / was[changed])
            new = {size: size for size in was[both].tolist()}
            new |= dict(zip(was[changed].tolist(), now[changed].tolist(), strict=True))
            made = self.w.requests[self.like]
            by = np.full(len(was), ratio)
            by[self.slot[made[self.age[made] != 0]]] = 1
            unseen = np.flatnonzero((self.growth == 0) & ~np.isnan(was) & is_new)
            sizes, others = was[unseen].tolist(), (was * by)[unseen].tolist()
            result[unseen] = [new.get(*pair) for pair in zip(sizes, others, strict=True)]
        return np.where(np.isnan(result), 1, result)

    @cached_property
    def may_exceed(self) -> float | None:
        """The share by which a later step may exceed what is expected; None if nothing tells.

        It is the doubt if the steps do not rise. If their sizes may, the next step may exceed the
        current one by as much as that exceeds those before it.
        """
        if self.n < MIN_EVEN:
            return None
        totals = [float(self.w.size[at].sum()) for at in self.w.requests[:-1]]
        (doubt, reason), p_rise = self.doubt(), trend_of(totals).p_rise
        if p_rise > POSSIBLE_P:
            return doubt
        if p_rise <= LIKELY_P or reason != LARGER:
            return None
        return max(doubt, self._expected / max(*totals, 1) - 1)

    @property
    def _expected(self) -> float:
        """What the current step asks for in all."""
        return float(self.asked[self.slot[self.w.requests[self.like]]].sum())

    def doubt(self) -> tuple[float, str]:
        """Return the share by which a coming step may differ from what is expected, and why.

        It is the largest of three shares that the complete steps leave unexplained.
        """
        return max(
            (self._spread(), LARGER),
            (self._unlike, "the step that failed makes requests that no complete step made"),
            (self._unexplained(), "the step that failed holds more than other steps did by then"),
            key=itemgetter(0),
        )

    def _spread(self) -> float:
        """Return the share by which a coming step may exceed the largest so far.

        This is the range of n sizes drawn alike, over n: the average excess of the next record.
        """
        x = self._totals
        return float(np.ptp(x) / (len(x) * x.max())) if x.max() else 0.0

    @cached_property
    def rises(self) -> bool:
        """Whether steps like the current one ask for more and more, so later ones may as well."""
        return trend_of(self._totals).p_rise <= LIKELY_P

    @cached_property
    def _totals(self) -> F64:
        """What steps like the current one ask for, less even growth, and what it will ask for."""
        w, totals = self.w, []
        for t in range(self.n):
            if self.kinds[t] == self.kinds[self.like]:
                at = w.requests[t]
                grown = self.growth[self.slot[at]] * (self.n - t)
                totals.append(float((w.size[at] + grown).sum()))
        return np.array([*totals, self._expected])

    def _unexplained(self) -> float:
        """Return the share of live memory that the current step holds beyond what it should.

        It is compared with the step that it resembles, at the same request.
        """
        w = self.w
        if not self.n_same or not w.has_failed:
            return 0.0
        theirs = w.requests[self.like][: self.n_same]
        row = w.table["row"].astype(np.int64)
        rows = [w.rows[self.like], row[theirs[-1]], w.rows[self.n], row[-1]]
        live = w.trace.totals.at(rows)[:, 0].astype(np.int64).tolist()
        scale = self.asked[self.slot[theirs]].sum() / max(w.size[theirs].sum(), 1)
        more = live[3] - live[2] - (live[1] - live[0]) * scale
        return float(max(more, 0) / max(live[3], 1))


class Repetition:
    """What comes after the recorded operations: the rest of the current step, then whole steps.

    Attributes:
        steps: the aligned steps that it was made from.
        n_past: recorded operations that come before the future; it replaces what follows them (a
            failing request, and what its unwinding freed).
        n_complete: complete steps that it was made from.
        doubt, reason: the share by which a coming step may differ from what is expected of it, and
            why.
        grows: whether sizes rise from step to step.
        growth_bytes: by how much those rise that outlive their step.
        n_filling: how many steps it takes to fill a container with a limit, or 0 without one.
        is_exact: whether the steps are equal to the byte, and the current step began like them.
        period: how many steps there are until they repeat, including evaluation.
        period_steps: how many of them are steps of the program, not evaluation.
        counts_first: whether the current step is one of the program's.
    """

    def __init__(self, steps: AlignedSteps, n_pools: int) -> None:
        w, n = steps.w, steps.n
        self.steps, self._n_pools = steps, n_pools
        self.n_past, self.n_complete = w.n_past, n
        self.doubt, self.reason = steps.doubt()
        self.grows = bool(steps.growth.any())
        lasting = w.requests[steps.like][steps.fate[w.requests[steps.like]] != 0]
        self.growth_bytes = int(steps.growth[steps.slot[lasting]].sum())
        self.is_exact = n > 1 and not self.doubt and not self.grows
        self._recorded, self._keep = _recorded(steps)
        rest = self._rest()
        goes_on = w.has_failed or len(rest) > 0
        end = n + int(goes_on)  # the current step is the last of the cycle once it is complete
        # What followed the step that the current one resembles follows it, too.
        order = range(max(0, min(end - steps.period, steps.like + 1)), end)
        cycle = [self._part(int(w.at[t]), int(w.at[t + 1])) for t in order]
        if goes_on:
            seen = self._part(int(w.at[n]), len(w.kind) - int(w.has_failed))
            cycle[-1] = _joined(seen, rest)
        self._order, self._parts = order, [rest, *cycle]
        counts = [bool(w.counts[t]) for t in (n, *order)]
        if not any(counts[1:]):  # only evaluation continues: its steps count as the program's
            counts = [True] * len(counts)
        counts[0] &= bool(w.at[-1] > w.at[n])
        self._counts = counts
        self.period, self.period_steps, self.counts_first = len(order), sum(counts[1:]), counts[0]
        self.n_filling = steps.n_filling

    @classmethod
    def of(
        cls,
        trace: Trace,
        operations: Operations,
        recorded: Repetition | None = None,
        container: BoundedContainer | None = None,
    ) -> Repetition | None:
        """Return how the program continues after some requests, or None if no step says so.

        ``recorded`` is how it continues after the requests as recorded, if these are edited;
        ``container`` fills up meanwhile.
        """
        window = StepWindow.of(trace, operations)
        known = None if recorded is None else recorded.steps
        steps = None if window is None else AlignedSteps(window, known, container)
        if steps is None or steps.like < 0:
            return None
        return cls(steps, int(operations.table["pool"].max(initial=0)))

    @cached_property
    def expected(self) -> _ext.NativeFuture:
        """The future as expected."""
        return self.play(1.0)

    def play(self, times: float) -> _ext.NativeFuture:
        """Return the future in which coming steps ask for this many times what is expected."""
        asked = _joined(*self._parts)
        if times != 1.0:
            passes = (asked["kind"] == OpKind.MALLOC) & (asked["age"] == 0)
            asked["size"][passes] = (asked["size"][passes] * times).astype(np.uint64)
        asked.setflags(write=False)
        return _ext.NativeFuture(
            table=asked.view(np.uint8),
            first=np.cumsum([0, *map(len, self._parts)]).tolist(),
            origin=[0, *(t - self.n_complete for t in self._order)],
            counts=[int(c) for c in self._counts],
            cycle=list(range(1, len(self._parts))),
            held=_held(self.steps),
            n_slots=max(self.steps.n_slots, 1),
            n_pools=self._n_pools,
        )

    def _part(self, low: int, high: int) -> FutureOperations:
        """Return recorded operations that come again."""
        return self._recorded[low:high][self._keep[low:high]]

    def _rest(self) -> FutureOperations:
        """Return what is missing from the current step, starting with the failing request."""
        s, w = self.steps, self.steps.w
        requests = w.requests[s.like]
        if not s.n_same and not w.has_failed and w.at[-1] == w.at[s.n]:
            return self._recorded[:0]
        after = int(requests[s.n_same - 1]) + 1 if s.n_same else int(w.at[s.like])
        rest = self._part(after, int(w.at[s.like + 1]))
        is_made = rest["kind"] == OpKind.MALLOC
        rest["size"][is_made] = np.maximum(s.asked[rest["slot"][is_made]], 1).astype(np.uint64)
        if s.n == 1 and not w.is_late:
            rest = _without_first_time(s, rest)
        if w.has_failed:
            own = self._recorded[-1:].copy()
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


def _recorded(s: AlignedSteps) -> tuple[FutureOperations, Bools]:
    """Return the recorded operations as future ones, and which of them come again."""
    w = s.w
    is_made = w.kind == OpKind.MALLOC
    is_free = (w.kind >= OpKind.FREE) & (w.kind <= OpKind.COMPLETE)
    slot = np.maximum(s.slot, 0)
    result = np.zeros(len(w.kind), FUTURE_OPERATION)
    for name in ("kind", "size", "stream", "pool"):
        result[name] = w.table[name]
    result["slot"] = slot
    result["age"] = np.where(is_made, s.fate, s.age)
    result["growth"] = np.where(is_made, s.growth[slot], 0)
    return result, is_made | (is_free & (s.slot >= 0)) | (w.kind == OpKind.EMPTY_CACHE)


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
