"""The sizes of aligned steps: what varies, what grows, and what the next ones will be."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.model.arrays import is_among
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import WORKSPACE_BYTES, OpKind
from fragdoctor.trace.step_alignment import AlignedSteps, StepWindow

SMALL: Final = 64 * 1024
"""Sizes below this may differ between steps that count as alike."""

MISALIGNED: Final = 0.25
"""Share of bytes in requests whose sizes may differ where requests are aligned only roughly."""

MANY_STEPS: Final = 8
"""Steps of differing size from which on the largest so far tells much of those to come."""

LARGER: Final = 10.0
"""Of sizes spread evenly, the largest lies beyond n of them by more than ``spread * (LARGER ** (1 /
n) - 1)`` in one of so many cases."""

BOUNDED: Final = 0.01
"""Share by which the largest two steps differ, up to which they are as large as steps get."""

ROUNDED: Final = 0.005
"""Share by which a step may differ from what sizes scaled to it say."""

KEEPS_MORE: Final = 0.02
"""Share of live memory by which a step may keep more than the one that it is like."""

MAX_PREDICTORS: Final = 24
"""Patterns of sizes over the steps that others are told from; the largest."""

ENOUGH_POINTS: Final = 3
"""Steps from which on a line through the sizes of two requests is evidence that they go along."""

MIN_FIT: Final = 0.8
"""Share of the variance of rising sizes that a line explains, at least."""

MIN_EVEN: Final = 5
"""Steps over which a size must rise evenly to be taken for one that goes on rising."""

MIN_RISE: Final = 1.1
"""Size of the last step, as a multiple of the first one's, from which on steps are rising."""

MAX_UNEVEN: Final = 0.25
"""Share by which rises may differ from each other that count as even."""

MIN_TREND: Final = 6
"""Steps from which on rising sizes are a trend although they do not rise evenly."""


