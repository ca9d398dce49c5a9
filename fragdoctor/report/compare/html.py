"""The comparison as one page that needs nothing else: no network, no script at all.

Text of the inputs reaches the markup through ``escape.visible`` and Jinja2's autoescape only; the
policy allows the page's own style, by hash, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from fragdoctor.gate.judgement import Growth
from fragdoctor.model.comparison import Comparison
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.compare import phrases
from fragdoctor.report.compare.chart import timeline_chart, trend_chart
from fragdoctor.report.page.shell import page_environment, page_policy, page_source
from fragdoctor.report.phrases import location_text

MAX_LINES: Final = 120
MAX_TREND_LINES: Final = 40
MAX_RUNS: Final = 400


def render_comparison(
    comparison: Comparison,
    judged: Sequence[Growth],
    options: RenderOptions,
) -> str:
    """Return the page; the options are those of text and change nothing here."""
    del options
    environment = page_environment()
    environment.filters |= {
        "path": Markup,  # coordinates only; a path is longer than text may be
        "signed": phrases.signed,
        "place": phrases.line_place,
        "location": location_text,
        "sizes": phrases.sizes_text,
        "blocks": phrases.blocks_text,
        "run_title": phrases.run_title,
        "run_name": phrases.run_name,
        "run_facts": phrases.run_facts,
        "change": phrases.change_text,
    }
    environment.globals["value_text"] = phrases.value_text
    environment.globals["share_text"] = phrases.share_text
    style = page_source("report/report.css") + page_source("compare/compare.css")
    headline, stop, rest = comparison.summary.partition(". ")
    changed = [c for c in comparison.lines if phrases.is_shown(c)]
    return (
        environment.get_template("compare.html.j2").render(
            style=Markup(style),  # noqa: S704 - our own files
            policy=page_policy(style),
            c=comparison,
            headline=headline + stop.rstrip(),
            rest=rest,
            figures=phrases.distinct_figures(comparison),
            judged=judged,
            first=comparison.runs[0],
            last=comparison.runs[-1],
            lines=changed[:MAX_LINES],
            n_more=max(0, len(changed) - MAX_LINES) + comparison.n_lines_left_out,
            largest=max((abs(x.delta_bytes) for x in changed), default=0) or 1,
            runs=comparison.runs[:MAX_RUNS],
            n_more_runs=max(0, len(comparison.runs) - MAX_RUNS),
            chart=timeline_chart(comparison),
            trend_chart=None if comparison.trend is None else trend_chart(comparison.trend),
            trend_lines=()
            if comparison.trend is None
            else comparison.trend.lines[:MAX_TREND_LINES],
            basis=phrases.BASIS_TITLES[comparison.basis],
            reason_titles=phrases.REASON_TITLES,
            versions=phrases.versions_text(comparison),
            explained=phrases.explained_text(comparison),
            unseen=phrases.unseen_text(comparison),
            no_stack=phrases.NO_STACK,
        )
        + "\n"
    )
