"""Operations of the future, and how the steps to come may differ from what is expected of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.operations import OpKind
from fragdoctor.trace.step_alignment import AlignedSteps

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

Table = npt.NDArray[np.void]


@dataclass(frozen=True)
class Spread:
    """How far the steps to come may be from what is expected of them.

    Attributes:
        less, more: shares by which what is made and freed within a step may be smaller or larger.
        irregular: slots of what some steps keep and others do not make.
        trend: bytes by which the size in each slot rises with each step, where it does not rise
            evenly.
        varies: slots that may be larger; None where all may.
        slowed: share of their growth that sizes may go on with at least, and the slots that grow
            evenly and keep it; None where all do.
    """

    less: float
    more: float
    irregular: Bools
    trend: I64
    varies: Bools | None
    slowed: tuple[float, Bools] | None

    def lower(self, table: Table) -> Table | None:
        """Return a future that asks for less; None where that is not to be expected."""
        is_irregular = bool(self.irregular.any())
        if not self.less and not is_irregular and self.slowed is None:
            return None
        lower, is_made = table.copy(), table["kind"] == OpKind.MALLOC
        if self.less or is_irregular:
            passing = is_made & (table["age"] == 0)
            smaller = table["size"][passing] * max(1 - self.less, 0)
            lower["size"][passing] = smaller.astype(np.uint64)
            lower["age"][is_made & self.irregular[table["slot"]] & (table["age"] < 0)] = 0
        if self.slowed is not None:
            pace, is_even = self.slowed
            growth = table["growth"]
            lower["growth"] = np.where(is_even[table["slot"]], growth, growth * pace)
        return lower

    def higher(self, table: Table) -> Table | None:
        """Return a future that asks for more; None where that is not to be expected."""
        is_made = table["kind"] == OpKind.MALLOC
        rises = is_made & (self.trend[table["slot"]] > 0)
        if not self.more and not rises.any():
            return None
        higher = table.copy()
        higher["growth"][rises] += self.trend[table["slot"][rises]]
        chosen = is_made & (table["age"] == 0)
        if self.varies is not None:
            chosen &= self.varies[table["slot"]]
        higher["size"][chosen] = (table["size"][chosen] * (1 + self.more)).astype(np.uint64)
        return higher


def without_growth(table: Table) -> Table:
    """Return a table of steps that are as large as they were."""
    result = table.copy()
    result["growth"] = 0
    return result


def joined(*parts: Table) -> Table:
    """Return tables of future operations after each other; ``concatenate`` would repack them."""
    result = np.empty(sum(len(part) for part in parts), FUTURE_OPERATION)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result


def with_gradients_freed(rest: Table, role: I64, again: Bools, is_gradient: Bools) -> Table:
    """Return the rest of a step with frees of the gradients that it makes again.

    They are freed before they are made again (``set_to_none``): before the first backward pass
    that makes as many of their size. Where networks are trained in turn that is not the first pass
    for all of them, and not always the one that made those that live.

    Args:
        rest: operations of a first step, from somewhere on.
        role: of each request; ``NO_STACK`` of other operations.
        again: requests that make a gradient which lives already.
        is_gradient: requests of the size of a parameter.
    """
    is_backward = role == stacks.BACKWARD
    tells = np.flatnonzero(role != stacks.NO_STACK)
    begins = tells[is_backward[tells] & ~np.append(False, is_backward[tells[:-1]])]
    at = np.flatnonzero(is_backward & is_gradient)
    of_pass = np.searchsorted(begins, at, side="right") - 1
    freed = np.flatnonzero(rest["kind"] == OpKind.FREE)
    lasts = dict(zip(rest["slot"][freed].tolist(), freed.tolist(), strict=True))
    ends = np.append(begins[1:], len(rest))[of_pass]
    stays = np.array([lasts.get(k, len(rest)) for k in rest["slot"][at].tolist()], np.int64) >= ends
    at, of_pass = at[stays | again[at]], of_pass[stays | again[at]]
    slots, before = [], []
    waiting = np.flatnonzero(again).tolist()
    for k, begin in enumerate(begins.tolist()):
        made = at[of_pass == k]
        if k == 0 and begin == tells[0]:
            # This pass is under way: what it does not make again stays for a later one.
            taken = made[again[made]].tolist()
        else:
            sizes = Counter(rest["size"][made].tolist())
            taken = [i for i in waiting if _takes(sizes, int(rest["size"][i]))]
        waiting = sorted(set(waiting) - set(taken))
        slots += rest["slot"][taken].tolist()
        before += [begin] * len(taken)
    table = np.zeros(len(slots), FUTURE_OPERATION)
    table["kind"], table["slot"], table["age"] = OpKind.FREE, slots, 1
    place = np.append(np.array(before) - 0.5, np.arange(len(rest)))
    return joined(table, rest)[np.argsort(place, kind="stable")]


def _takes(sizes: Counter[int], size: int) -> bool:
    """Return whether a size is still among some, and take it out."""
    sizes[size] -= 1
    return sizes[size] >= 0


def fates_of(steps: AlignedSteps) -> I64:
    """Return for each allocation how many steps it lives, or KEPT or REPLACED."""
    w = steps.w
    made = np.flatnonzero(w.kind == OpKind.MALLOC)
    fate = np.zeros(len(w.kind), np.int64)
    fate[made] = steps.age[made]
    ended = made[steps.age[made] >= 0]
    usual = np.full(steps.n_slots, -1, np.int64)
    longest = np.full(steps.n_slots, -1, np.int64)
    usual[steps.slot[ended]] = steps.age[ended]  # the last one stays
    np.maximum.at(longest, steps.slot[ended], steps.age[ended])
    lives = made[steps.age[made] < 0]
    reached = steps.n - w.step[lives]
    settled = (w.step[lives] < steps.n) & ((w.step[lives] > 0) | w.starts_settled)
    n_kept = np.bincount(steps.slot[lives][settled], minlength=steps.n_slots)
    if steps.n > 1 and not w.starts_settled:  # what a first step keeps and a later one as well
        first = lives[w.step[lives] == 0]
        pair = set(zip(steps.slot[first].tolist(), w.size[first].tolist(), strict=True))
        for i in lives[settled].tolist():
            n_kept[steps.slot[i]] += (int(steps.slot[i]), int(w.size[i])) in pair
    slot = steps.slot[lives]
    result = np.where(n_kept[slot] >= 2, KEPT, np.where(reached > 0, REPLACED, 0))
    result = np.where(longest[slot] >= reached, longest[slot], result)
    result = np.where(usual[slot] >= reached, usual[slot], result)
    fate[lives] = result
    return fate
