"""Draws conclusions from summaries: groups, odd ranks, skew, and one verdict for the job."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.fleet.groups import (
    Typical,
    differences,
    find_groups,
    median_of,
    typical_of,
)
from fragdoctor.model.diagnosis import SOUND, Cause
from fragdoctor.model.finding import told_apart
from fragdoctor.model.fleet import (
    SKEWED,
    DifferenceKind,
    FleetReport,
    FleetSummary,
    JobVerdict,
    RankGroup,
    RankRow,
    RankSummary,
    Skew,
    SourceLine,
    ranks_text,
)
from fragdoctor.units import format_count, format_size, plural


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
        RankRow(labels[r.path], group.id if group else "", bool(group and group.is_odd), r)
        for r in ranks
        for group in [group_of.get(r.path)]
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
    found = [sorted(g, key=position.__getitem__) for g in find_groups([*read.values()])]
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
    found: Sequence[Sequence[str]], typical: Sequence[Typical], read: Members
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
        median_peak_bytes=typical[i].peak,
        min_peak_bytes=min(peaks, default=None),
        max_peak_bytes=max(peaks, default=None),
        settings=chosen.settings,
        holders=_typical_lines(typical[i]),
        is_odd=is_odd,
        reference="" if reference is None else group_id(reference),
        differences=() if compared is None else differences(typical[i], compared),
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


# Microseconds since 1970 are at least this large; smaller times are from a machine's own clock.
_WALL_CLOCK_US: Final = 10**15
_MAX_GROUPS: Final = 3


def job_verdict(rows: Sequence[RankRow], groups: Sequence[RankGroup]) -> JobVerdict:
    """Return the verdict for the job in one to three sentences."""
    odd = [row for row in rows if row.is_odd]
    read = [row for row in rows if row.rank.is_read]
    failed = [row for row in read if row.rank.has_failed]
    first = first_failed(failed)
    sentences = _odd_sentences(odd, groups)
    if failed:
        sentences += _failing(read, failed, odd, first)
    elif odd:
        sentences.append("No rank ran out of memory.")
    rest = [row for row in read if not row.is_odd and not row.rank.has_failed]
    sentences += _others(read, rest, groups)
    if len(read) < len(rows):
        sentences.append(f"{plural(len(rows) - len(read), 'rank')} could not be read.")
    return JobVerdict(
        cause=_cause(read, failed, odd, first),
        summary=" ".join(sentences),
        n_ranks=len(rows),
        n_read=len(read),
        n_failed=len(failed),
        first_failed=first.label if first is not None else "",
        odd=tuple(o.label for o in odd),
        failed=tuple(row.label for row in failed),
    )


def first_failed(failed: Sequence[RankRow]) -> RankRow | None:
    """Return the rank that ran out of memory first, or None if their clocks do not show it."""
    if len(failed) == 1:
        return failed[0]
    times = [row.rank.failed_us for row in failed]
    if not times or any(t is None or t < _WALL_CLOCK_US for t in times):
        return None
    earliest = min(t for t in times if t is not None)
    firsts = [row for row in failed if row.rank.failed_us == earliest]
    return firsts[0] if len(firsts) == 1 else None


def _cause(
    read: Sequence[RankRow],
    failed: Sequence[RankRow],
    odd: Sequence[RankRow],
    first: RankRow | None,
) -> Cause:
    if first is not None:
        return first.rank.cause
    unwell = [row for row in read if row.rank.cause not in SOUND]
    among = failed or [row for row in unwell if row.is_odd] or unwell or read
    if not among:
        return Cause.UNKNOWN
    if odd and not failed and not any(row.is_odd for row in unwell) and len(unwell) * 2 < len(read):
        return Cause.HEALTHY
    counts = Counter(row.rank.cause for row in among)
    return min(counts, key=lambda c: (-counts[c], c.value))


def _odd_sentences(odd: Sequence[RankRow], groups: Sequence[RankGroup]) -> list[str]:
    """Return a sentence for each group of odd ranks, for the first few groups."""
    unusual = [g for g in groups if g.is_odd]
    said = []
    for g in unusual[:_MAX_GROUPS]:
        verb = "is" if len(g.labels) == 1 else "are"
        said.append(f"{_capital(ranks_text(g.labels))} {verb} odd: {_reasons(g)}.")
    n_more = len(odd) - sum(len(g.labels) for g in unusual[:_MAX_GROUPS])
    if n_more:
        said.append(f"{plural(n_more, 'rank')} more {'is' if n_more == 1 else 'are'} odd.")
    return said


def _reasons(group: RankGroup) -> str:
    """Return the weightiest difference in words, with a setting and the verdict if they differ."""
    differences = group.differences
    if not differences:
        return "its memory is unlike that of any other rank"
    lead = differences[0]
    if group.n_failed and lead.kind is DifferenceKind.VERDICT:  # last kind: nothing else differs
        return "it fails with the same memory as the others"
    parts = [lead.text]
    # A sentence of its own says that it fails.
    kinds = (DifferenceKind.SETTING, *(() if group.n_failed else (DifferenceKind.VERDICT,)))
    for kind in kinds:
        parts += [d.text for d in differences[1:] if d.kind is kind][:1]
    return "; ".join(parts)


def _failing(
    read: Sequence[RankRow],
    failed: Sequence[RankRow],
    odd: Sequence[RankRow],
    first: RankRow | None,
) -> list[str]:
    n, labels = len(failed), [row.label for row in failed]
    if n == len(read):
        who = "All of them" if odd else _all(n)
        said = [f"{who} run out of memory." if n > 1 else "It runs out of memory."]
    elif n == 1 and len(odd) == 1 and odd[0].label == labels[0]:
        others = "the other does not" if len(read) == 2 else "the others do not"
        return [f"It runs out of memory, {others}."]
    else:
        verb = "runs" if n == 1 else "run"
        of = "" if n == 1 else f", {format_count(n)} of {format_count(len(read))},"
        said = [f"{_capital(ranks_text(labels))}{of} {verb} out of memory."]
    if first is not None and n > 1:
        said.append(f"The first is {first.label}: {first.rank.summary}")
    elif not odd:
        said.append(failed[0].rank.summary)
    return said


def _others(
    read: Sequence[RankRow], rest: Sequence[RankRow], groups: Sequence[RankGroup]
) -> list[str]:
    if not rest:
        return []
    n, everyone = len(rest), len(rest) == len(read)
    unwell = Counter(row.rank.cause for row in rest if row.rank.cause not in SOUND)
    usual = [g for g in groups if not g.is_odd and not g.n_failed]
    who = _all(n) if everyone else "The other rank" if n == 1 else f"The {format_count(n)} others"
    verb = "is" if n == 1 else "are"
    if unwell:
        worst = min(unwell, key=lambda c: (-unwell[c], c.value))
        shows = "shows" if unwell[worst] == 1 else "show"
        what = worst.value.replace("_", " ")
        if n == 1:
            return [f"{who} shows: {what}."]
        did = "No rank ran" if everyone else f"{who} did not run"
        count = "each" if unwell[worst] == n else format_count(unwell[worst])
        return [f"{did} out of memory, but {count} of them {shows}: {what}."]
    peaks = _peaks(usual)
    parts = _differing(usual) if everyone else []
    if parts and n == len(usual):
        return [f"{who} are healthy{peaks}.", *parts]
    if len(usual) > 1:
        n_groups = format_count(len(usual))
        alike = f"{who} {verb} healthy, in {n_groups} groups of ranks that are alike{peaks}."
        return [alike, *parts]
    alike = " and alike" if n > 1 else ""
    return [f"{who} {verb} healthy{alike}{peaks}."]


def _differing(usual: Sequence[RankGroup]) -> list[str]:
    """Return how two groups of equal size differ: neither is known to be the odd one."""
    if len(usual) != 2 or len(usual[0].labels) != len(usual[1].labels):
        return []
    first, second = (ranks_text(g.labels) for g in usual)
    if len(usual[0].labels) == 1:
        lead = "They differ, and neither is odd"
    else:
        lead = "Two groups of equal size differ, and neither is odd"
    return [f"{lead}: {second} against {first}: {_reasons(usual[1])}."]


def _peaks(groups: Sequence[RankGroup]) -> str:
    low = min((g.min_peak_bytes for g in groups if g.min_peak_bytes is not None), default=None)
    high = max((g.max_peak_bytes for g in groups if g.max_peak_bytes is not None), default=None)
    if low is None or high is None:
        return ""
    if format_size(low) == format_size(high):
        return f", with a peak of {format_size(high)}"
    return f", with peaks of {format_size(low)} to {format_size(high)}"


def _all(n: int) -> str:
    return "The rank" if n == 1 else "Both ranks" if n == 2 else f"All {format_count(n)} ranks"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith(("rank", "host")) else text
