"""Groups of similar ranks, and what sets ranks apart: lines, settings, sizes, verdicts."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from fragdoctor.fleet.summary import MAX_HOLDERS
from fragdoctor.model.finding import line_text
from fragdoctor.model.fleet import Difference, DifferenceKind, RankSummary, SourceLine
from fragdoctor.units import MIB, format_count, format_size, plural

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


def find_groups(ranks: Sequence[RankSummary]) -> list[list[str]]:
    """Return the paths of similar ranks, in any order."""
    by_kind: dict[Hashable, list[RankProfile]] = defaultdict(list)
    for profile in sorted(profiles_of(ranks), key=lambda p: (p.peak or 0, p.paths)):
        by_kind[profile.kind, profile.peak is None].append(profile)
    found: list[list[str]] = []
    for profiles in by_kind.values():
        groups: dict[int, list[str]] = defaultdict(list)
        for profile, group in zip(profiles, join_alike(profiles).tolist(), strict=True):
            groups[group] += profile.paths
        found += groups.values()
    return found


MAX_LINES: Final = 3
_LINE_SHARE: Final = 0.02  # share of the peak: less is within the noise of any run
_MANY_STRANDED: Final = 0.05
_CAPACITY_SHARE: Final = 0.02

_Settings = tuple[tuple[str, str], ...]


class Typical(Struct, frozen=True):
    """Medians over the ranks that others are compared with, and the values that most of them have.

    They are worked out only once: a thousand odd ranks may be compared with the same thousand.
    """

    members: Sequence[RankSummary]
    lines: dict[LineKey, int]
    places: dict[LineKey, SourceLine]
    figures: Mapping[DifferenceKind, int | None]
    settings: _Settings | None
    sizes: dict[int, int]
    cause: str

    @property
    def peak(self) -> int | None:
        """Their peak of allocated memory, or the nearest figure that their inputs have."""
        return self.figures[DifferenceKind.PEAK]


def typical_of(members: Sequence[RankSummary]) -> Typical:
    """Return the medians of some ranks."""
    per_line: dict[LineKey, list[int]] = defaultdict(list)
    places: dict[LineKey, SourceLine] = {}
    for r in sorted(members, key=lambda r: r.path):
        for key, n in lines_of(r).items():
            per_line[key].append(n)
        for h in r.holders:
            places.setdefault(h.key, h)
    lines = {
        key: median_of([*values, *([0] * (len(members) - len(values)))])
        for key, values in per_line.items()
    }
    return Typical(
        members=members,
        lines=lines,
        places=places,
        figures={
            DifferenceKind.PEAK: _median(r.peak_bytes for r in members),
            DifferenceKind.CAPACITY: _median(r.figure("capacity_bytes") for r in members),
            DifferenceKind.STRANDED: _median(r.figure("stranded_free_bytes") for r in members),
            DifferenceKind.RETRIES: _median(r.figure("alloc_retries") for r in members),
        },
        settings=_common(r.settings for r in members if r.settings_known),
        sizes=_sizes(members),
        cause=min((r.cause.value for r in members), default=""),
    )


def differences(mine: Typical, others: Typical) -> tuple[Difference, ...]:
    """Return what sets some ranks apart from others, the weightiest difference first."""
    return (*_of_lines(mine, others), *_of_figures(mine, others))


def median_of(values: Sequence[int]) -> int:
    """Return the median as an integer, or 0 if there are no values."""
    return int(statistics.median(values)) if values else 0


def _median(values: Iterable[int | None]) -> int | None:
    """Return the median of the known values, or None if there are none."""
    known = [v for v in values if v is not None]
    return median_of(known) if known else None


def _of_lines(mine: Typical, others: Typical) -> list[Difference]:
    least = max(MIB, _LINE_SHARE * max(mine.peak or 0, others.peak or 0))
    deltas = {
        key: mine.lines.get(key, 0) - others.lines.get(key, 0)
        for key in mine.lines.keys() | others.lines.keys()
    }
    worst = sorted(
        (key for key, delta in deltas.items() if abs(delta) >= least),
        key=lambda key: (-abs(deltas[key]), key),
    )
    return [_line(key, deltas[key], mine, others) for key in worst[:MAX_LINES]]


def _line(key: LineKey, delta: int, mine: Typical, others: Typical) -> Difference:
    line = mine.places.get(key) or others.places[key]
    here, there = mine.lines.get(key, 0), others.lines.get(key, 0)
    way = "more" if delta > 0 else "less"
    where = line_text(line.location, "lines without a recorded stack")
    text = f"{format_size(abs(delta))} {way} at {where}"
    if not there:
        text += ", a line that holds nothing on the others"
    elif not here:
        text += ", a line that holds nothing here"
    else:
        text += f" ({format_size(here)} against {format_size(there)})"
    return Difference(
        DifferenceKind.LINE,
        text,
        line=replace(line, n_bytes=here),
        delta_bytes=delta,
    )


def _of_figures(mine: Typical, others: Typical) -> Iterator[Difference]:
    yield from _of_bytes(DifferenceKind.PEAK, "a peak of", mine, others, share=TOLERANCE)
    if mine.settings is not None and others.settings is not None:
        left, right = dict(mine.settings), dict(others.settings)
        for name in sorted(left.keys() | right.keys()):
            a, b = left.get(name, "the default"), right.get(name, "the default")
            if a != b:
                text = f"another setting: {name} is {a}, not {b}"
                yield Difference(DifferenceKind.SETTING, text)
    share = _CAPACITY_SHARE
    yield from _of_bytes(DifferenceKind.CAPACITY, "a device of", mine, others, share=share)
    yield from _of_sizes(mine, others)
    least = int(max(2 * MIB, _MANY_STRANDED * max(mine.peak or 0, others.peak or 0)))
    what = "stranded free memory of"
    yield from _of_bytes(DifferenceKind.STRANDED, what, mine, others, least=least)
    kind = DifferenceKind.RETRIES
    n_here, n_there = mine.figures[kind], others.figures[kind]
    if n_here is not None and n_there is not None and (n_here > 0) != (n_there > 0):
        retries = plural(n_here, "retry", "retries")
        yield Difference(kind, f"{retries} of allocations against {format_count(n_there)}")
    if mine.cause != others.cause:
        a, b = (one.cause.replace("_", " ") for one in (mine, others))
        yield Difference(DifferenceKind.VERDICT, f"the verdict is {a}, not {b}")


def _of_bytes(  # noqa: PLR0913 - one row of a table of figures
    kind: DifferenceKind, what: str, mine: Typical, others: Typical, *,
    share: float = 0.0, least: int = 1,
) -> Iterator[Difference]:  # fmt: skip
    """Yield a figure of bytes where it differs by at least this many, and by more than a share."""
    here, there = mine.figures[kind], others.figures[kind]
    if here is not None and there is not None:
        apart = abs(here - there)
        if apart >= least and apart > share * max(here, there):
            text = f"{what} {format_size(here)} against {format_size(there)}"
            yield Difference(kind, text, delta_bytes=here - there)


def _common(values: Iterable[_Settings]) -> _Settings | None:
    """Return the value that most have; the smallest if several are equally common."""
    counts = Counter(values)
    return min(counts, key=lambda v: (-counts[v], v)) if counts else None


def _of_sizes(mine: Typical, others: Typical) -> Iterator[Difference]:
    """Yield the request sizes if the largest ones have little in common."""
    here, there = mine.sizes, others.sizes
    new = [s for s in here if s not in there]
    if not here or not there or sum(here[s] for s in new) < 0.5 * sum(here.values()):
        return
    a = ", ".join(format_size(s) for s in sorted(new, key=lambda s: (-here[s], s))[:3])
    gone = sorted((s for s in there if s not in here), key=lambda s: (-there[s], s))[:3]
    b = ", ".join(format_size(s) for s in gone) or "other sizes"
    text = f"another shape: it asks for {a} where the others ask for {b}"
    yield Difference(DifferenceKind.SIZES, text)


def _sizes(members: Sequence[RankSummary]) -> dict[int, int]:
    """Return the bytes asked for by request size, for sizes of at least 1 MiB, over all members."""
    total: dict[int, int] = defaultdict(int)
    for r in members:
        for size, count in r.large_sizes:
            if size >= MIB:
                total[size] += size * count
    return total
