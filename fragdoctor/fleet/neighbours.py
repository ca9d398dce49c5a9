"""Which ranks are alike one, found for ten thousand ranks without a loop over their pairs.

The lines that most ranks hold are columns of a table, so that one rank is compared with all ranks
of a near peak at once. Lines beyond the table are compared one by one, among what is left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fragdoctor.fleet.spots import TOLERANCE, LineKey, Spot, allowed_steps, are_alike

MAX_COLUMNS: Final = 256
_ABSENT: Final = -1

Positions = NDArray[np.int64]


def join_alike(spots: Sequence[Spot], alike: Callable[[Spot, Spot], bool] = are_alike) -> Positions:
    """Return for each spot the number of its group: connected components of likeness.

    Args:
        spots: of one kind, ascending by peak.
        alike: the relation; only asked where the table does not decide.
    """
    table = _Table(spots)
    group = np.arange(len(spots))
    for i in range(len(spots)):
        others = table.candidates(i)
        others = others[group[others] != group[i]]
        others = table.near_on_columns(i, others)
        while others.size:
            j, others = int(others[0]), others[1:]
            if table.is_decided(i, j) or alike(spots[i], spots[j]):
                group[group == group[j]] = group[i]
                others = others[group[others] != group[i]]
    return group


class _Table:
    """Peaks, and the bytes on the commonest lines, in steps."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        # Unknown peaks come first, and are near each other only.
        self.peaks = np.array([_ABSENT if s.peak is None else s.peak for s in spots], np.int64)
        self.floors = np.array([s.floor for s in spots], np.int64)
        counts = Counter(key for s in spots for key in s.lines)
        keys = sorted(counts, key=lambda k: (-counts[k], k))[:MAX_COLUMNS]
        self.column_of: Mapping[LineKey, int] = {key: c for c, key in enumerate(keys)}
        self.values = np.full((len(keys), len(spots)), _ABSENT, np.int64)
        holders: dict[LineKey, list[int]] = defaultdict(list)
        for i, s in enumerate(spots):
            for key, value in s.lines.items():
                c = self.column_of.get(key)
                if c is None:
                    holders[key].append(i)
                else:
                    self.values[c, i] = value
        self.holders = {key: np.array(at, np.int64) for key, at in holders.items()}
        self.is_whole = np.array([all(k in self.column_of for k in s.lines) for s in spots], bool)
        self.highest_floor = int(self.floors.max(initial=0))
        self.spots = spots

    def candidates(self, i: int) -> Positions:
        """Return the spots after this one with a near peak that may be alike, ascending."""
        peak = int(self.peaks[i])
        if peak < 0:
            stop = int(np.searchsorted(self.peaks, 0))
        else:
            # The inverse of ``near``, a step wider than it for the rounding.
            highest = max(peak + 1, peak / (1 - TOLERANCE) + 1)
            stop = int(np.searchsorted(self.peaks, highest, side="right"))
        lines = self.spots[i].lines
        main, most = max(lines.items(), key=lambda kv: (kv[1], kv[0]), default=(None, 0))
        # Near peaks differ by a twentieth at most, and so does what is allowed.
        must_share = most > self.highest_floor + allowed_steps(max(peak, 0), 0) * 1.1 + 1
        if main is not None and must_share and main in self.holders:
            at = self.holders[main]
            return at[np.searchsorted(at, i, side="right") : np.searchsorted(at, stop)]
        return np.arange(i + 1, max(stop, i + 1))

    def near_on_columns(self, i: int, others: Positions) -> Positions:
        """Return those of ``others`` whose peak and whose lines in the table are near."""
        peak = int(self.peaks[i])
        if peak >= 0:
            there = self.peaks[others]
            others = others[there - peak <= np.maximum(1, TOLERANCE * there)]
        own = [c for key in self.spots[i].lines if (c := self.column_of.get(key)) is not None]
        own.sort(key=lambda c: -int(self.values[c, i]))
        for c in own:
            if others.size == 0:
                return others
            others = others[self._is_near(i, slice(c, c + 1), others)[0]]
        if others.size:
            others = others[self._is_near(i, slice(None), others).all(axis=0)]
        return others

    def is_decided(self, i: int, j: int) -> bool:
        """Tell whether the table holds all lines of both, so that near means alike."""
        return bool(self.is_whole[i] and self.is_whole[j])

    def _is_near(self, i: int, columns: slice, others: Positions) -> NDArray[np.bool_]:
        """As ``are_alike``, of some columns (rows of the result) and spots (columns of it)."""
        here, there = self.values[columns, i][:, None], self.values[columns][:, others]
        my_floor, their_floor = self.floors[i], self.floors[others][None, :]
        no_here, no_there = here < 0, there < 0
        low, high = np.where(no_here, my_floor, here), np.where(no_there, their_floor, there)
        peaks = np.maximum(np.maximum(self.peaks[others], self.peaks[i]), 0)
        near = np.abs(low - high) <= np.maximum(1, TOLERANCE * peaks)[None, :]
        below = (no_here & (there <= my_floor)) | (no_there & (here <= their_floor))
        found: NDArray[np.bool_] = near | below
        return found
