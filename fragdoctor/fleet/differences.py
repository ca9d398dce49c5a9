"""What sets a rank, or a group of ranks, apart from others: lines, settings, sizes, verdicts."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.fleet.groups import TOLERANCE, LineKey, lines_of
from fragdoctor.model.finding import line_text
from fragdoctor.model.fleet import Difference, DifferenceKind, RankSummary, SourceLine
from fragdoctor.units import MIB, format_count, format_size, plural

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
            DifferenceKind.PEAK: median_or_none(r.peak_bytes for r in members),
            DifferenceKind.CAPACITY: _median(members, "capacity_bytes"),
            DifferenceKind.STRANDED: _median(members, "stranded_free_bytes"),
            DifferenceKind.RETRIES: _median(members, "alloc_retries"),
        },
        settings=_common(r.settings for r in members if r.settings_known),
        sizes=_sizes(members),
        cause=min((r.cause.value for r in members), default=""),
    )


def differences(here: Sequence[RankSummary], others: Typical) -> tuple[Difference, ...]:
    """Return what sets some ranks apart from others, the weightiest difference first."""
    mine = typical_of(here)
    return (*_of_lines(mine, others), *_of_figures(mine, others))


def median_of(values: Sequence[int]) -> int:
    """Return the median as an integer, or 0 if there are no values."""
    return int(statistics.median(values)) if values else 0


def median_or_none(values: Iterable[int | None]) -> int | None:
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


def _median(members: Sequence[RankSummary], name: str) -> int | None:
    return median_or_none(r.figure(name) for r in members)
