"""Groups of similar ranks, found among ten thousand of them without a loop over their pairs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fragdoctor.fleet.summary import MAX_HOLDERS
from fragdoctor.model.fleet import RankSummary

TOLERANCE: Final = 0.05
"""Share of the peak by which similar ranks may differ, in total and on one line."""

_STEPS: Final = 256  # ranks closer than one step are merged before they are compared

MAX_COLUMNS: Final = 256
"""Columns of the table that ranks are compared by first; the most common lines have one each."""

LineKey = tuple[str, int, str]


class RankProfile(Struct, frozen=True):
    """Ranks with the same figures after rounding to steps."""

    kind: Hashable
    peak: int | None
    lines: Mapping[LineKey, int]
    floor: int
    paths: tuple[str, ...]


def lines_of(rank: RankSummary) -> dict[LineKey, int]:
    """Return the bytes that each line holds at the peak; its folder may differ between machines."""
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


def are_alike(a: RankProfile, b: RankProfile) -> bool:
    """Return whether every line holds nearly the same on both."""
    allowed = max(1, TOLERANCE * max(a.peak or 0, b.peak or 0))
    for key in a.lines.keys() | b.lines.keys():
        here, there = a.lines.get(key), b.lines.get(key)
        # A line that is not listed may hold as much as the smallest listed one.
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


def join_alike(profiles: Sequence[RankProfile]) -> NDArray[np.int64]:
    """Return for each profile the number of its group: connected components of similarity.

    The profiles are of one kind, ascending by peak. The most that similar ranks hold on the lines
    of a column differs by no more than each line may, so few pairs are left to check.
    """
    counts = Counter(key for p in profiles for key in p.lines)
    commonest = sorted(counts, key=lambda key: (-counts[key], key))
    column = {key: i % MAX_COLUMNS for i, key in enumerate(commonest)}
    most = np.repeat(np.array([[p.floor] for p in profiles], np.int64), MAX_COLUMNS, axis=1)
    for row, profile in zip(most, profiles, strict=True):
        for key, value in profile.lines.items():
            row[column[key]] = max(row[column[key]], value)
    peaks = np.array([p.peak or 0 for p in profiles], np.int64)
    allowed = np.maximum(1, TOLERANCE * peaks)
    group = np.arange(len(profiles))
    for i, profile in enumerate(profiles):
        others = np.arange(i + 1, np.searchsorted(peaks - allowed, peaks[i], side="right"))
        own = sorted({column[key] for key in profile.lines}, key=lambda c: -int(most[i, c]))
        for columns in (*([c] for c in own), [*range(MAX_COLUMNS)]):
            others = others[group[others] != group[i]]
            difference = np.abs(most[others][:, columns] - most[i, columns])
            others = others[(difference <= allowed[others][:, None]).all(axis=1)]
        for j in others.tolist():
            if group[j] != group[i] and are_alike(profile, profiles[j]):
                group[group == group[j]] = group[i]
    return group


def find_groups(ranks: Sequence[RankSummary]) -> list[tuple[str, ...]]:
    """Return the paths of similar ranks, sorted; the largest group first, then by first path."""
    by_kind: dict[Hashable, list[RankProfile]] = defaultdict(list)
    for profile in sorted(profiles_of(ranks), key=lambda p: (p.peak or 0, p.paths)):
        by_kind[profile.kind, profile.peak is None].append(profile)
    found: list[tuple[str, ...]] = []
    for profiles in by_kind.values():
        groups: dict[int, list[str]] = defaultdict(list)
        for profile, group in zip(profiles, join_alike(profiles).tolist(), strict=True):
            groups[group] += profile.paths
        found += (tuple(sorted(paths)) for paths in groups.values())
    return sorted(found, key=lambda g: (-len(g), g))
