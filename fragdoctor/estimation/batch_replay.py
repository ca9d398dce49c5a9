"""The requests of several recordings, fitted one by one and replayed at other batch sizes.

Programs that differ in the batch only ask for the same things in the same order, and each request
is a constant plus a multiple of the batch. So each request is first matched with its counterparts
in the other recordings; the requests of one, with sizes computed for another batch, are then what
the program would ask for there. The allocator model says what it reserves, and whether everything
is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.errors import FragdoctorError
from fragdoctor.estimation.batch_curves import F64
from fragdoctor.estimation.recordings import Recording, stack_keys
from fragdoctor.future.edits import Edit, batch_scaled
from fragdoctor.future.simulator import reproduce
from fragdoctor.future.whatif import WhatIf, replay_what_if
from fragdoctor.model.batch_fit import ReplayCheck
from fragdoctor.model.simulation import ReplayResult
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


MAX_BATCH_STEPS: Final = 2**20
MAX_OPERATIONS: Final = 40_000_000
ENDLESS: Final = 2**50
# A request counts as straight if the line misses no recording by more than this.
STRAIGHT_SHARE: Final = 0.01
MAX_UNMATCHED_SHARE: Final = 0.05
# Relative batches are known to this part of the smallest.
RELATIVE_STEP: Final = 0.05


class BatchReplay:
    """Replays one recording's requests at any batch size.

    ``method`` and ``unmatched_share``: see ``model.batch_fit.ReplayCheck``.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        lines: Sequence[Reproduction],
        batches: Sequence[float],
    ) -> None:
        """Fit the requests.

        At two or more batch sizes, none of which ran out of memory; ``lines`` are reproductions.
        """
        base = max(range(len(lines)), key=lambda i: (_n_requests(lines[i]), batches[i]))
        self.reproduction: Reproduction = lines[base]
        self.base_batch = batches[base]
        self.n_operations = len(Operations.of(self.reproduction.operations))
        tables = [requests_of(r, b) for r, b in zip(recordings, lines, strict=True)]
        sizes = _matched(tables, base, batches)
        known, coefficients = _fitted(np.array(batches), sizes)
        weight = tables[base].size
        total = float(weight.sum()) or 1.0
        self.unmatched_share = float(weight[~known].sum()) / total
        self._position = tables[base].position
        self._known, self._coefficients = known, coefficients
        self.method = "fitted" if self.unmatched_share <= MAX_UNMATCHED_SHARE else "scaled"

    def edit(self, batch: float) -> Edit:
        """Return the change of the recorded requests to another batch size."""
        if self.method == "scaled":
            return batch_scaled(batch / self.base_batch)

        def change(_: Reproduction, ops: Operations) -> Operations:
            bend, slope, fixed = self._coefficients
            wanted = np.rint(bend * batch**2 + slope * batch + fixed)
            size = ops.size.copy()
            at = self._position[self._known]
            size[at] = np.clip(wanted[self._known], 1, ENDLESS).astype(np.uint64)
            return ops.with_size(size)

        return Edit(f"batch of {batch:g}", change)

    def run(self, batch: float, capacity_bytes: int = ENDLESS) -> ReplayResult:
        """Return what the allocator does at a batch size.

        Raises:
            ConfigError, SimulationError: the requests can only be scaled, and the trace has no
                steps or the factor is absurd.
        """
        what_if = WhatIf(capacity_bytes=capacity_bytes)
        return replay_what_if(self.reproduction, what_if, self.edit(batch).apply(self.reproduction))


def check_by_replay(
    recordings: Sequence[Recording],
    batches: Sequence[float],
    capacity_bytes: int | None,
    guess: float,
    *,
    is_relative: bool,
) -> ReplayCheck | str:
    """Return the largest batch that a replay serves, or why nothing was replayed.

    None of the recordings ran out of memory. Without a capacity it asks only how exact the replay
    is. ``guess`` is where to begin to look for the largest; ``is_relative``: batches are multiples
    of the smallest.
    """
    if sum(r.analysis.n_events for r in recordings) > MAX_OPERATIONS // 8:
        return "the traces are too long to be replayed many times"
    try:
        lines = [reproduce(r.analysis.trace) for r in recordings]
        replayed = BatchReplay(recordings, lines, batches)
        errors = [
            abs(replayed.run(b).peak_allocated_bytes / r.peaks[0] - 1)
            for r, b in zip(recordings, batches, strict=True)
        ]
        found: tuple[float | None, float | None, float | None] = (None, None, None)
        if capacity_bytes is not None:
            step = RELATIVE_STEP if is_relative else 1.0
            found = _largest(replayed, capacity_bytes, guess, step)
        peak = (
            None
            if found[0] in (None, math.inf)
            else replayed.run(found[0] or 0.0).peak_allocated_bytes
        )
        top = max(batches)
        beyond = [replayed.run(f * top).peak_allocated_bytes for f in (1, 2, 4)]
        left_out = _left_out_error(recordings, lines, batches)
    except FragdoctorError as e:
        return e.message
    return ReplayCheck(
        method=replayed.method,
        largest=found[0],
        largest_without_flush=found[1],
        ceiling=found[2],
        worst_error=max(errors),
        left_out_error=left_out,
        peak_bytes=peak,
        slopes_beyond=((beyond[1] - beyond[0]) / top, (beyond[2] - beyond[1]) / (2 * top)),
        unmatched_share=replayed.unmatched_share,
    )