class SizedSteps(AlignedSteps):
    """Aligned steps with the sizes in their slots.

    Attributes:
        size: ``float64[n + 1, n_slots]``: the size in each slot by step, NaN where there is none.
        growth: bytes by which the size in each slot rises evenly with every step.
        trend: the same where it rises on the whole, but not evenly.
        is_same: the step under way began with the same requests as the one that it is like.
        is_alike: and with the same sizes.
        predicted: sizes expected in the step under way.
        weak: share of these sizes that what is known of the step does not explain.
        keeps_more: the step under way asked for the same as the one that it is like, but has not
            freed as much of it: more of the model is trained than before.
        n_rises: how often a step was larger than the one before.
    """

    def __init__(self, window: StepWindow) -> None:
        super().__init__(window)
        self.is_alike = False
        self.keeps_more = False
        self.n_rises = 0
        if self.found is None:
            return
        like, _, self.is_same = self.found
        self.size = self._sizes()
        self.trend = np.zeros(self.size.shape[1], np.int64)
        self.growth = self._growths()
        self.is_alike = self._began_alike(like)
        self.predicted = self._predicted(like)
        self.keeps_more = self._keeps_more(like)

    def _keeps_more(self, like: int) -> bool:
        """Return whether the step under way keeps more than the other one did there.

        A first step is no measure: what it makes for good is live besides.
        """
        w = self.w
        assert self.found is not None  # noqa: S101 - asked before
        n_same = self.found[1]
        if not (self.is_alike and w.has_failed and n_same and (like or w.starts_settled)):
            return False
        live = w.trace.totals.at([w.rows[self.n], w.trace.oom_rows[-1]])[:, 0].astype(np.int64)
        mine = self._kept_bytes(self.n, int(w.at[-1]) - 1)
        theirs = self._kept_bytes(like, int(w.requests[like][n_same - 1]))
        return bool(mine - theirs > KEEPS_MORE * live.max())

    def first_kept_bytes(self) -> int:
        """Return the size of what the first step keeps beside gradients and state.

        Whether it is made once or in every step, one step does not say, unless the next one has
        come further already without making it again.
        """
        w, roles = self.w, self.w.trace.stacks.roles
        assert self.found is not None  # noqa: S101 - asked before
        at, (like, n_same, _) = w.requests[0], self.found
        is_kept = (self.age[at] < 0) & ~is_among(w.size[at], WORKSPACE_BYTES)
        others = (stacks.BACKWARD, stacks.SILENT, stacks.OPTIMIZER)
        is_kept &= ~np.isin(roles.role[w.stack[at]], others)
        is_once = np.arange(len(at)) < (n_same - 1 if not like else 0)
        is_once &= ~np.isin(w.stack[at], self.sequences[self.n])
        return int(w.size[at[is_kept & ~is_once]].sum())

    def _kept_bytes(self, step: int, end: int) -> int:
        """Return the size of what a step has made until an operation and not freed by then."""
        w, low = self.w, int(self.w.at[step])
        kind = w.kind[low:end]
        made = low + np.flatnonzero(kind == OpKind.MALLOC)
        ends = (kind == OpKind.FREE) | (kind == OpKind.COMPLETE)
        freed = low + np.flatnonzero(ends & (self.age[low:end] == 0))
        size = np.zeros(self.n_slots, np.int64)
        size[self.slot[made]] = w.size[made]
        return int(w.size[made].sum() - size[self.slot[freed]].sum())

    def _sizes(self) -> npt.NDArray[np.float64]:
        """Return ``float64[n + 1, n_slots]``: the size in each slot, NaN where there is none."""
        w = self.w
        result = np.full((self.n + 1, max(self.n_slots, 1)), np.nan)
        made = np.flatnonzero(w.kind == OpKind.MALLOC)
        result[w.step[made], self.slot[made]] = w.size[made]
        return result

    def _growths(self) -> I64:
        """Return the bytes by which the size in each slot rises with every step."""
        result = np.zeros(self.size.shape[1], np.int64)
        there = ~np.isnan(self.size)
        count = there.sum(axis=0)
        at = np.flatnonzero((count >= 3) & self._varying())
        if not len(at):
            return result
        # By slot, the steps that have a size first: what follows them is NaN.
        t = np.argsort(~there[:, at], axis=0, kind="stable")
        values = np.take_along_axis(self.size[:, at], t, axis=0)
        steps, rises = np.diff(t, axis=0), np.diff(values, axis=0)
        last, slot = count[at] - 2, np.arange(len(at))
        slope = rises[last, slot] / steps[last, slot]
        is_past = np.arange(len(rises))[:, None] > last
        is_even = ((rises == slope * steps) | is_past).all(axis=0) & (count[at] >= MIN_EVEN)
        result[at[is_even]] = slope[is_even].astype(np.int64)
        ever_falls = (rises < 0).any(axis=0)
        for k in np.flatnonzero(~ever_falls & (result[at] == 0)).tolist():
            n = int(count[at[k]])
            self.trend[at[k]] = _trend(t[:n, k], values[:n, k])
        return result

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

    def _rises(self, like: int) -> bool:
        """Return whether steps only ever become larger, the one under way included.

        So they do while sequences are made longer, or something is appended to in every step.
        """
        w = self.w
        total = [
            float(w.size[w.requests[t]].sum()) for t in range(self.start, self.n) if w.counts[t]
        ]
        total.append(self._expected(like))
        x = np.array(total)
        self.n_rises = int(np.count_nonzero(np.diff(x) > ROUNDED * x[:-1]))
        if len(x) > 3 and is_even(np.diff(x)):
            return True
        if len(x) < MIN_EVEN or x[-1] < MIN_RISE * x[0]:
            return False
        falls = np.maximum.accumulate(x) - x
        stairs = np.flatnonzero(np.diff(x) > ROUNDED * x[:-1]) + 1
        lengths = np.diff([0, *stairs.tolist(), len(x)])
        goes_on = len(stairs) > 1 and lengths[-1] <= lengths[:-1].max()
        return bool(goes_on and (falls <= ROUNDED * x).all())

    def _expected(self, like: int) -> float:
        """Return how much the step under way asks for, what is to come of it included."""
        slot = self.slot[self.w.requests[like]]
        seen = self.size[self.n, slot]
        return float(np.where(np.isnan(seen), self.predicted[slot], seen).sum())

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
        patterns = [column.tobytes() for column in np.nan_to_num(scaled, nan=-1).T]
        first = {pattern: i for i, pattern in reversed([*enumerate(patterns)])}
        chosen = at[sorted(first.values())]
        biggest = np.argsort(-np.nanmax(self.size[: self.n, chosen], axis=0), kind="stable")
        result: I64 = chosen[biggest[:MAX_PREDICTORS]]
        return result

    def _fitted(
        self, wanted: I64, predictors: I64, fallback: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return sizes as affine functions of the predictor that explains each best."""
        past, seen = self.size[: self.n], self.size[self.n]
        y = past[:, wanted]
        is_there = ~np.isnan(y)
        best = np.full(len(wanted), np.inf)
        least = best.copy()
        result = fallback.copy()
        for p in predictors.tolist():
            x = past[:, p : p + 1]
            both = ~np.isnan(x) & is_there
            m = both.sum(axis=0)
            xs, ys = np.where(both, x, 0.0), np.where(both, y, 0.0)
            safe = np.maximum(m, 1)
            mx, my = xs.sum(axis=0) / safe, ys.sum(axis=0) / safe
            dx, dy = np.where(both, x - mx, 0.0), np.where(both, y - my, 0.0)
            vx = (dx * dx).sum(axis=0)
            slope = np.divide((dx * dy).sum(axis=0), vx, out=np.zeros_like(vx), where=vx > 0)
            off = np.where(both, dy - slope * dx, 0.0)
            error = np.sqrt((off * off).sum(axis=0) / safe) / np.maximum(my, 1)
            # A line goes through any two points: where there are more steps it is no evidence, but
            # as far as sizes are in proportion.
            parts = np.abs(dy * mx - dx * my).max(axis=0) / np.maximum(mx * my, 1)
            doubt = np.where(m < min(self.n, ENOUGH_POINTS), parts, error)
            value = my + slope * (seen[p] - mx)
            better = (vx > 0) & (m >= 2) & (doubt < least) & (value > 0)
            least[better], best[better] = doubt[better], error[better]
            result[better] = value[better]
        finite = np.isfinite(best)
        self.weak = float((np.where(finite, best, 1.0) * fallback).sum() / max(fallback.sum(), 1))
        return result

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
        total.append(self._expected(like))
        if len(total) < 2:  # then of what the two have in common so far
            mine, theirs = self.size[self.n], self.size[like]
            both = ~np.isnan(mine) & ~np.isnan(theirs)
            total = [float(theirs[both].sum()), float(mine[both].sum())]
        x = np.sort(np.array(total))[::-1]
        if not x[0]:
            return 1.0
        gap, spread = (x[0] - x[1]) / x[0], (x[0] - x[-1]) / x[0]
        if gap < BOUNDED / 10:
            return ROUNDED
        if gap < BOUNDED or len(x) > MANY_STEPS:
            return float(max(ROUNDED, gap, spread / len(x)))
        return float(min(max(gap, spread * (LARGER ** (1 / len(x)) - 1)), 1.0))


def _differs(mine: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether sizes differ by more than what rounds away."""
    return bool(((mine != other) & (np.maximum(mine, other) > SMALL)).any())


def is_even(rises: npt.NDArray[np.float64]) -> bool:
    """Return whether a series rises by about the same every time."""
    return bool((rises > 0).all() and np.ptp(rises) <= MAX_UNEVEN * rises.mean())


def _trend(t: I64, values: npt.NDArray[np.float64]) -> int:
    """Return the bytes that a size that never falls rises by per step on the whole; 0 if in few."""
    rises = np.diff(values)
    if len(t) < MIN_TREND:
        slopes = rises / np.diff(t)
        return int(slopes[0]) if slopes[0] > 0 and (slopes == slopes[0]).all() else 0
    if np.count_nonzero(rises) < 3:
        return 0
    dt, dv = t - t.mean(), values - values.mean()
    total = float((dv * dv).sum())
    fit = float((dt * dv).sum()) ** 2 / (float((dt * dt).sum()) * total) if total else 0.0
    return int((dt * dv).sum() / (dt * dt).sum()) if fit >= MIN_FIT else 0
