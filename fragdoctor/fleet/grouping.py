"""Groups of alike ranks. A function of the set of ranks: their order does not matter.

Two ranks are alike if their verdict and settings are the same, their peaks are near, and every
line holds nearly the same. Groups are the connected components of that relation, so that a
continuum (batches of varying length) is one group, and a rank beyond a gap is another.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.fleet.summary import MAX_HOLDERS
from fragdoctor.model.fleet import RankSummary

TOLERANCE: Final = 0.05
"""Share of the peak by which alike ranks may differ, in all and on one line."""

_STEPS: Final = 256  # ranks nearer than a step are taken together before they are compared

LineKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class _Spot:
    """Ranks that no step tells apart: figures in steps."""

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


def find_groups(ranks: Sequence[RankSummary]) -> list[tuple[str, ...]]:
    """Return the paths of alike ranks, sorted; the largest group first, then by its first path."""
    spots = sorted(_spots(ranks), key=lambda s: (-1 if s.peak is None else s.peak, s.paths))
    parent = list(range(len(spots)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    by_kind: dict[Hashable, list[int]] = defaultdict(list)
    for i, spot in enumerate(spots):
        by_kind[spot.kind].append(i)
    for members in by_kind.values():
        for i, j in _pairs(spots, members):
            if root(i) != root(j) and _alike(spots[i], spots[j]):
                parent[root(j)] = root(i)
    groups: dict[int, list[str]] = defaultdict(list)
    for i, spot in enumerate(spots):
        groups[root(i)] += spot.paths
    return sorted((tuple(sorted(g)) for g in groups.values()), key=lambda g: (-len(g), g))


def _pairs(spots: Sequence[_Spot], members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs that may be alike, so that not every rank is compared with every other.

    ``members`` ascend by peak. Where the largest line of one holds more than may differ, the other
    holds that line as well, or its list of lines ends above it.
    """
    by_line: dict[LineKey, list[int]] = defaultdict(list)
    for i in members:
        for key in spots[i].lines:
            by_line[key].append(i)
    highest_floor = max((spots[i].floor for i in members), default=0)
    place = {i: at for at, i in enumerate(members)}
    for i in members:
        spot = spots[i]
        main, most = max(spot.lines.items(), key=lambda kv: (kv[1], kv[0]), default=(None, 0))
        # Near peaks differ by a twentieth at most, and so does what is allowed.
        is_telling = (
            main is not None and most > highest_floor + _allowed(spot.peak, spot.peak) * 1.1
        )
        others = by_line[main] if is_telling and main is not None else members
        above = others[bisect_right(others, place[i], key=place.__getitem__) :]
        for j in above:
            if not _near(spot.peak, spots[j].peak):
                break  # the rest is farther away
            yield i, j


def _allowed(a: int | None, b: int | None) -> float:
    """Return by how many steps a line of alike ranks may differ."""
    return max(1, TOLERANCE * max(a or 0, b or 0))


def _spots(ranks: Sequence[RankSummary]) -> Iterator[_Spot]:
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
        yield _Spot(kind, peak, dict(lines), floor, tuple(sorted(m.path for m in members)))


def _steps(n_bytes: int, step: int) -> int:
    return (n_bytes + step // 2) // step


def _near(low: int | None, high: int | None) -> bool:
    """Tell whether two peaks are near; peaks that are not known are."""
    if low is None or high is None:
        return low is high
    return high - low <= max(1, TOLERANCE * high)


def _alike(a: _Spot, b: _Spot) -> bool:
    allowed = _allowed(a.peak, b.peak)
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
