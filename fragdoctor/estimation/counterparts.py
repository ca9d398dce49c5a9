"""Which request of one recording is which of another, made at another batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.estimation.batch_curves import F64
from fragdoctor.estimation.recordings import Recording, stack_keys
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.replay import Reproduction

# Work on one run of requests between two that are known; longer runs are left alone.
MAX_CELLS: Final = 1_500_000
BAND: Final = 24
# Where fewer stacks than this share of the requests occur equally often, steps are missing.
FEW_ANCHORS: Final = 0.1
TOLERANCE: Final = 0.02


@dataclass(frozen=True)
class Requests:
    """The requests of one recording in order, n of them.

    Attributes:
        position: ``int64[n]``, which operation of the reproduction it is.
        key: ``int64[n]``, the stack, the same in all recordings.
        rank: ``int64[n]``, how many requests of that stack came before.
        size: ``float64[n]``, bytes asked for.
        empty_key: of requests without frames (the backward pass runs in a thread of its own).
    """

    position: I64
    key: I64
    rank: I64
    size: F64
    empty_key: frozenset[int]


def requests_of(recording: Recording, reproduction: Reproduction) -> Requests:
    """Return the requests that a reproduction replays."""
    ops = Operations.of(reproduction.operations)
    position = np.flatnonzero(ops.kind == OpKind.MALLOC)
    events = recording.snapshot.events
    rows = events.device_slice(recording.analysis.device)
    keys = np.array([*stack_keys(recording.snapshot), 0], np.int64)
    key = keys[events.stack[rows][ops.row[position]]]
    order = np.argsort(key, kind="stable")
    first = np.append(True, key[order][1:] != key[order][:-1])[: len(key)]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    rank = np.empty(len(key), np.int64)
    rank[order] = np.arange(len(key)) - begins
    size = ops.size[position].astype(np.float64)
    return Requests(position, key, rank, size, frozenset((0, hash(()))))


def counterparts(own: Requests, other: Requests, own_batch: float, batch: float) -> I64:
    """Return for each request its counterpart in the other recording, -1 where there is none.

    The n-th request of a stack is the n-th of that stack elsewhere, if the stack occurs equally
    often. Between two such requests the others are aligned by their sizes, which stay or follow
    the batch: that finds its way around requests that only one of the recordings has (another
    kernel is chosen for another shape).

    Args:
        own: requests of the one recording.
        other: those of the other.
        own_batch: batch size of the one.
        batch: that of the other.
    """
    at = _by_rank(own, other)
    anchored = (at >= 0) & _is_even(own, other)
    if anchored.sum() < FEW_ANCHORS * len(at):
        is_empty = np.isin(own.key, np.array(sorted(own.empty_key), np.int64))
        theirs = other.size[np.maximum(at, 0)]
        anchored = (at >= 0) & ~is_empty & _is_plausible(theirs, own.size, batch / own_batch)
    anchored &= _is_in_order(at, anchored)
    at = np.where(anchored, at, -1)
    _align_between(own, other, at, own_batch, batch)
    return at


def _by_rank(own: Requests, other: Requests) -> I64:
    place = {
        pair: i for i, pair in enumerate(zip(other.key.tolist(), other.rank.tolist(), strict=True))
    }
    pairs = zip(own.key.tolist(), own.rank.tolist(), strict=True)
    return np.array([place.get(pair, -1) for pair in pairs], np.int64)


def _is_even(own: Requests, other: Requests) -> Bools:
    """Return whether the stack of each request occurs equally often in both recordings."""
    keys, n = np.unique(other.key, return_counts=True)
    theirs = dict(zip(keys.tolist(), n.tolist(), strict=True))
    mine, member, count = np.unique(own.key, return_inverse=True, return_counts=True)
    same = np.array(
        [theirs.get(k, 0) == c for k, c in zip(mine.tolist(), count.tolist(), strict=True)],
        np.bool_,
    )
    result: Bools = same[member.reshape(-1)] if len(mine) else np.zeros(0, np.bool_)
    return result


def _is_plausible(size: F64, base: F64, factor: float) -> Bools:
    """Return whether sizes stay, follow the batch or its square, or lie between."""
    ratio = size / np.maximum(base, 1.0)
    low, high = _bounds(factor)
    result: Bools = (ratio >= low) & (ratio <= high)
    return result


def _is_in_order(at: I64, anchored: Bools) -> Bools:
    """Return which anchors come in the same order in both recordings."""
    ahead = np.maximum.accumulate(np.where(anchored, at, -1))
    before = np.append(-1, ahead[:-1])[: len(at)]
    result: Bools = at > before
    return result


def _align_between(own: Requests, other: Requests, at: I64, own_batch: float, batch: float) -> None:
    """Find counterparts of the requests between anchors, in place."""
    anchors = np.flatnonzero(at >= 0)
    taken = np.zeros(len(other.key), np.bool_)
    taken[at[anchors]] = True
    mine, theirs = np.flatnonzero(at < 0), np.flatnonzero(~taken)
    if not len(mine) or not len(theirs):
        return
    my_run = np.searchsorted(anchors, mine)
    their_run = np.searchsorted(at[anchors], theirs)
    score = _scores(own, other, batch / own_batch)
    for run in np.unique(my_run).tolist():
        a = mine[np.searchsorted(my_run, run) : np.searchsorted(my_run, run + 1)]
        b = theirs[np.searchsorted(their_run, run) : np.searchsorted(their_run, run + 1)]
        if not len(b):
            continue
        if len(a) == len(b) and (own.key[a] == other.key[b]).all():
            at[a] = b
            continue
        for i, j in aligned(a.tolist(), b.tolist(), score):
            at[i] = j


def _bounds(factor: float) -> tuple[float, float]:
    return (
        min(factor, 1.0) ** 2 * (1 - TOLERANCE),
        max(factor, 1.0) ** 2 * (1 + TOLERANCE),
    )


def _scores(own: Requests, other: Requests, factor: float) -> Callable[[int, int], int]:
    """Return how well two requests fit: 4 stays or follows the batch.

    3: follows its square, as when the sequence length grew with it; 1: between; 0: not at all.
    """
    mine, theirs = own.size.tolist(), other.size.tolist()
    my_key, their_key = own.key.tolist(), other.key.tolist()
    low, high = _bounds(factor)

    def score(i: int, j: int) -> int:
        if my_key[i] != their_key[j]:
            return 0
        ratio = theirs[j] / max(mine[i], 1.0)
        if ratio == 1.0 or abs(ratio / factor - 1.0) < TOLERANCE:
            return 4
        if abs(ratio / factor**2 - 1.0) < TOLERANCE:
            return 3
        return int(low <= ratio <= high)

    return score


def aligned(
    mine: Sequence[int], theirs: Sequence[int], score: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Return pairs of two sequences, in order, of the highest total score.

    The usual alignment of two sequences (Needleman and Wunsch 1970) within a band around the
    diagonal. A score of 0 never pairs.
    """
    n, m = len(mine), len(theirs)
    band = abs(n - m) + BAND
    if n * (2 * band + 1) > MAX_CELLS:
        return []
    best = [dict.fromkeys(range(m + 1), 0)]
    for i in range(1, n + 1):
        above = best[-1]
        row: dict[int, int] = {}
        middle = i * m // n
        low, high = max(0, middle - band), min(m, middle + band)
        for j in range(low, high + 1):
            top = max(above.get(j, 0), row.get(j - 1, 0))
            if j:
                gain = score(mine[i - 1], theirs[j - 1])
                if gain and (found := above.get(j - 1, 0) + gain) > top:
                    top = found
            row[j] = top
        best.append(row)
    pairs = []
    i, j = n, m
    while i > 0 and j > 0:
        here = best[i].get(j, 0)
        gain = score(mine[i - 1], theirs[j - 1])
        if gain and here == best[i - 1].get(j - 1, 0) + gain:
            pairs.append((mine[i - 1], theirs[j - 1]))
            i, j = i - 1, j - 1
        elif here == best[i - 1].get(j, 0):
            i -= 1
        else:
            j -= 1
    return pairs[::-1]
