"""Words that the reports of many ranks share. Everything here is raw text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.finding import Location
from fragdoctor.model.fleet import FleetReport, RankAdvice, RankGroup, RankSummary, Skew, SourceLine
from fragdoctor.report.phrases import CAUSE_TITLES, METHOD_TITLES, location_text
from fragdoctor.units import format_count, format_size, plural

SKEW_TITLES: Final = {
    "peak_allocated_bytes": "peak live",
    "peak_reserved_bytes": "peak reserved",
    "pinned_free_bytes": "pinned",
    "alloc_retries": "retries",
}
_MAX_LABEL: Final = 24
_NUMBERED: Final = re.compile(r"rank (\d+)")


def title(report: FleetReport) -> str:
    """Return the verdict of the job in a few words."""
    verdict = report.verdict
    cause = CAUSE_TITLES[verdict.cause]
    n_odd = len(verdict.odd)
    if n_odd == 1 and len(verdict.odd[0]) <= _MAX_LABEL:
        return f"{cause}; {verdict.odd[0]} is odd"
    if n_odd:
        return f"{cause}; {plural(n_odd, 'rank')} {'is' if n_odd == 1 else 'are'} odd"
    return cause


def verdict_line(report: FleetReport) -> str:
    """Return the verdict in one line: what ``--quiet`` prints."""
    return f"{CAUSE_TITLES[report.verdict.cause]}, {counts(report)}: {report.verdict.summary}"


def counts(report: FleetReport) -> str:
    """Return the ranks in numbers: how many, how many failed, how many could not be read."""
    v = report.verdict
    parts = [plural(v.n_ranks, "rank")]
    if v.n_failed:
        parts.append(f"{format_count(v.n_failed)} out of memory")
    if v.n_read < v.n_ranks:
        parts.append(f"{format_count(v.n_ranks - v.n_read)} unread")
    return ", ".join(parts)


def line_text(line: SourceLine) -> str:
    """Return a line of the program as other reports write it."""
    place = Location(line.filename, line.line, line.function) if line.filename else None
    return location_text(place)


def bytes_text(n_bytes: int | None) -> str:
    """Return a size, or a dash for what is not known."""
    return "-" if n_bytes is None else format_size(n_bytes)


def count_text(n: int | None) -> str:
    """Return a number, or a dash for what is not known."""
    return "-" if n is None else format_count(n)


def skew_cells(skew: Skew) -> tuple[str, str, str, str, str]:
    """Return title, median, maximum, their ratio and the rank of the maximum."""
    text = bytes_text if skew.name.endswith("_bytes") else count_text
    ratio = "-" if skew.over_median is None else f"{skew.over_median:.2f}"
    more = f" and {format_count(skew.n_highest - 1)} more" if skew.n_highest > 1 else ""
    return (
        SKEW_TITLES.get(skew.name, skew.name),
        text(skew.median),
        text(skew.maximum),
        ratio,
        "all the same" if skew.minimum == skew.maximum else f"{skew.label}{more}",
    )


def members_text(labels: Sequence[str], limit: int = 12) -> str:
    """Return labels with runs of ranks joined: ``0-4, 6, 7``; at most ``limit`` runs."""
    numbers, names = [], []
    for label in labels:
        match = _NUMBERED.fullmatch(label)
        if match:
            numbers.append(int(match.group(1)))
        else:
            names.append(label)
    parts = [*_runs(sorted(numbers)), *names]
    if len(parts) > limit:
        parts = [*parts[:limit], f"{format_count(len(parts) - limit)} more"]
    return ", ".join(parts)


def whom_text(labels: Sequence[str]) -> str:
    """Return for whom something is: ``rank 5``, or ``ranks 0-3``."""
    if len(labels) == 1:
        return labels[0]
    lead = "ranks " if all(_NUMBERED.fullmatch(label) for label in labels) else ""
    return f"{lead}{members_text(labels)}"


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(str(n) for n in run) for run in runs
    ]


def peaks_text(group: RankGroup) -> str:
    """Return the peak of a group; its range where it is wide."""
    low, high = group.min_peak_bytes, group.max_peak_bytes
    if low is None or high is None:
        return "-"
    if high - low <= 0.01 * high:
        return bytes_text(group.median_peak_bytes)
    return f"{format_size(low)} to {format_size(high)}"


def rank_title(rank: RankSummary) -> str:
    """Return the verdict of one rank in a few words."""
    return CAUSE_TITLES[rank.cause] if rank.is_read else "Not read"


def figure(rank: RankSummary, name: str) -> int | None:
    """Return one of the device figures of a rank."""
    value: int | None = None if rank.figures is None else getattr(rank.figures, name)
    return value


@dataclass(frozen=True, slots=True)
class GroupAdvice:
    """One piece of advice, and for whom it is."""

    advice: RankAdvice
    labels: tuple[str, ...]
    proof: str


def advice_of(report: FleetReport) -> list[GroupAdvice]:
    """Return what to do, each advice once: for ranks that are not well, the failing first."""
    found: dict[tuple[str, str, str, str], GroupAdvice] = {}
    unwell = [g for g in report.groups if g.n_failed or g.cause not in ("healthy", "not_memory")]
    for g in sorted(unwell, key=lambda g: not g.n_failed):
        a = g.advice
        if a is None:
            continue
        key = (a.title, a.setting, a.change, _proof(a))
        known = found.get(key)
        labels = (*(known.labels if known else ()), *g.labels)
        found[key] = GroupAdvice(a, labels, _proof(a))
    return list(found.values())


def _proof(advice: RankAdvice) -> str:
    method = METHOD_TITLES.get(advice.method, "")
    if not method:
        return "not tested"
    outcome = "" if advice.fits is None else "fits" if advice.fits else "still runs out of memory"
    return f"{outcome}, {method}" if outcome else method
