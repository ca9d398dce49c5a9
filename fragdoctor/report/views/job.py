"""What ``fragdoctor analyze`` says about a job: groups of ranks, odd ranks, advice, the table.

A thousand ranks must not flood a terminal: the short report has the table only for a few ranks.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import SOUND, Recommendation
from fragdoctor.model.fleet import (
    SKEWED,
    FleetReport,
    RankGroup,
    RankRow,
    RankSummary,
    Skew,
    members,
    ranks_text,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Span, Style, code, dim, location_text, strong
from fragdoctor.report.views.advice import command
from fragdoctor.report.words import CAUSE_TITLES, METHOD_TITLES, cause_style
from fragdoctor.units import format_count, format_size, plural

MAX_TABLE: Final = 16
"""The most ranks for which the short report includes the table."""

MAX_ROWS: Final = 5000
"""The most rows of the table: nobody reads more, and JSON has them all."""

_SHORT_GROUPS: Final = 8
_SHORT_ODD: Final = 6
_SHORT_UNREAD: Final = 5
_SHORT_DIFFERENCES: Final = 5
_MAX_GROUPS: Final = 50
_MAX_LABEL: Final = 24


def document(report: FleetReport) -> doc.ReportDocument:
    """Return the conclusions about the ranks of a job."""
    tone = cause_style(report.verdict.cause)
    return doc.ReportDocument(
        title=title(report),
        headline=[Span(title(report), tone), dim(f"  {counts(report)}")],
        brief=[verdict_line(report)],
        lead=[doc.Paragraph(report.verdict.summary)],
        sections=[
            _advice(report),
            _skew(report),
            _groups(report),
            _odd(report),
            _table(report),
            _unread(report),
            doc.Section("Notes", [doc.Bullets(list(report.notes))], id="notes"),
        ],
        tone=tone,
        kicker="the ranks of one job",
    )


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
    """Return the verdict in one line, as ``--quiet`` prints it."""
    return f"{CAUSE_TITLES[report.verdict.cause]}, {counts(report)}: {report.verdict.summary}"


def counts(report: FleetReport) -> str:
    """Return how many ranks there are, how many failed, and how many could not be read."""
    v = report.verdict
    failed = f", {format_count(v.n_failed)} out of memory" if v.n_failed else ""
    n_unread = v.n_ranks - v.n_read
    unread = f", {format_count(n_unread)} unread" if n_unread > 0 else ""
    return f"{plural(v.n_ranks, 'rank')}{failed}{unread}"


def _advice(report: FleetReport) -> doc.Section:
    items = [
        doc.ListItem(
            strong(one.title),
            (
                doc.Code([command(one.setting)]),
                doc.Paragraph(code(one.change)),
                doc.Paragraph(dim(f"for {ranks_text(labels, 12)}: {_proof(one)}")),
            ),
        )
        for one, labels in advice_of(report)
    ]
    listing = doc.Listing(items, _SHORT_DIFFERENCES)
    return doc.Section("What to do", [listing], "tested on one rank of each group", "advice")


def _skew(report: FleetReport) -> doc.Section:
    table = doc.tabled(
        report.skew if report.verdict.n_read > 1 else (),
        doc.Column("", lambda s: SKEWED[s.name]),
        doc.Column("median", lambda s: doc.written(s.median, s.name), "right"),
        doc.Column("highest", lambda s: doc.written(s.maximum, s.name), "right"),
        doc.Column("ratio", lambda s: f"{s.over_median:.2f}" if s.over_median else "-", "right"),
        doc.Column("of", _skewed, max_width=28),
    )
    return doc.Section("Skew", [table], "how evenly the ranks share the memory", "skew")


def _skewed(skew: Skew) -> str:
    more = f" and {format_count(skew.n_highest - 1)} more" if skew.n_highest > 1 else ""
    return "all the same" if skew.minimum == skew.maximum else f"{skew.label}{more}"


def _groups(report: FleetReport) -> doc.Section:
    highest = _highest(report)
    table = doc.tabled(
        report.groups[:_MAX_GROUPS],
        doc.Column("", lambda g: Span(g.id, Style.WARN if g.is_odd else Style.STRONG)),
        doc.Column("ranks", lambda g: format_count(len(g.paths)), "right"),
        doc.Column("peak", peaks_text, max_width=26),
        doc.Column("", lambda g: doc.Gauge((g.median_peak_bytes or 0) / highest), from_width=100),
        doc.Column("verdict", lambda g: CAUSE_TITLES[g.cause], max_width=24),
        doc.Column(
            "which",
            lambda g: [", ".join(members(g.labels, 12)), dim("  odd" if g.is_odd else "")],
            "list",
        ),
        notes=_group_notes,
        style=lambda g: Style.WARN if g.is_odd else None,
        shown=_SHORT_GROUPS,
        n_left_out=max(0, len(report.groups) - _MAX_GROUPS),
    )
    note = "ranks that are alike: verdict, settings, and what holds memory"
    return doc.Section("Groups", [table], note, "groups")


def _highest(report: FleetReport) -> int:
    return max((row.rank.peak_bytes or 0 for row in report.rows), default=0) or 1


def _group_notes(group: RankGroup) -> list[doc.Content]:
    if group.reference and group.differences and not group.is_odd:  # those have a section
        differences = "; ".join(d.text for d in group.differences[:2])
        return [dim(f"against group {group.reference}: {differences}")]
    held = ", ".join(
        f"{format_size(h.n_bytes)} {location_text(h.location)}" for h in group.holders[:2]
    )
    return [dim(f"most: {held}")] if held else []


def _odd(report: FleetReport) -> doc.Section:
    groups = {group.id: group for group in report.groups}
    items = [_odd_rank(row, groups[row.group]) for row in report.odd[:_MAX_GROUPS]]
    n_more = len(report.odd) - len(items)
    more = f"{format_count(n_more)} more with --format json" if n_more else ""
    listing = doc.Listing(items, _SHORT_ODD, is_airy=True)
    blocks = (listing, doc.Paragraph(more, detail=Detail.FULL))
    return doc.Section("Odd ranks", blocks, "and what sets them apart, most important first", "odd")


def _odd_rank(row: RankRow, group: RankGroup) -> doc.ListItem:
    rank = row.rank
    against = f"  against group {group.reference}" if group.reference else ""
    peak = f"  {rank_title(rank)}, peak {doc.size(rank.peak_bytes)}"
    lines = [d.text for d in group.differences[:_SHORT_DIFFERENCES]]
    if rank.has_failed and rank.summary:
        lines.append(rank.summary)
    blocks = (doc.Bullets(lines), doc.Facts([("file", code(rank.path))]))
    return doc.ListItem([strong(row.label), peak, dim(against)], blocks)


def _table(report: FleetReport) -> doc.Section:
    rows = list(report.rows)
    if len(rows) > MAX_ROWS:
        rows.sort(key=lambda row: not (row.is_odd or not row.rank.is_read))
    highest = _highest(report)
    is_short = len(rows) <= MAX_TABLE
    table = doc.tabled(
        rows[:MAX_ROWS],
        doc.Column("", "label", "path", max_width=28),
        doc.Column("group", "group"),
        doc.Column("verdict", lambda row: rank_title(row.rank), max_width=24),
        doc.Column("peak", "rank.peak_bytes"),
        doc.Column("", lambda r: doc.Gauge((r.rank.peak_bytes or 0) / highest), from_width=100),
        doc.Column("reserved", "rank.figures.peak_reserved_bytes", from_width=100),
        doc.Column("stranded", "rank.figures.stranded_free_bytes"),
        doc.Column("retries", "rank.figures.alloc_retries", "right"),
        style=lambda row: Style.WARN if row.is_odd else None,
        n_left_out=max(0, len(rows) - MAX_ROWS),
        detail=Detail.USUAL if is_short else Detail.FULL,
    )
    text = "" if is_short else f"All {format_count(len(rows))} ranks one by one: --full"
    return doc.Section("Ranks", [table, doc.Paragraph(dim(text), detail=Detail.SHORT)], id="ranks")


def _unread(report: FleetReport) -> doc.Section:
    unread = [row for row in report.rows if not row.rank.is_read]
    table = doc.tabled(
        unread,
        doc.Column("", "label", "path", max_width=28),
        doc.Column("", "rank.error", "wrap"),
        shown=_SHORT_UNREAD,
    )
    return doc.Section("Not read", [table], plural(len(unread), "rank"), "unread")


def peaks_text(group: RankGroup) -> str:
    """Return the peak of a group, or its range if the peaks differ much."""
    low, high = group.min_peak_bytes, group.max_peak_bytes
    if low is None or high is None:
        return "-"
    if high - low <= 0.01 * high:
        return doc.size(group.median_peak_bytes)
    return f"{format_size(low)} to {format_size(high)}"


def rank_title(rank: RankSummary) -> str:
    """Return the verdict of one rank in a few words."""
    return CAUSE_TITLES[rank.cause] if rank.is_read else "Not read"


def advice_of(report: FleetReport) -> list[tuple[Recommendation, list[str]]]:
    """Return each piece of advice once, with the ranks that it is for, failing ranks first."""
    found: dict[tuple[str, ...], tuple[Recommendation, list[str]]] = {}
    unwell = [g for g in report.groups if g.n_failed or g.cause not in SOUND]
    for g in sorted(unwell, key=lambda g: not g.n_failed):
        if (one := g.advice) is not None:
            key = (one.title, one.setting, one.change, _proof(one))
            found.setdefault(key, (one, []))[1].extend(g.labels)
    return list(found.values())


def _proof(advice: Recommendation) -> str:
    method = METHOD_TITLES.get(advice.predicted.method)
    return f"{advice.predicted.promise} ({method})" if method else "not tested"