def _left_out_error(
    recordings: Sequence[Recording], lines: Sequence[Reproduction], batches: Sequence[float]
) -> float | None:
    """Return how far the replay of the others misses the peak of the largest recording."""
    top = max(batches)
    kept = [i for i, b in enumerate(batches) if b < top]
    if len({batches[i] for i in kept}) < 2:
        return None
    others = BatchReplay(
        [recordings[i] for i in kept], [lines[i] for i in kept], [batches[i] for i in kept]
    )
    true = max(r.peaks[0] for r, b in zip(recordings, batches, strict=True) if b == top)
    return others.run(top).peak_allocated_bytes / true - 1


def _largest(
    replayed: BatchReplay, capacity: int, guess: float, step: float
) -> tuple[float | None, float | None, float | None]:
    results: dict[int, ReplayResult] = {}

    def at(n: int) -> ReplayResult:
        if n not in results:
            results[n] = replayed.run(n * step, capacity)
        return results[n]

    start = max(1, round(guess / step))
    return (
        _last(lambda n: at(n).fits, start, step),
        _last(lambda n: at(n).fits and at(n).retries == 0, start, step),
        _last(lambda n: replayed.run(n * step).peak_active_bytes <= capacity, start, step),
    )


def _last(holds: Callable[[int], bool], start: int, step: float) -> float | None:
    """Return the last number that a test holds for, by doubling and halving; inf = no end."""
    low, high = 0, start
    while holds(high):
        low, high = high, high * 2
        if high > MAX_BATCH_STEPS:
            return math.inf
    if low == 0:
        reach = start
        while reach > 1 and not holds(reach // 2):
            reach //= 2
        if reach <= 1:
            return None
        low, high = reach // 2, reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * step


def _n_requests(reproduction: Reproduction) -> int:
    return int((Operations.of(reproduction.operations).kind == OpKind.MALLOC).sum())


def _matched(tables: Sequence[Requests], base: int, batches: Sequence[float]) -> F64:
    """Return the size of each request of the base in every recording; NaN where it has none."""
    own = tables[base]
    sizes = np.full((len(tables), len(own.key)), np.nan)
    for i, other in enumerate(tables):
        at = (
            np.arange(len(own.key))
            if i == base
            else counterparts(own, other, batches[base], batches[i])
        )
        found = at >= 0
        sizes[i, found] = other.size[at[found]]
    return sizes


def _fitted(batches: F64, sizes: F64) -> tuple[Bools, F64]:
    """Return which requests could be fitted, and bend, slope and constant of each (3 rows)."""
    known = ~np.isnan(sizes)
    b = np.where(known, batches[:, None], np.nan)
    n = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        filled_b, filled_s = np.where(known, b, 0.0), np.where(known, sizes, 0.0)
        mean_b, mean_s = filled_b.sum(axis=0) / n, filled_s.sum(axis=0) / n
        away = np.where(known, b - mean_b, 0.0)
        spread = (away**2).sum(axis=0)
        slope = (away * np.where(known, sizes - mean_s, 0.0)).sum(axis=0) / spread
        fixed = mean_s - slope * mean_b
        residual = np.where(known, np.abs(sizes - fixed - slope * b), 0.0).max(axis=0)
    fits = spread > 0
    coefficients = np.stack([np.zeros_like(slope), slope, fixed])
    top = filled_s.max(axis=0)
    curved = fits & (residual > np.maximum(STRAIGHT_SHARE * top, 512.0)) & known.all(axis=0)
    if curved.any() and len(np.unique(batches)) > 2:
        parabola = np.polyfit(batches, sizes[:, curved], 2)
        bends_up = parabola[0] > 0
        chosen = np.flatnonzero(curved)[bends_up]
        coefficients[:, chosen] = parabola[:, bends_up]
    return fits, coefficients
