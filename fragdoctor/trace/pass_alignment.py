"""How backward passes of two steps go together: their requests have no stacks of their own."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I64, Bools

UNLIKE: Final = 10
LEFT_OUT: Final = 6
LEFT_OUT_SMALL: Final = 2
"""What it costs to take a request for one of another size, and to leave one out, of more than
``SMALL`` bytes and of less. Whole numbers: sums of them are equal where they should be."""

ALIKE: Final = 1
SCALED: Final = 0.02
"""What it costs to take one of another size, up to this share off the size that is expected."""

MAX_UNLIKE: Final = 0.1
"""Share of the requests known by their stacks that may have neither the size of the other step nor
the one expected: sizes tell nothing where more of them do."""

SMALL: Final = 64 * 1024
MAX_COMPARED: Final = 4_000_000
"""Pairs of requests that are compared, at most."""

TOO_DEAR: Final = 2**60
_MATCHED, _MINE_ONLY, _OTHER_ONLY = 0, 1, 2


def align_by_size(
    sizes: tuple[I64, I64], is_silent: tuple[Bools, Bools], known: tuple[I64, I64]
) -> tuple[I64, I64] | None:
    """Return which requests without stacks are which of another step, in a pass under way.

    The requests behind one that has a stack are aligned with what followed that one in the other
    step, by their sizes and at least cost (Needleman and Wunsch; of the pass under way the end of
    the other's is free). Those that only one of the two has, such as a workspace that is made once,
    are left out; the last one never is. Passes of equally many requests are alike one by one.

    Args:
        sizes: of the requests of the step under way, and of the other.
        is_silent: whether the stack of each says nothing.
        known: requests of both that are the same by their stacks.

    Returns:
        Indices of the requests of both, in order; None where the last one has a stack, where the
        other step lacks the one before the pass, or where sizes do not tell.
    """
    tells = np.flatnonzero(~is_silent[0])
    if not len(tells) or tells[-1] == len(sizes[0]) - 1:
        return None
    ratio = _ratio(sizes[0][known[0]], sizes[1][known[1]])
    if ratio is None:
        return None
    place = dict(zip(known[0].tolist(), known[1].tolist(), strict=True))
    tells_there = np.append(np.flatnonzero(~is_silent[1]), len(sizes[1]))
    mine: list[I64] = []
    other: list[I64] = []
    edges = np.append(tells, len(sizes[0]))
    for before in np.flatnonzero(np.diff(edges) > 1).tolist():
        low, high = int(edges[before]) + 1, int(edges[before + 1])
        is_last = high == len(sizes[0])
        first = place.get(low - 1, -1) + 1
        behind = int(tells_there[np.searchsorted(tells_there, first)])
        own, theirs = sizes[0][low:high], sizes[1][first:behind]
        if not first or not len(theirs) or len(own) * len(theirs) > MAX_COMPARED:
            if is_last:
                return None
            continue
        a = b = np.arange(len(own))
        if is_last or len(own) != len(theirs):
            a, b = _aligned(own, theirs, ratio, is_cut=is_last)
        mine.append(low + a)
        other.append(first + b)
    return np.concatenate(mine), np.concatenate(other)


def _ratio(mine: I64, other: I64) -> float | None:
    """Return by how much requests are larger than those of another step; None if it differs."""
    is_large = (mine > SMALL) & (other > SMALL)
    ratios = mine[is_large] / other[is_large]
    changed = ratios[ratios != 1.0]
    if not len(changed):
        return 1.0
    ratio = float(np.median(changed))
    is_unlike = np.abs(changed - ratio) > SCALED * ratio
    return None if np.count_nonzero(is_unlike) > MAX_UNLIKE * len(ratios) else ratio


def _aligned(own: I64, theirs: I64, ratio: float, *, is_cut: bool) -> tuple[I64, I64]:
    """Return the matched requests of both sequences.

    Where the own one is cut, its last request failed: that one is matched, wherever it lies.
    """
    left_out = np.where(theirs > SMALL, LEFT_OUT, LEFT_OUT_SMALL)
    offset = np.append(0, np.cumsum(left_out))
    cost = offset.copy()
    choices = np.empty((len(own), len(cost)), np.uint8)
    matched: I64 = cost
    for i, size in enumerate(own.tolist()):
        is_like = np.abs(theirs * ratio - size) <= SCALED * size
        differs = np.where(theirs == size, 0, np.where(is_like, ALIKE, UNLIKE))
        matched = np.append(TOO_DEAR, cost[:-1] + differs)
        mine_only = cost + (LEFT_OUT if size > SMALL else LEFT_OUT_SMALL)
        best = np.minimum(matched, mine_only)
        cost = np.minimum.accumulate(best - offset) + offset
        choices[i] = np.where(matched <= mine_only, _MATCHED, _MINE_ONLY)
        choices[i][cost < best] = _OTHER_ONLY
    i, j = len(own) - 1, len(theirs)
    pairs: list[tuple[int, int]] = []
    if is_cut:
        j = int(np.argmin(matched))
        pairs = [(i, j - 1)]
        i, j = i - 1, j - 1
    while i >= 0:
        choice = choices[i, j]
        if choice == _MATCHED:
            pairs.append((i, j - 1))
        i -= choice != _OTHER_ONLY
        j -= choice != _MINE_ONLY
    mine, other = np.array(pairs[::-1], np.int64).reshape(-1, 2).T
    return mine, other
