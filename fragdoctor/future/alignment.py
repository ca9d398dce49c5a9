"""Matches the requests or the lines of one sequence with those of another: of steps, or of runs.

Requests that come from the same place equally often in both sequences, in the same order, are
anchors (places and occurrences, as in patience diff). The requests between two anchors are paired
at the lowest cost (Needleman and Wunsch, 1970). Backward passes on a GPU have no stacks, so between
two anchors only sizes tell their requests apart.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.model.arrays import median, occurrence
from fragdoctor.model.snapshot import I64, Bools

MAX_COMPARED: Final = 4_000_000
"""The most pairs of requests to compare between two anchors; this many take about 0.1 s."""

LEFT_OUT: Final = 2
OTHER_SIZE: Final = 3
"""Pairing unequal requests costs more than leaving out one of them, less than leaving out both."""

ROUNDED_BYTES: Final = 512
"""The allocator rounds every request up to this (``kMinBlockSize``): sizes that differ by less
after scaling are equal."""

_PAIRED, _OWN_ONLY, _OTHER_ONLY = 0, 1, 2
NEVER: Final = 2**29
"""The price of a pair that must not be."""


class Requests(Struct, frozen=True):
    """n requests in order.

    Attributes:
        site: ``int64[n]``, where each comes from, in a numbering that both sequences share.
        size: ``int64[n]``, bytes.
        tells: whether the site sets a request apart; the site of code without a stack does not.
    """

    site: I64
    size: I64
    tells: Bools

    def __len__(self) -> int:
        return len(self.site)

    def part(self, low: int, high: int) -> Requests:
        """Return the requests from one position up to another."""
        return Requests(self.site[low:high], self.size[low:high], self.tells[low:high])


def align(own: Requests, other: Requests, *, is_cut: bool = False) -> tuple[I64, I64]:
    """Return the positions of matching requests, ascending in both sequences.

    Args:
        own: one sequence.
        other: the other one.
        is_cut: whether the own sequence stops somewhere in the middle of the other one. Its last
            request is then matched if anything in the other one comes from the same site.
    """
    at, mate = _anchors(own, other, is_cut=is_cut)
    size, mates = own.size[at], other.size[mate]
    differ = size != mates
    ratio = median(size[differ] / np.maximum(mates[differ], 1)) if differ.any() else 1.0
    own_edges = np.concatenate([[-1], at, [len(own)]])
    other_edges = np.concatenate([[-1], mate, [len(other)]])
    pairs: list[tuple[I64, I64]] = []
    gaps = np.flatnonzero((np.diff(own_edges) > 1) & (np.diff(other_edges) > 1))
    n_gaps = len(own_edges) - 1
    for gap in gaps.tolist():
        low, high = int(own_edges[gap]) + 1, int(own_edges[gap + 1])
        first, end = int(other_edges[gap]) + 1, int(other_edges[gap + 1])
        is_last = is_cut and gap == n_gaps - 1
        a, b = _between(own.part(low, high), other.part(first, end), ratio, is_cut=is_last)
        pairs.append((a + low, b + first))
    at = np.concatenate([at, *(a for a, _ in pairs)])
    mate = np.concatenate([mate, *(b for _, b in pairs)])
    order = np.argsort(at, kind="stable")
    return at[order], mate[order]


def shifts_of(own: Requests, other: Requests) -> I64:
    """Return by how many positions to shift a sequence so that most of its requests have mates.

    There are several such shifts if the other sequence repeats itself. The rarest requests are
    asked first, as many as ``MAX_COMPARED`` pairs allow.
    """
    for mine, theirs in (_by_size(own, other), (own.site, other.site)):  # another batch: sites
        order = np.argsort(theirs, kind="stable")
        low, high = (
            np.searchsorted(theirs, mine, side, sorter=order) for side in ("left", "right")
        )
        n_mates = high - low
        rare = np.argsort(n_mates, kind="stable")[np.count_nonzero(n_mates == 0) :]
        rare = rare[: max(int((np.cumsum(n_mates[rare]) <= MAX_COMPARED).sum()), 1)]
        if len(rare):
            each = np.repeat(rare, n_mates[rare])
            within = np.arange(len(each)) - np.repeat(np.cumsum(n_mates[rare]), n_mates[rare])
            mates = order[within + high[each]]
            shifts, n_same = np.unique(mates - each, return_counts=True)
            best: I64 = shifts[n_same == n_same.max()]
            return best
    return np.zeros(1, np.int64)


def _by_size(own: Requests, other: Requests) -> tuple[I64, I64]:
    """Return keys of the requests of both that are equal for the same site and size."""
    sizes, of_size = np.unique(np.append(own.size, other.size), return_inverse=True)
    both = (np.append(own.site, other.site) + 1) * len(sizes) + of_size.reshape(-1)
    return both[: len(own)], both[len(own) :]


def _anchors(own: Requests, other: Requests, *, is_cut: bool) -> tuple[I64, I64]:
    """Return requests that occur equally often in both, as many as come in the same order.

    Anchors have the same site and size; if fewer than half of the requests do (another batch), the
    same site is enough. Where a site makes more requests in one of the two (a workspace that is
    made once), occurrences may be shifted. If a sequence was cut off, its counts are incomplete.
    """
    mine, theirs = _by_size(own, other)
    alike = _in_order((mine, own.tells), (theirs, other.tells), is_cut=is_cut)
    if 2 * len(alike[0]) >= np.count_nonzero(own.tells):
        return alike
    return _in_order((own.site, own.tells), (other.site, other.tells), is_cut=is_cut)


def _in_order(own: tuple[I64, Bools], other: tuple[I64, Bools], *, is_cut: bool) -> tuple[I64, I64]:
    """Return the positions of keys that occur equally often in both, ascending in both."""
    keys, of_key = np.unique(np.append(own[0], other[0]), return_inverse=True)
    of_key = of_key.reshape(-1)
    key_a, key_b = of_key[: len(own[0])], of_key[len(own[0]) :]
    mine, theirs = (
        np.bincount(key[tells], minlength=len(keys))
        for key, tells in ((key_a, own[1]), (key_b, other[1]))
    )
    is_anchor = (mine <= theirs) if is_cut else (mine == theirs)
    a, b = np.flatnonzero(own[1] & is_anchor[key_a]), np.flatnonzero(other[1] & is_anchor[key_b])
    scale = len(of_key) + 1
    _, in_a, in_b = np.intersect1d(
        key_a[a] * scale + occurrence(key_a[a]),
        key_b[b] * scale + occurrence(key_b[b]),
        assume_unique=True,
        return_indices=True,
    )
    order = np.argsort(in_a, kind="stable")
    at, mate = a[in_a[order]], b[in_b[order]]
    kept = _longest_ascending(mate)
    return at[kept], mate[kept]


def _longest_ascending(values: I64) -> I64:
    """Return the positions of the longest ascending subsequence (patience sorting)."""
    if (np.diff(values) > 0).all():
        return np.arange(len(values))
    tops: list[int] = []
    place: list[int] = []
    before = np.full(len(values), -1, np.int64)
    for i, value in enumerate(values.tolist()):
        pile = bisect_left(tops, value)
        if pile == len(tops):
            tops.append(value)
            place.append(i)
        else:
            tops[pile], place[pile] = value, i
        before[i] = place[pile - 1] if pile else -1
    at, result = place[-1], []
    while at >= 0:
        result.append(at)
        at = int(before[at])
    return np.array(result[::-1], np.int64)


def _between(own: Requests, other: Requests, ratio: float, *, is_cut: bool) -> tuple[I64, I64]:
    """Return the pairs between two anchors at the lowest cost."""
    is_whole = len(own) == len(other) and not is_cut
    if is_whole and np.array_equal(own.site, other.site):
        return np.arange(len(own)), np.arange(len(own))
    if len(own) * len(other) > MAX_COMPARED:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    size, scaled = own.size[:, np.newaxis], np.rint(other.size * ratio)
    is_like = (other.size == size) | (np.abs(scaled - size) <= ROUNDED_BYTES)
    is_same = other.site == own.site[:, np.newaxis]
    price = np.where(is_same, np.where(is_like, 0, OTHER_SIZE), NEVER)
    a, b = np.array(cheapest_pairs(price, LEFT_OUT, is_cut=is_cut), np.int64).reshape(-1, 2).T
    return a, b


def cheapest_pairs(
    prices: npt.NDArray[Any], left_out: int, *, is_cut: bool = False
) -> list[tuple[int, int]]:
    """Return the pairs of rows and columns, ascending in both, that cost least together.

    Args:
        prices: what each pair costs; ``NEVER`` for one that must not be.
        left_out: what each row and column without a mate costs.
        is_cut: whether the last row must have a mate if it can, and later columns cost nothing.
    """
    price = prices.astype(np.int32)
    n_own, n_other = price.shape
    free = left_out * np.arange(n_other + 1, dtype=np.int32)
    cost = free.copy()
    paired = np.full(n_other + 1, NEVER, np.int32)
    choices = np.empty((n_own, n_other + 1), np.uint8)
    for i in range(n_own):
        np.add(cost[:-1], price[i], out=paired[1:])
        alone = cost + left_out
        best = np.minimum(paired, alone)
        cost = np.minimum.accumulate(best - free) + free
        choices[i] = paired > alone  # _PAIRED or _OWN_ONLY
        choices[i][cost < best] = _OTHER_ONLY
    i, j = n_own - 1, n_other
    pairs: list[tuple[int, int]] = []
    if is_cut and (end := int(np.argmin(paired))) and paired[end] < NEVER:
        pairs = [(i, end - 1)]
        i, j = i - 1, end - 1
    while i >= 0 and j > 0:
        choice = choices[i, j]
        if choice == _PAIRED:
            pairs.append((i, j - 1))
        i -= choice != _OTHER_ONLY
        j -= choice != _OWN_ONLY
    return pairs[::-1]
