"""The report of many ranks as Markdown: for an issue, a pull request or a job summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from fragdoctor.model.fleet import FleetReport, OddRank, RankRow
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
from fragdoctor.units import format_count, format_size

_MAX_TABLE: Final = 64
_MAX_SHOWN: Final = 10

md = escape.markdown


def render_fleet(report: FleetReport, options: RenderOptions) -> str:
    """Return the report as GitHub-flavoured Markdown."""
    if options.verbosity is Verbosity.QUIET:
        return f"{md(verdict_line(report))}\n"
    verbose = options.verbosity is Verbosity.VERBOSE
    blocks = [
        f"## {md(title(report))}",
        f"{md(counts(report))}. {md(report.verdict.summary)}",
        *_section(
            "Skew",
            ("", "Median", "Highest", "Ratio", "Of"),
            [tuple(md(c) for c in skew_cells(s)) for s in report.skew],
        ),
        *_groups(report, verbose=verbose),
        *_odd(report, verbose=verbose),
        *_advice(report),
        *_ranks(report, verbose=verbose),
        *_unread(report, verbose=verbose),
        *(md(note) for note in report.notes),
    ]
    return "\n\n".join(blocks) + "\n"


def _groups(report: FleetReport, *, verbose: bool) -> list[str]:
    shown = report.groups if verbose else report.groups[:_MAX_SHOWN]
    rows = [
        (
            f"**{g.id}**" + (" odd" if g.is_odd else ""),
            format_count(len(g.paths)),
            md(peaks_text(g)),
            md(CAUSE_TITLES[g.cause]),
            md(members_text(g.labels)),
            "<br>".join(f"{format_size(h.n_bytes)} {_code(line_text(h))}" for h in g.holders[:2]),
        )
        for g in shown
    ]
    titles = ("", "Ranks", "Peak", "Verdict", "Which", "Held most by")
    return [*_section("Groups", titles, rows), *_more(len(report.groups) - len(shown))]


def _odd(report: FleetReport, *, verbose: bool) -> list[str]:
    if not report.odd:
        return []
    ranks = {row.rank.path: row for row in report.rows}
    shown = report.odd if verbose else report.odd[:_MAX_SHOWN]
    blocks = ["### Odd ranks", *(_one_odd(o, ranks[o.path]) for o in shown)]
    return [*blocks, *_more(len(report.odd) - len(shown))]


def _one_odd(odd: OddRank, row: RankRow) -> str:
    against = f", against group {odd.reference}" if odd.reference else ""
    peak = bytes_text(row.rank.peak_bytes)
    lines = [f"**{md(odd.label)}**: {md(rank_title(row.rank))}, peak {peak}{against}", ""]
    lines += [f"- {md(d.text)}" for d in odd.differences]
    if row.rank.has_failed and row.rank.summary:
        lines.append(f"- {md(row.rank.summary)}")
    lines.append(f"- file: {_code(odd.path, in_table=False)}")
    return "\n".join(lines)


def _advice(report: FleetReport) -> list[str]:
    advice = advice_of(report)
    if not advice:
        return []
    lines = []
    for one in advice:
        how = [_code(one.advice.setting, in_table=False)] if one.advice.setting else []
        how += [md(one.advice.change)] if one.advice.change else []
        whom = f"for {md(whom_text(one.labels))}; {md(one.proof)}"
        lines.append(f"- **{md(one.advice.title)}**: {'; '.join([*how, whom])}")
    return ["### What to do", "\n".join(lines)]


def _ranks(report: FleetReport, *, verbose: bool) -> list[str]:
    if len(report.rows) > _MAX_TABLE and not verbose:
        return []
    rows = [
        (
            md(row.label),
            row.group,
            md(rank_title(row.rank)),
            bytes_text(row.rank.peak_bytes),
            bytes_text(figure(row.rank, "peak_reserved_bytes")),
            bytes_text(figure(row.rank, "pinned_free_bytes")),
            count_text(figure(row.rank, "alloc_retries")),
        )
        for row in report.rows
    ]
    titles = ("Rank", "Group", "Verdict", "Peak", "Reserved", "Pinned", "Retries")
    return _section("Ranks", titles, rows)


def _unread(report: FleetReport, *, verbose: bool) -> list[str]:
    unread = [row for row in report.rows if not row.rank.is_read]
    if not unread:
        return []
    shown = unread if verbose else unread[:_MAX_SHOWN]
    lines = [f"- **{md(row.label)}**: {md(row.rank.error)}" for row in shown]
    return ["### Not read", "\n".join(lines), *_more(len(unread) - len(shown))]


def _section(heading: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return []
    head = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return [f"### {heading}", "\n".join([*head, *body])]


def _more(n: int) -> list[str]:
    return [f"{format_count(n)} more with --verbose"] if n > 0 else []


def _code(text: str, *, in_table: bool = True) -> str:
    return escape.markdown_code(text, in_table=in_table)
