"""Groups of alike ranks, found for ten thousand of them without a loop over their pairs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fragdoctor.fleet.summary import MAX_HOLDERS
from fragdoctor.frozen import frozen
from fragdoctor.model.fleet import RankSummary

TOLERANCE: Final = 0.05
"""Share of the peak by which alike ranks may differ, in all and on one line."""

_STEPS: Final = 256  # ranks nearer than a step are taken together before they are compared

LineKey = tuple[str, int, str]


@frozen
class RankProfile:
    """Ranks with the same figures after rounding to steps."""

    kind: Hashable
    peak: int | None
    lines: Mapping[LineKey, int]
    floor: int
    paths: tuple[str, ...]


def lines_of(rank: RankSummary) -> dict[LineKey, int]:
    """Return the bytes that each line holds at the peak; machines may keep it in other folders."""
    held: dict[LineKey, int] = {}
    for h in rank.holders:
        held[h.key] = held.get(h.key, 0) + h.n_bytes
    return held


def profiles_of(ranks: Sequence[RankSummary]) -> Iterator[RankProfile]:
    """Yield the profiles of some ranks."""
    peaks = [r.peak_bytes for r in ranks if r.peak_bytes]
    step = max(1, int(statistics.median(peaks)) // _STEPS) if peaks else 1
    found: dict[Hashable, list[RankSummary]] = defaultdict(list)
    for r in ranks:
        peak = None if r.peak_bytes is None else _steps(r.peak_bytes, step)
        lines = tuple(sorted((k, n) for k, v in lines_of(r).items() if (n := _steps(v, step))))
        floor = _steps(r.holders[-1].n_bytes, step) if len(r.holders) >= MAX_HOLDERS else 0
        kind = (r.cause, r.has_failed, r.settings if r.settings_known else None)
        found[kind, peak, lines, floor].append(r)
    for (kind, peak, lines, floor), members in found.items():  # type: ignore[misc]
        yield RankProfile(kind, peak, dict(lines), floor, tuple(sorted(m.path for m in members)))


def allowed_steps(a: int | None, b: int | None) -> float:
    """Return by how many steps a line of alike ranks may differ, from their peaks."""
    return max(1, TOLERANCE * max(a or 0, b or 0))


def are_alike(a: RankProfile, b: RankProfile) -> bool:
    """Return whether every line holds nearly the same on both."""
    allowed = allowed_steps(a.peak, b.peak)
    for key in a.lines.keys() | b.lines.keys():
        here, there = a.lines.get(key), b.lines.get(key)
        # A line that is not listed may hold what the smallest listed one does.
        low = a.floor if here is None else here
        high = b.floor if there is None else there
        if here is None and there is not None and there <= a.floor:
            continue
        if there is None and here is not None and here <= b.floor:
            continue
        if abs(low - high) > allowed:
            return False
    return True


def _steps(n_bytes: int, step: int) -> int:
    return (n_bytes + step // 2) // step


MAX_COLUMNS: Final = 256
_ABSENT: Final = -1

Positions = NDArray[np.int64]


def join_alike(
    profiles: Sequence[RankProfile], alike: Callable[[RankProfile, RankProfile], bool] = are_alike
) -> Positions:
    """Return for each profile the number of its group: connected components of likeness.

    The profiles are of one kind, ascending by peak; ``alike`` is only asked where the table does
    not decide.
    """
    table = _Table(profiles)
    group = np.arange(len(profiles))
    for i in range(len(profiles)):
        others = table.candidates(i)
        others = others[group[others] != group[i]]
        others = table.near_on_columns(i, others)
        while others.size:
            j, others = int(others[0]), others[1:]
            if table.is_decided(i, j) or alike(profiles[i], profiles[j]):
                group[group == group[j]] = group[i]
                others = others[group[others] != group[i]]
    return group


class _Table:
    """Peaks, and the bytes on the commonest lines, in steps."""

    def __init__(self, profiles: Sequence[RankProfile]) -> None:
        # Unknown peaks come first, and are near each other only.
        self.peaks = np.array([_ABSENT if s.peak is None else s.peak for s in profiles], np.int64)
        self.floors = np.array([s.floor for s in profiles], np.int64)
        counts = Counter(key for s in profiles for key in s.lines)
        keys = sorted(counts, key=lambda k: (-counts[k], k))[:MAX_COLUMNS]
        self.column_of: Mapping[LineKey, int] = {key: c for c, key in enumerate(keys)}
        self.values = np.full((len(keys), len(profiles)), _ABSENT, np.int64)
        holders: dict[LineKey, list[int]] = defaultdict(list)
        for i, s in enumerate(profiles):
            for key, value in s.lines.items():
                c = self.column_of.get(key)
                if c is None:
                    holders[key].append(i)
                else:
                    self.values[c, i] = value
        self.holders = {key: np.array(at, np.int64) for key, at in holders.items()}
        self.is_whole = np.array(
            [all(k in self.column_of for k in s.lines) for s in profiles], bool
        )
        self.highest_floor = int(self.floors.max(initial=0))
        self.profiles = profiles

    def candidates(self, i: int) -> Positions:
        """Return the profiles after this one with a near peak that may be alike, ascending."""
        peak = int(self.peaks[i])
        if peak < 0:
            stop = int(np.searchsorted(self.peaks, 0))
        else:
            # The inverse of ``near``, a step wider than it for the rounding.
            highest = max(peak + 1, peak / (1 - TOLERANCE) + 1)
            stop = int(np.searchsorted(self.peaks, highest, side="right"))
        lines = self.profiles[i].lines
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
        own = [c for key in self.profiles[i].lines if (c := self.column_of.get(key)) is not None]
        own.sort(key=lambda c: -int(self.values[c, i]))
        for c in own:
            if others.size == 0:
                return others
            others = others[self._is_near(i, slice(c, c + 1), others)[0]]
        if others.size:
            others = others[self._is_near(i, slice(None), others).all(axis=0)]
        return others

    def is_decided(self, i: int, j: int) -> bool:
        """Return whether the table holds all lines of both, so that near means alike."""
        return bool(self.is_whole[i] and self.is_whole[j])

    def _is_near(self, i: int, columns: slice, others: Positions) -> NDArray[np.bool_]:
        """As ``are_alike``, of some columns (rows of the result) and profiles (columns of it)."""
        here, there = self.values[columns, i][:, None], self.values[columns][:, others]
        my_floor, their_floor = self.floors[i], self.floors[others][None, :]
        no_here, no_there = here < 0, there < 0
        low, high = np.where(no_here, my_floor, here), np.where(no_there, their_floor, there)
        peaks = np.maximum(np.maximum(self.peaks[others], self.peaks[i]), 0)
        near = np.abs(low - high) <= np.maximum(1, TOLERANCE * peaks)[None, :]
        below = (no_here & (there <= my_floor)) | (no_there & (here <= their_floor))
        found: NDArray[np.bool_] = near | below
        return found


def find_groups(ranks: Sequence[RankSummary]) -> list[tuple[str, ...]]:
    """Return the paths of alike ranks, sorted; the largest group first, then by its first path."""
    by_kind: dict[Hashable, list[RankProfile]] = defaultdict(list)
    for profile in sorted(
        profiles_of(ranks), key=lambda s: (-1 if s.peak is None else s.peak, s.paths)
    ):
        by_kind[profile.kind].append(profile)
    found: list[tuple[str, ...]] = []
    for profiles in by_kind.values():
        groups: dict[int, list[str]] = defaultdict(list)
        for profile, group in zip(profiles, join_alike(profiles).tolist(), strict=True):
            groups[group] += profile.paths
        found += (tuple(sorted(paths)) for paths in groups.values())
    return sorted(found, key=lambda g: (-len(g), g))
