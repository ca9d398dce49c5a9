"""The report of many ranks as one HTML file that needs nothing else: no script, no network.

The policy and the escaping are those of the page of one rank, see ``report.html``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from fragdoctor.model.fleet import FleetReport, RankRow
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.fleet import phrases
from fragdoctor.report.page.shell import page_environment, page_policy, page_source
from fragdoctor.report.phrases import CAUSE_TITLES, location_text

MAX_GROUPS: Final = 50
MAX_ODD: Final = 50
MAX_ROWS: Final = 5000
"""Rows of each table: beyond, a page is slower than anybody reads."""


def render_fleet(report: FleetReport, options: RenderOptions) -> str:
    """Return the page; the options are those of text and change nothing here."""
    del options
    env = page_environment()
    env.filters |= {
        "bytes": phrases.bytes_text,
        "figure": phrases.figure,
        "line": phrases.line_text,
        "location": location_text,
        "members": phrases.members_text,
        "number": phrases.count_text,
        "peaks": phrases.peaks_text,
        "rank_title": phrases.rank_title,
        "whom": phrases.whom_text,
    }
    style = page_source("report/report.css") + page_source("report/fleet.css")
    rows = {row.rank.path: row for row in report.rows}
    peaks = [row.rank.peak_bytes or 0 for row in report.rows]
    return env.get_template(
        "fleet.html.j2"
    ).render(
        report=report,
        style=Markup(style),  # noqa: S704 - our own file
        policy=page_policy(style),
        title=phrases.title(report),
        counts=phrases.counts(report),
        causes=CAUSE_TITLES,
        skew=[phrases.skew_cells(s) for s in report.skew],
        groups=report.groups[:MAX_GROUPS],
        odd=[(o, rows[o.path]) for o in report.odd[:MAX_ODD]],
        advice=phrases.advice_of(report),
        rows=_first(report.rows),
        highest=max(peaks, default=0),
    )


def _first(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the rows to show: all, or the odd and unread ones first where they are too many."""
    listed = list(rows)
    if len(listed) <= MAX_ROWS:
        return listed
    listed.sort(key=lambda row: not (row.is_odd or not row.rank.is_read))
    return listed[:MAX_ROWS]
