"""The comparison for a terminal: the answer, then runs, figures, lines, causes, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.gate.judgement import Growth
from fragdoctor.model.comparison import Comparison, LineChange, LineKind
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.compare.phrases import (
    BASIS_TITLES,
    NO_STACK,
    REASON_TITLES,
    blocks_text,
    change_text,
    distinct_figures,
    explained_text,
    file_name,
    is_shown,
    line_place,
    run_facts,
    run_name,
    run_title,
    share_text,
    signed,
    sizes_text,
    unseen_text,
    value_text,
    versions_text,
)
from fragdoctor.report.phrases import location_text
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_size, plural

MAX_LINES: Final = 12
MAX_RUNS_ACROSS: Final = 3
"""More runs stand below each other, not beside."""

WIDTH_OF_FIGURE: Final = 18

_COLORS: Final = {
    LineKind.NEW: "bold red",
    LineKind.GREW: "red",
    LineKind.SHRANK: "green",
    LineKind.GONE: "bold green",
    LineKind.SAME: "dim",
}
_MAIN: Final = ("peak_allocated", "allocated", "peak_reserved", "alloc_retries", "steps")


def render_comparison(
    comparison: Comparison, judged: Sequence[Growth], options: RenderOptions
) -> str:
    """Return the report; quiet is its first sentence, and the gate's."""
    if options.verbosity is Verbosity.QUIET:
        lines = [comparison.summary, *(g.text for g in judged if g.is_exceeded)]
        return "".join(f"{escape.terminal(line)}\n" for line in lines)
    page = Page(options)
    page.paragraph((comparison.summary, "bold"), indent=0)
    for growth in judged:
        page.paragraph((growth.text, "bold red" if growth.is_exceeded else "green"), indent=0)
    _write_runs(page, comparison)
    _write_figures(page, comparison)
    _write_trend(page, comparison)
    _write_causes(page, comparison)
    _write_lines(page, comparison)
    _write_settings(page, comparison)
    _write_phases(page, comparison)
    if comparison.notes:
        page.heading("About this comparison")
        for note in comparison.notes:
            page.labelled("-", note, indent=2, label_width=2)
    return page.render()


def _write_runs(page: Page, comparison: Comparison) -> None:
    page.heading("Runs")
    rows: list[list[Cell]] = [
        [(r.letter, "bold"), run_name(r), run_title(r), (run_facts(r), "dim")]
        for r in comparison.runs
    ]
    page.table(
        [Column(), Column("path"), Column("wrap"), Column("wrap")],
        rows,
    )
    if text := versions_text(comparison):
        page.paragraph((text, "dim"))


def _write_figures(page: Page, comparison: Comparison) -> None:
    runs, figures = comparison.runs, distinct_figures(comparison)
    if not figures:
        return
    page.heading("Figures")
    if len(runs) > MAX_RUNS_ACROSS:
        _write_figures_down(page, comparison)
        return
    verbose = page.options.verbosity is Verbosity.VERBOSE
    shown = [f for f in figures if verbose or f.delta or f.id in _MAIN]
    page.table(
        [
            Column(title="figure"),
            *(Column(title=r.letter, align="right") for r in runs),
            Column("wrap", title="change"),
        ],
        [[f.title, *(value_text(f, v) for v in f.values), change_text(f)] for f in shown],
    )


