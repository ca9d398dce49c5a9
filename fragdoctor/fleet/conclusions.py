"""Draws conclusions from summaries: groups, odd ranks, skew, and one verdict for the job."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.fleet.differences import (
    Typical,
    differences,
    median_of,
    median_or_none,
    typical_of,
)
from fragdoctor.fleet.groups import find_groups
from fragdoctor.fleet.job_verdict import job_verdict
from fragdoctor.model.finding import told_apart
from fragdoctor.model.fleet import (
    SKEWED,
    FleetReport,
    FleetSummary,
    RankGroup,
    RankRow,
    RankSummary,
    Skew,
    SourceLine,
)


def ordered(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Return the ranks by number, then those without one by host, local rank and path."""
    return sorted(
        ranks,
        key=lambda r: (
            r.rank is None,
            r.rank or 0,
            r.job,
            r.host,
            -1 if r.local_rank is None else r.local_rank,
            r.path,
        ),
    )


def labels_of(ranks: Sequence[RankSummary]) -> Mapping[str, str]:
    """Return a short label for each path; no two ranks have the same label.

    It is ``rank 5``, ``host 1 rank 0``, ``host 1 local rank 0``, or the path if these repeat.
    """
    by_rank = {r.path: "" if r.rank is None else f"rank {r.rank}" for r in ranks}
    by_host = {r.path: _with_host(r) for r in ranks}
    n_rank, n_host = Counter(by_rank.values()), Counter(by_host.values())
    short_paths = told_apart([r.path for r in ranks])
    are_short = len(set(short_paths)) == len(ranks)
    labels: dict[str, str] = {}
    for r, short_path in zip(ranks, short_paths, strict=True):
        short, longer = by_rank[r.path], by_host[r.path]
        alone = (name for name, n in ((short, n_rank), (longer, n_host)) if name and n[name] == 1)
        tail = short_path if are_short else r.path
        labels[r.path] = next(alone, f"{short} ({tail})" if short else tail)
    return labels


def _with_host(rank: RankSummary) -> str:
    if not rank.host:
        return ""
    if rank.rank is not None:
        return f"host {rank.host} rank {rank.rank}"
    return "" if rank.local_rank is None else f"host {rank.host} local rank {rank.local_rank}"


MIN_GROUP: Final = 2
MIN_GROUP_SHARE: Final = 0.01
"""A smaller group is odd: pipeline stages and the like have more ranks in any real layout."""

_MAX_GROUP_LINES: Final = 8
_MAX_REPRESENTATIVES: Final = 16

Members = Mapping[str, RankSummary]


def conclude(fleet: FleetSummary, notes: Sequence[str] = ()) -> FleetReport:
    """Return the report of a job from the summaries of its ranks."""
    ranks = ordered(fleet.ranks)
    labels = labels_of(ranks)
    read = {r.path: r for r in ranks if r.is_read}
    groups = _groups(read, labels)
    group_of = {path: g for g in groups for path in g.paths}
    rows = [
        RankRow(labels[r.path], group.id, group.is_odd, r)
        if (group := group_of.get(r.path))
        else RankRow(labels[r.path], "", False, r)
        for r in ranks
    ]
    return FleetReport(
        verdict=job_verdict(rows, groups),
        rows=tuple(rows),
        groups=groups,
        skew=tuple(_skews(list(read.values()), labels)),
        notes=tuple(notes),
    )


def representatives(report: FleetReport) -> tuple[str, ...]:
    """Return the paths of the ranks to test recommendations on: one from each group."""
    worst = sorted(report.groups, key=lambda g: (not g.n_failed, not g.is_odd, g.id.rjust(8)))
    return tuple(g.representative for g in worst[:_MAX_REPRESENTATIVES])


def _groups(read: Members, labels: Mapping[str, str]) -> tuple[RankGroup, ...]:
    position = {path: i for i, path in enumerate(read)}
    found = [tuple(sorted(g, key=position.__getitem__)) for g in find_groups([*read.values()])]
    found.sort(key=lambda paths: (-len(paths), position[paths[0]]))
    typical = [typical_of([read[p] for p in paths]) for paths in found]
    is_odd = _oddness(found, typical, read)
    usual = [j for j, odd in enumerate(is_odd) if not odd]

    def reference(i: int) -> int | None:
        """Return the group to compare with: the nearest usual one if odd, else the largest."""
        if not is_odd[i]:
            return next((j for j in usual[:1] if j < i), None)
        return min(usual, key=lambda j: (_distance(typical[i], typical[j]), j), default=None)

    return tuple(
        _group(i, labels, typical, reference(i), is_odd=is_odd[i]) for i in range(len(found))
    )


