"""The report of many ranks at a terminal: the verdict, groups, odd ranks in full, then the table.

A thousand ranks must not flood it: the table is printed for a few ranks or with ``--verbose``.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.model.fleet import FleetReport, OddRank, RankGroup, RankRow
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.fleet.phrases import (
    advice_of,
    bytes_text,
    count_text,
    counts,
    figure,
    line_text,
    members_text,
    peaks_text,
    rank_title,
    skew_cells,
    title,
    verdict_line,
    whom_text,
)
from fragdoctor.report.phrases import CAUSE_TITLES
from fragdoctor.report.text.page import INDENT, Cell, Column, Page
from fragdoctor.report.text.verdict import verdict_style
from fragdoctor.units import format_count, format_size, plural

MAX_TABLE: Final = 16
_MAX_GROUPS: Final = 8
_MAX_ODD: Final = 6
_MAX_UNREAD: Final = 5
_MAX_DIFFERENCES: Final = 5
_MAX_HOLDERS: Final = 3
_BAR: Final = 10
_SHORT_LABEL: Final = 10


def render_fleet(report: FleetReport, options: RenderOptions) -> str:
    """Return the report as text; with ``Verbosity.QUIET`` the verdict in one line."""
    if options.verbosity is Verbosity.QUIET:
        return f"{escape.terminal(verdict_line(report))}\n"
    page = Page(options)
    page.paragraph(
        [(title(report), verdict_style(report.verdict.cause)), (f"  {counts(report)}", "dim")],
        indent=0,
    )
    page.paragraph(report.verdict.summary, indent=0)
    _write_skew(page, report)
    _write_groups(page, report)
    _write_odd(page, report)
    _write_advice(page, report)
    _write_table(page, report)
    _write_unread(page, report)
    _write_notes(page, report)
    return page.render()


def _is_verbose(page: Page) -> bool:
    return page.options.verbosity is Verbosity.VERBOSE


def _write_skew(page: Page, report: FleetReport) -> None:
    if not report.skew or report.verdict.n_read < 2:
        return
    page.heading("Skew", "how evenly the ranks share the memory")
    columns = [
        Column(),
        Column(title="median", align="right"),
        Column(title="highest", align="right"),
        Column(title="ratio", align="right"),
        Column("path", title="of"),
    ]
    page.table(columns, [list(skew_cells(s)) for s in report.skew])


def _write_groups(page: Page, report: FleetReport) -> None:
    if not report.groups or report.verdict.n_read < 2:
        return
    page.heading("Groups", "ranks that are alike: verdict, settings, and what holds memory")
    shown = report.groups if _is_verbose(page) else report.groups[:_MAX_GROUPS]
    columns = [
        Column(),
        Column(title="ranks", align="right"),
        Column(title="peak", max_width=26),
        Column(title="verdict", max_width=24),
        Column("list", title="which"),
    ]
    page.table(
        columns,
        [_group_row(g) for g in shown],
        below=[_group_lines(g, verbose=_is_verbose(page)) for g in shown],
    )
    _write_rest(page, len(report.groups) - len(shown))


def _group_row(group: RankGroup) -> list[Cell]:
    return [
        (group.id, "bold yellow" if group.is_odd else "bold"),
        format_count(len(group.paths)),
        peaks_text(group),
        CAUSE_TITLES[group.cause],
        [members_text(group.labels), *([("  odd", "yellow")] if group.is_odd else [])],
    ]


def _group_lines(group: RankGroup, *, verbose: bool) -> list[Cell]:
    """Return what sets a usual group apart from group A, or what holds the memory of the first."""
    if group.is_odd and not verbose:
        return []  # told in full below
    if group.reference and group.differences:
        told = "; ".join(d.text for d in group.differences[:2])
        return [(f"against group {group.reference}: {told}", "dim")]
    held = ", ".join(
        f"{format_size(h.n_bytes)} {line_text(h)}" for h in group.holders[: 1 if not verbose else 5]
    )
    return [(f"most: {held}", "dim")] if held else []


def _write_odd(page: Page, report: FleetReport) -> None:
    if not report.odd:
        return
    page.heading("Odd ranks", "and what sets them apart, the weightiest first")
    rows = {row.rank.path: row for row in report.rows}
    shown = report.odd if _is_verbose(page) else report.odd[:_MAX_ODD]
    for i, odd in enumerate(shown):
        if i:
            page.blank()
        _write_one_odd(page, odd, rows[odd.path])
    _write_rest(page, len(report.odd) - len(shown))


def _write_one_odd(page: Page, odd: OddRank, row: RankRow) -> None:
    rank = row.rank
    against = f"  against group {odd.reference}" if odd.reference else ""
    head = f"{rank_title(rank)}, peak {bytes_text(rank.peak_bytes)}"
    page.paragraph([(odd.label, "bold"), f"  {head}", (against, "dim")], indent=INDENT)
    shown = odd.differences if _is_verbose(page) else odd.differences[:_MAX_DIFFERENCES]
    for difference in shown:
        page.labelled("-", difference.text, indent=2 * INDENT, label_width=2)
    if rank.has_failed and rank.summary:
        page.labelled("-", rank.summary, indent=2 * INDENT, label_width=2)
    page.labelled(("file", "dim"), rank.path, indent=2 * INDENT, label_width=6, path=True)


def _write_advice(page: Page, report: FleetReport) -> None:
    advice = advice_of(report)
    if not advice:
        return
    page.heading("What to do", "tested on one rank of each group")
    for one in advice if _is_verbose(page) else advice[:_MAX_DIFFERENCES]:
        page.labelled("-", [(one.advice.title, "bold")], indent=INDENT, label_width=2)
        if one.advice.setting:
            page.verbatim((one.advice.setting, "bold cyan"), indent=2 * INDENT)
        if one.advice.change:
            page.paragraph((one.advice.change, "cyan"), indent=2 * INDENT)
        page.paragraph((f"for {whom_text(one.labels)}; {one.proof}", "dim"), indent=2 * INDENT)


def _write_table(page: Page, report: FleetReport) -> None:
    rows = report.rows
    if len(rows) > MAX_TABLE and not _is_verbose(page):
        page.blank()
        page.paragraph((f"All {format_count(len(rows))} ranks one by one: --verbose", "dim"))
        return
    page.heading("Ranks")
    highest = max((row.rank.peak_bytes or 0 for row in rows), default=0)
    wide = page.width >= 100
    # Long names need the room; what is reserved is told least of all.
    with_reserved = wide or max(len(row.label) for row in rows) <= _SHORT_LABEL
    columns = [
        Column("path", max_width=28),
        Column(title="group"),
        Column(title="verdict", max_width=24),
        Column(title="peak", align="right"),
        *([Column()] if wide else []),
        *([Column(title="reserved", align="right")] if with_reserved else []),
        Column(title="pinned", align="right"),
        Column(title="retries", align="right"),
    ]
    page.table(
        columns,
        [_rank_row(page, row, highest, wide=wide, with_reserved=with_reserved) for row in rows],
    )


def _rank_row(
    page: Page, row: RankRow, highest: int, *, wide: bool, with_reserved: bool
) -> list[Cell]:
    rank = row.rank
    style = "bold yellow" if row.is_odd else ""
    bar: list[Cell] = [(_bar(page, rank.peak_bytes, highest), "cyan")] if wide else []
    return [
        (row.label, style),
        row.group,
        rank_title(rank),
        bytes_text(rank.peak_bytes),
        *bar,
        *([bytes_text(figure(rank, "peak_reserved_bytes"))] if with_reserved else []),
        bytes_text(figure(rank, "pinned_free_bytes")),
        count_text(figure(rank, "alloc_retries")),
    ]


def _bar(page: Page, n_bytes: int | None, highest: int) -> str:
    if n_bytes is None or highest <= 0:
        return ""
    n = round(_BAR * n_bytes / highest)
    return page.glyphs.live * n + page.glyphs.free * (_BAR - n)


def _write_unread(page: Page, report: FleetReport) -> None:
    unread = [row for row in report.rows if not row.rank.is_read]
    if not unread:
        return
    page.heading("Not read", plural(len(unread), "rank"))
    shown = unread if _is_verbose(page) else unread[:_MAX_UNREAD]
    width = min(24, max(len(row.label) for row in shown) + 2)
    for row in shown:
        page.labelled(row.label, row.rank.error, indent=INDENT, label_width=width)
    _write_rest(page, len(unread) - len(shown))


def _write_notes(page: Page, report: FleetReport) -> None:
    if not report.notes:
        return
    page.heading("Notes")
    for note in report.notes:
        page.labelled("-", note, indent=INDENT, label_width=2)


def _write_rest(page: Page, n_more: int) -> None:
    if n_more > 0:
        page.paragraph((f"{format_count(n_more)} more with --verbose", "dim"), indent=INDENT)
