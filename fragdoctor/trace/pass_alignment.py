"""How a backward pass that failed goes on: its requests have no stacks that tell them apart."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.model.snapshot import I64, Bools

LEFT_OUT: Final = 0.6
LEFT_OUT_SMALL: Final = 0.2
"""What it costs to leave a request out, where one in the place of another costs 1: of more than
``SMALL`` bytes, and of less."""

ALIKE: Final = 0.1
SCALED: Final = 0.02
"""What it costs to take one of another size, up to this share off the size that is expected."""

MAX_UNLIKE: Final = 0.1
"""Share of the requests known by their stacks that may have neither the size of the other step nor
the one expected: sizes tell nothing where more of them do."""

SMALL: Final = 64 * 1024
MAX_COMPARED: Final = 4_000_000
"""Pairs of requests that are compared, at most."""

_MATCHED, _MINE_ONLY, _OTHER_ONLY = 0, 1, 2


def align_by_size(
    sizes: tuple[I64, I64], is_silent: tuple[Bools, Bools], known: tuple[I64, I64]
) -> tuple[I64, I64] | None:
    """Return which requests of a pass under way are which of another step.

    The requests since the last one that has a stack are aligned with what followed that one in the
    other step, by their sizes and at least cost (Needleman and Wunsch, the end of the other's pass
    free). Those that only one of the two has, such as a workspace that is made once, are left out;
    the last one never is.

    Args:
        sizes: of the requests of the step under way, and of the other.
        is_silent: whether the stack of each says nothing.
        known: requests of both that are the same by their stacks.

    Returns:
        Indices of the requests of both; None where the last one has a stack, where the other step
        lacks the one before the pass, or where sizes do not tell.
    """
    tells = np.flatnonzero(~is_silent[0])
    if not len(tells) or tells[-1] == len(sizes[0]) - 1:
        return None
    before = np.flatnonzero(known[0] == tells[-1])
    ratio = _ratio(sizes[0][known[0]], sizes[1][known[1]])
    if not len(before) or ratio is None:
        return None
    low, first = int(tells[-1]) + 1, int(known[1][before[0]]) + 1
    behind = np.append(np.flatnonzero(~is_silent[1][first:]), len(sizes[1]) - first)
    own, theirs = sizes[0][low:], sizes[1][first : first + int(behind[0])]
    if not len(theirs) or len(own) * len(theirs) > MAX_COMPARED:
        return None
    mine, other = _aligned(own, theirs, ratio)
    return low + mine, first + other


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


def _aligned(own: I64, theirs: I64, ratio: float) -> tuple[I64, I64]:
    """Return the matched requests of both sequences."""
    left_out = np.where(theirs > SMALL, LEFT_OUT, LEFT_OUT_SMALL)
    offset = np.append(0.0, np.cumsum(left_out))
    cost = offset.copy()
    choices = np.empty((len(own), len(cost)), np.uint8)
    matched: npt.NDArray[np.float64] = cost
    for i, size in enumerate(own.tolist()):
        is_like = np.abs(theirs * ratio - size) <= SCALED * size
        differs = np.where(theirs == size, 0.0, np.where(is_like, ALIKE, 1.0))
        matched = np.append(np.inf, cost[:-1] + differs)
        mine_only = cost + (LEFT_OUT if size > SMALL else LEFT_OUT_SMALL)
        best = np.minimum(matched, mine_only)
        cost = np.minimum.accumulate(best - offset) + offset
        choices[i] = np.where(matched <= mine_only, _MATCHED, _MINE_ONLY)
        choices[i][cost < best] = _OTHER_ONLY
    i, j = len(own) - 1, int(np.argmin(matched))
    pairs = [(i, j - 1)]  # the request that failed
    i, j = i - 1, j - 1
    while i >= 0:
        choice = choices[i, j]
        if choice == _MATCHED:
            pairs.append((i, j - 1))
        i -= choice != _OTHER_ONLY
        j -= choice != _MINE_ONLY
    mine, other = np.array(pairs[::-1], np.int64).T
    return mine, other
