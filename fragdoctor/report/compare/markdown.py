"""The comparison as Markdown for a pull request: a compact table, the rest in details."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from fragdoctor.gate.judgement import Growth, has_grown
from fragdoctor.model.comparison import Comparison, LineKind
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.compare.phrases import (
    BASIS_TITLES,
    REASON_TITLES,
    blocks_text,
    change_text,
    distinct_figures,
    explained_text,
    line_place,
    run_facts,
    run_name,
    run_title,
    signed,
    sizes_text,
    value_text,
    versions_text,
)
from fragdoctor.report.phrases import location_text
from fragdoctor.units import format_size

MAX_LINES: Final = 20
MAX_NOTES: Final = 20
_SHOWN: Final = ("peak_allocated", "peak_active", "peak_reserved", "pinned_free", "alloc_retries")

md = escape.markdown


def render_comparison(
    comparison: Comparison, judged: Sequence[Growth], options: RenderOptions
) -> str:
    """Return the answer, the figures, and the details to unfold."""
    title = "GPU memory"
    if judged:
        title += ": grew too much" if has_grown(judged) else ": within what is accepted"
    blocks = [f"## {title}", f"**{md(comparison.summary)}**"]
    blocks += [_list([g.text for g in judged])] if judged else []
    blocks.append(_figures(comparison))
    if options.verbosity is not Verbosity.QUIET:
        causes = [f"{c.confidence.value}: {c.text}" for c in comparison.causes]
        blocks += [_list(causes)] if causes else []
        blocks += [b for b in (_lines(comparison), _trend(comparison), _runs(comparison)) if b]
        notes = list(comparison.notes[:MAX_NOTES])
        blocks += [_list(notes)] if notes else []
    return "\n\n".join(blocks) + "\n"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {md(line)}" for line in lines)


def _figures(comparison: Comparison) -> str:
    runs = comparison.runs
    head = ["", *(r.letter for r in runs), "change"]
    rows = [
        [f.title, *(value_text(f, v) for v in f.values), change_text(f)]
        for f in distinct_figures(comparison)
        if f.id in _SHOWN or (f.delta and f.unit == "count")
    ]
    return _table(head, rows, right=set(range(1, len(runs) + 2)))


def _lines(comparison: Comparison) -> str:
    changed = [c for c in comparison.lines if c.delta_bytes][:MAX_LINES]
    if not changed:
        return ""
    first, last = comparison.runs[0].letter, comparison.runs[-1].letter
    rows = [
        [
            signed(c.delta_bytes),
            "new" if c.kind is LineKind.NEW else format_size(c.before_bytes),
            "gone" if c.kind is LineKind.GONE else format_size(c.after_bytes),
            blocks_text(c),
            _code(line_place(c, short=True)),
            "" if c.sizes is None else sizes_text(c.sizes),
        ]
        for c in changed
    ]
    table = _table(
        ["change", first, last, "blocks", "line", "sizes"], rows, right={0, 1, 2}, is_code={4}
    )
    parts = [f"{REASON_TITLES[r.kind]} {signed(r.delta_bytes)}" for r in comparison.reasons]
    below = [t for t in (explained_text(comparison), f"By kind: {', '.join(parts)}.") if t]
    body = f"{table}\n\n{_list(below)}" if parts else table
    return _details(f"Lines: {BASIS_TITLES[comparison.basis]}", body)


def _trend(comparison: Comparison) -> str:
    trend = comparison.trend
    if trend is None or not trend.lines:
        return ""
    rows = [
        [
            f"{signed(t.slope_bytes)} per {trend.unit}",
            format_size(t.values[0]),
            format_size(t.values[-1]),
            _code(location_text(t.place)),
        ]
        for t in trend.lines[:MAX_LINES]
    ]
    table = _table(["slope", "first", "last", "line"], rows, right={0, 1, 2}, is_code={3})
    return _details("Growing lines", table)


def _runs(comparison: Comparison) -> str:
    rows = [[r.letter, _code(run_name(r)), run_title(r), run_facts(r)] for r in comparison.runs]
    table = _table(["", "run", "verdict", "recorded"], rows, right=set(), is_code={1})
    settings = comparison.settings
    if settings:
        lines = [f"{s.key}: {s.before} -> {s.after}" for s in settings]
        table += f"\n\nSettings that differ:\n\n{_list(lines)}"
    if text := versions_text(comparison):
        table += f"\n\n{md(text)}"
    return _details("Runs and settings", table)


def _details(title: str, body: str) -> str:
    return f"<details>\n<summary>{escape.html(title)}</summary>\n\n{body}\n\n</details>"


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: AbstractSet[int],
    is_code: AbstractSet[int] = frozenset(),
) -> str:
    """Return a table; cells are escaped but for those that are code spans already."""
    marks = ["---:" if i in right else "---" for i in range(len(head))]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(marks)} |"]
    for row in rows:
        cells = [cell if i in is_code else md(cell) for i, cell in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return escape.markdown_code(text[:500], in_table=True)
