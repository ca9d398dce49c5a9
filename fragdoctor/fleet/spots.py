"""Ranks as spots: their figures in steps, so that what no step tells apart is compared once."""

from __future__ import annotations

import statistics
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
class Spot:
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


def spots_of(ranks: Sequence[RankSummary]) -> Iterator[Spot]:
    """Yield the spots of some ranks."""
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
        yield Spot(kind, peak, dict(lines), floor, tuple(sorted(m.path for m in members)))


def allowed_steps(a: int | None, b: int | None) -> float:
    """Return by how many steps a line of alike ranks may differ, from their peaks."""
    return max(1, TOLERANCE * max(a or 0, b or 0))


def are_near(low: int | None, high: int | None) -> bool:
    """Tell whether two peaks are near; peaks that are not known are."""
    if low is None or high is None:
        return low is high
    return high - low <= max(1, TOLERANCE * high)


def are_alike(a: Spot, b: Spot) -> bool:
    """Tell whether every line holds nearly the same on both."""
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