def _oddness(
    found: Sequence[tuple[str, ...]], typical: Sequence[Typical], read: Members
) -> list[bool]:
    """Return whether each group is odd; at least one group is not."""
    if len(found) < 2:
        return [False] * len(found)
    least = max(MIN_GROUP, int(len(read) * MIN_GROUP_SHARE))
    fails = [any(read[p].has_failed for p in paths) for paths in found]
    few = sum(len(p) for p, bad in zip(found, fails, strict=True) if bad) * 2 <= len(read)
    odd = [len(paths) < least or (bad and few) for paths, bad in zip(found, fails, strict=True)]
    if not all(odd):
        return odd
    # If all differ, the failing ones are odd if most do not fail, else those with outlying peaks.
    if any(fails) and not all(fails) and few:
        return fails
    return _outliers(typical)


def _outliers(typical: Sequence[Typical]) -> list[bool]:
    """Return which peaks lie far from the median of all, measured by the median deviation."""
    known = [t.peak for t in typical if t.peak is not None]
    if len(known) <= MIN_GROUP:  # of two that differ, neither is the usual one
        return [False] * len(typical)
    middle = statistics.median(known)
    allowed = max(0.05 * middle, 5 * 1.4826 * statistics.median(abs(k - middle) for k in known))
    return [t.peak is not None and abs(t.peak - middle) > allowed for t in typical]


def _group(
    i: int,
    labels: Mapping[str, str],
    typical: Sequence[Typical],
    reference: int | None,
    *,
    is_odd: bool,
) -> RankGroup:
    members = typical[i].members
    peaks = [r.peak_bytes for r in members if r.peak_bytes is not None]
    # The member whose peak is nearest to the median; the first by path if several are.
    middle = median_of([r.peak_bytes or 0 for r in members])
    chosen = min(members, key=lambda r: (abs((r.peak_bytes or 0) - middle), r.path))
    compared = typical[reference] if reference is not None else None
    return RankGroup(
        id=group_id(i),
        paths=tuple(r.path for r in members),
        labels=tuple(labels[r.path] for r in members),
        cause=chosen.cause,
        summary=chosen.summary,
        n_failed=sum(r.has_failed for r in members),
        median_peak_bytes=median_or_none(peaks),
        min_peak_bytes=min(peaks, default=None),
        max_peak_bytes=max(peaks, default=None),
        settings=chosen.settings,
        holders=_typical_lines(typical[i]),
        is_odd=is_odd,
        reference="" if reference is None else group_id(reference),
        differences=() if compared is None else differences(members, compared),
        representative=chosen.path,
        advice=chosen.advice,
    )


def _distance(a: Typical, b: Typical) -> int:
    keys = a.lines.keys() | b.lines.keys()
    return sum(abs(a.lines.get(k, 0) - b.lines.get(k, 0)) for k in keys)


def _typical_lines(typical: Typical) -> tuple[SourceLine, ...]:
    largest = sorted(typical.lines, key=lambda k: (-typical.lines[k], k))[:_MAX_GROUP_LINES]
    return tuple(
        replace(typical.places[k], n_bytes=typical.lines[k])
        for k in largest
        if typical.lines[k] > 0
    )


def group_id(i: int) -> str:
    """Return ``A`` .. ``Z``, ``AA`` .. for 0, 1, ..."""
    name = ""
    i += 1
    while i:
        i, letter = divmod(i - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def _skews(ranks: Sequence[RankSummary], labels: Mapping[str, str]) -> Iterator[Skew]:
    for name in SKEWED:
        is_peak = name == "peak_allocated_bytes"  # or the nearest figure that the input has
        figures = ((r.peak_bytes if is_peak else r.figure(name), r) for r in ranks)
        known = [(value, r) for value, r in figures if value is not None]
        if not known:
            continue
        values = [value for value, _ in known]
        middle, highest = median_of(values), max(values)
        first = known[values.index(highest)][1]
        yield Skew(
            name=name,
            n=len(values),
            minimum=min(values),
            median=middle,
            maximum=highest,
            over_median=highest / middle if middle else None,
            path=first.path,
            label=labels[first.path],
            n_highest=values.count(highest),
        )