def _write_figures_down(page: Page, comparison: Comparison) -> None:
    """Write a row a run: as many figures as matter."""
    known = [f for f in (comparison.figure(name) for name in _MAIN) if f is not None]
    figures = known[: max(2, page.width // WIDTH_OF_FIGURE)]
    page.table(
        [Column(title="run"), *(Column(title=f.title, align="right") for f in figures)],
        [
            [(r.letter, "bold"), *(value_text(f, f.values[i]) for f in figures)]
            for i, r in enumerate(comparison.runs)
        ],
    )


def _write_trend(page: Page, comparison: Comparison) -> None:
    trend = comparison.trend
    if trend is None or not trend.lines:
        return
    page.heading("Growing lines", f"per {trend.unit}, over {plural(len(trend.values), 'run')}")
    page.table(
        [
            Column(title="slope", align="right"),
            Column(title="first", align="right"),
            Column(title="last", align="right"),
            Column("path", title="line"),
        ],
        [
            [
                signed(t.slope_bytes),
                format_size(t.values[0]),
                format_size(t.values[-1]),
                location_text(t.place, absent=NO_STACK),
            ]
            for t in trend.lines[:MAX_LINES]
        ],
    )


def _write_causes(page: Page, comparison: Comparison) -> None:
    if not comparison.causes:
        return
    page.heading("What did it")
    width = max(len(c.confidence) for c in comparison.causes) + 2
    for cause in comparison.causes:
        page.labelled((cause.confidence.value, "bold"), cause.text, indent=2, label_width=width)


def _write_lines(page: Page, comparison: Comparison) -> None:
    verbose = page.options.verbosity is Verbosity.VERBOSE
    changed = [
        c for c in comparison.lines if is_shown(c) or (verbose and c.kind is not LineKind.SAME)
    ]
    if not changed:
        return
    first, last = comparison.runs[0].letter, comparison.runs[-1].letter
    page.heading("Lines", BASIS_TITLES[comparison.basis])
    shown = changed if verbose else changed[:MAX_LINES]
    page.table(
        [
            Column(title="change", align="right"),
            Column(title=first, align="right"),
            Column(title=last, align="right"),
            Column(title="blocks"),
            Column("path", title="line"),
        ],
        [_line_row(c) for c in shown],
        below=[_below(c, verbose=verbose) for c in shown],
    )
    more = len(changed) - len(shown) + comparison.n_lines_left_out
    if more > 0:
        page.paragraph((f"{plural(more, 'more line')}; with --verbose", "dim"))
    for text in (explained_text(comparison), "" if verbose else unseen_text(comparison)):
        if text:
            page.paragraph(text)
    parts = [
        f"{REASON_TITLES[r.kind]} {signed(r.delta_bytes)}"
        for r in comparison.reasons
        if r.delta_bytes
    ]
    if len(parts) > 1:
        page.paragraph(f"By kind: {', '.join(parts)}.")


def _line_row(change: LineChange) -> list[Cell]:
    style = _COLORS[change.kind]
    moved = signed(change.delta_bytes) if change.delta_bytes else "="
    old = "new" if change.kind is LineKind.NEW else format_size(change.before_bytes)
    new = "gone" if change.kind is LineKind.GONE else format_size(change.after_bytes)
    return [(moved, style), old, new, blocks_text(change), line_place(change)]


def _below(change: LineChange, *, verbose: bool) -> list[Cell]:
    lines: list[Cell] = []
    if change.sizes is not None:
        lines.append((sizes_text(change.sizes), "dim"))
    if verbose:
        for stack in change.stacks:
            path = " <- ".join(f"{file_name(f)}:{f.line} {f.function}" for f in stack.frames[1:5])
            moved = stack.after_bytes - stack.before_bytes
            lines.append((f"{signed(moved)} from {path or 'the top level'}", "dim"))
    return lines


def _write_settings(page: Page, comparison: Comparison) -> None:
    if not comparison.settings:
        return
    first, last = comparison.runs[0].letter, comparison.runs[-1].letter
    page.heading("Settings that differ")
    page.table(
        [
            Column(title="key", max_width=40),
            Column("wrap", title=first),
            Column("wrap", title=last),
        ],
        [[s.key, s.before, s.after] for s in comparison.settings],
    )
    told = any(comparison.proof and comparison.proof.text in c.text for c in comparison.causes)
    if comparison.proof is not None and not told:
        page.paragraph(comparison.proof.text)


def _write_phases(page: Page, comparison: Comparison) -> None:
    if not comparison.phases:
        return
    page.heading("Phases", "highest peak of each, and what is held at the peak")
    rows: list[list[Cell]] = []
    for p in comparison.phases:
        known = p.before_bytes is not None and p.after_bytes is not None
        delta = (p.after_bytes or 0) - (p.before_bytes or 0)
        share = share_text(delta, p.before_bytes or 0)
        moved = f"{signed(delta)} ({share})" if share else signed(delta)
        values = [format_size(v) if v is not None else "-" for v in (p.before_bytes, p.after_bytes)]
        rows.append([p.name, *values, moved if known and delta else "=" if known else ""])
    page.table(
        [
            Column(title="phase", max_width=32),
            Column(title=comparison.runs[0].letter, align="right"),
            Column(title=comparison.runs[-1].letter, align="right"),
            Column(title="change"),
        ],
        rows,
    )
