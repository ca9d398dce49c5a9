"""What ``fragdoctor compare`` says: the answer, then figures, causes, lines, settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from fragdoctor.gate.judgement import JudgedGrowth, has_grown
from fragdoctor.model import comparison as model
from fragdoctor.model.comparison import Comparison, LineChange, LineKind
from fragdoctor.model.finding import Confidence, told_apart
from fragdoctor.report import document as doc
from fragdoctor.report.document import NO_STACK, Detail, Span, Style, code, dim
from fragdoctor.report.words import source_name, titled
from fragdoctor.units import format_count, format_share, format_size, listed, plural, signed_size

MAX_LINES: Final = 120
MAX_TREND_LINES: Final = 40
MAX_RUNS: Final = 400
_SHORT_LINES: Final = 8
_RUNS_ACROSS: Final = 3
"""The most runs that are shown side by side; more are listed below each other."""

BASIS_TITLES: Final = {
    model.Basis.PEAK: "live memory at each run's peak",
    model.Basis.NOW: "live memory when each snapshot was taken",
    model.Basis.NONE: "",
}
_LINE_STYLES: Final = {
    LineKind.NEW: Style.BAD,
    LineKind.GREW: Style.BAD,
    LineKind.SHRANK: Style.GOOD,
    LineKind.GONE: Style.GOOD,
    LineKind.SAME: Style.DIM,
}
_CONFIDENCE_STYLES: Final = {Confidence.PROVEN: Style.GOOD, Confidence.LIKELY: Style.STRONG}
_MAIN: Final = ("peak_allocated", "allocated", "peak_reserved", "alloc_retries", "steps")


def document(comparison: Comparison, judged: Sequence[JudgedGrowth] = ()) -> doc.ReportDocument:
    """Return what changed between the runs; ``judged`` is empty without a gate."""
    tone = None
    if judged:
        tone = Style.BAD if has_grown(judged) else Style.GOOD
    headline, stop, rest = comparison.summary.partition(". ")
    verdicts = [Span(g.text, Style.BAD if g.is_exceeded else Style.GOOD) for g in judged]
    notes = doc.Bullets(list(comparison.notes))
    first, last = comparison.runs[0].letter, comparison.runs[-1].letter
    return doc.ReportDocument(
        title=f"{first} and {last} compared",
        headline=doc.strong(headline + stop.rstrip()),
        brief=[comparison.summary, *(g.text for g in judged if g.is_exceeded)],
        lead=[doc.Paragraph(rest), *(doc.Paragraph(v) for v in verdicts)],
        sections=[
            _runs(comparison),
            _figures(comparison),
            _growth(comparison),
            _causes(comparison),
            _lines(comparison),
            _settings(comparison),
            doc.Section("About this comparison", [notes], id="about"),
        ],
        tone=tone,
        kicker=f"{plural(len(comparison.runs), 'run')} compared",
    )


def _runs(comparison: Comparison) -> doc.Section:
    runs = comparison.runs[:MAX_RUNS]
    table = doc.tabled(
        zip(runs, told_apart([source_name(r.name) for r in runs]), strict=True),
        doc.Column("", lambda row: doc.strong(row[0].letter)),
        doc.Column("", lambda row: code(row[1]), "path"),
        doc.Column("", lambda row: titled(row[0].verdict.cause, row[0].verdict.confidence), "wrap"),
        doc.Column("", lambda row: _run_facts(row[0]), "wrap", style=Style.DIM),
        n_left_out=max(0, len(comparison.runs) - MAX_RUNS),
    )
    versions = _versions(comparison)
    return doc.Section("Runs", [table, doc.Paragraph(dim(versions))], id="runs")


def _run_facts(side: model.RunSide) -> str:
    """Return the other known facts about a run, in one phrase."""
    parts = (
        "" if side.device is None else f"GPU {side.device}",
        plural(side.n_steps, "step") if side.n_steps else "",
        "" if side.n_events is None else plural(side.n_events, "event"),
    )
    return ", ".join(part for part in parts if part)


def _versions(comparison: Comparison) -> str:
    """Return the PyTorch versions of the runs, and whether settings differ, in one sentence."""
    versions = [r.torch_version for r in comparison.runs]
    parts = []
    if len(set(versions)) == 1:
        if versions[0]:
            parts.append(f"all runs look like PyTorch {versions[0]}")
    else:
        each = [f"{r.letter} {r.torch_version or 'unknown'}" for r in comparison.runs]
        parts.append(f"PyTorch differs: {', '.join(each)}")
    if comparison.settings is not None and not comparison.settings:
        # The first run and the last have the same settings; those between may have others.
        first, *between = comparison.runs[:-1]
        others = [r.letter for r in between if r.conf != first.conf]
        parts.append(
            f"the settings of {listed(others)} differ or are not recorded"
            if others
            else "the settings are the same"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _figures(comparison: Comparison) -> doc.Section:
    # Leave out active memory if it equals allocated memory: then no block waits to be freed.
    values = {f.id: f.values for f in comparison.figures}
    twins = {"peak_active": "peak_allocated", "active": "allocated"}
    figures = [f for f in comparison.figures if values.get(twins.get(f.id, "")) != f.values]
    short = [f for f in figures if f.delta or f.id in _MAIN]
    if len(comparison.runs) > _RUNS_ACROSS:
        tables = [_figures_down(comparison)]
    else:
        tables = [
            _figures_across(comparison, short, Detail.SHORT),
            _figures_across(comparison, figures, Detail.FULL),
        ]
    return doc.Section("Figures", tables, id="figures")


def _figures_across(
    comparison: Comparison, figures: Sequence[model.ComparedFigure], detail: Detail
) -> doc.Table:
    runs = [
        doc.Column(r.letter, partial(_value, run=i), "right") for i, r in enumerate(comparison.runs)
    ]
    return doc.tabled(
        figures,
        doc.Column("figure", "title"),
        *runs,
        doc.Column(
            "change", lambda f: _changed(f.delta, f.values[0], is_size=f.unit == "bytes"), "wrap"
        ),
        detail=detail,
    )


def _figures_down(comparison: Comparison) -> doc.Table:
    """Return a table with a row per run, with as many important figures as there is room for."""
    figures = [f for f in (comparison.figure(name) for name in _MAIN) if f is not None]
    return doc.tabled(
        range(len(comparison.runs[:MAX_RUNS])),
        doc.Column("run", lambda i: doc.strong(comparison.runs[i].letter)),
        *(
            doc.Column(f.title, partial(_value, f), "right", from_width=width)
            for f, width in zip(figures, (0, 0, 0, 80, 100), strict=False)
        ),
    )


def _value(figure: model.ComparedFigure, run: int) -> str:
    """Return the value of a figure in a run, or a dash if it is unknown."""
    value = figure.values[run]
    return doc.size(value) if figure.unit == "bytes" else doc.count(value)


def _changed(delta: int | None, first: int | None = None, *, is_size: bool = True) -> str:
    """Return a change and its share of what was there first, if known: ``+1.00 GiB (+12%)``."""
    if not delta:
        return "" if delta is None else "="
    shown = signed_size(delta) if is_size else f"{delta:+,}"
    if not first or first < 0:
        return shown
    return f"{shown} ({'+' if delta > 0 else '-'}{format_share(abs(delta), first)})"


def _growth(comparison: Comparison) -> doc.Section:
    trend = comparison.trend
    if trend is None:
        return doc.Section("Growing lines", ())
    table = doc.tabled(
        trend.lines[:MAX_TREND_LINES],
        doc.Column("slope", lambda t: signed_size(t.slope_bytes), "right"),
        doc.Column("first", lambda t: format_size(t.values[0]), "right"),
        doc.Column("last", lambda t: format_size(t.values[-1]), "right"),
        doc.Column("line", "location"),
        shown=_SHORT_LINES,
    )
    blocks = (doc.Paragraph(trend.text, detail=Detail.FULL), _trend_chart(trend), table)
    note = f"per {trend.unit}, over {plural(len(trend.values), 'run')}"
    return doc.Section("Growing lines", blocks, note, "growth")


def _trend_chart(trend: model.RunTrend) -> doc.Chart:
    """Return the values of a series with the fitted line."""
    x, values = list(trend.x), list(trend.values)
    labels = [f"{at:g}: {format_size(v)}" for at, v in zip(x, values, strict=True)]
    fit: list[tuple[float, float]] = []
    if trend.confidence is not None:
        level = sorted(v - trend.slope_bytes * at for v, at in zip(values, x, strict=True))
        middle = level[len(level) // 2]
        fit = [(at, max(0.0, middle + trend.slope_bytes * at)) for at in (x[0], x[-1])]
    return doc.Chart(trend.text, x, values, labels, fit, detail=Detail.FULL)


def _causes(comparison: Comparison) -> doc.Section:
    items = [
        doc.ListItem(
            # What the answer tells in full is only named here.
            f"{c.text.partition('. ')[0].rstrip('.')}." if c.text in comparison.summary else c.text,
            (),
            c.confidence.value,
            _CONFIDENCE_STYLES.get(c.confidence, Style.DIM),
        )
        for c in comparison.causes
    ]
    return doc.Section("What did it", [doc.Listing(items)], id="causes")


def _lines(comparison: Comparison) -> doc.Section:
    changed = [c for c in comparison.lines if _is_shown(c)]
    others = [c for c in comparison.lines if not _is_shown(c) and c.kind is not LineKind.SAME]
    every = [*changed, *others]
    short = _line_table(comparison, changed[:_SHORT_LINES], Detail.SHORT)
    n_more = len(changed) - len(short.rows)
    more = f"{plural(n_more, 'more line')} with --full" if n_more else ""
    blocks = (
        short,
        doc.Paragraph(dim(more), detail=Detail.SHORT),
        _line_table(comparison, every, Detail.FULL),
        doc.Paragraph(_explained(comparison)),
    )
    return doc.Section("Lines", blocks if every else (), BASIS_TITLES[comparison.basis], "lines")


def _line_table(comparison: Comparison, lines: Sequence[LineChange], detail: Detail) -> doc.Table:
    largest = max((abs(c.delta_bytes) for c in lines), default=0) or 1
    is_full = detail is Detail.FULL
    return doc.tabled(
        lines[:MAX_LINES],
        doc.Column(
            "change", lambda c: Span(_changed(c.delta_bytes), _LINE_STYLES[c.kind]), "right"
        ),
        doc.Column("", partial(_change_bar, largest), from_width=100),
        doc.Column(comparison.runs[0].letter, partial(_held, "before", LineKind.NEW), "right"),
        doc.Column(comparison.runs[-1].letter, partial(_held, "after", LineKind.GONE), "right"),
        doc.Column("blocks", _blocks),
        doc.Column("line", lambda c: code(_line_place(c)), "path"),
        notes=lambda c: [] if c.sizes is None else [dim(_sizes_text(c.sizes))],
        n_left_out=max(0, len(lines) - MAX_LINES) + comparison.n_lines_left_out * is_full,
        detail=detail,
    )


def _is_shown(change: LineChange) -> bool:
    """Return whether a line matters at the compared moment: its bytes or sizes differ."""
    holds = change.before_bytes or change.after_bytes
    return bool(change.delta_bytes or (change.sizes is not None and holds))


def _change_bar(largest: int, change: LineChange) -> doc.Gauge:
    half = abs(change.delta_bytes) / largest / 2
    start, end = (0.5, 0.5 + half) if change.delta_bytes > 0 else (0.5 - half, 0.5)
    return doc.Gauge(end, start, _LINE_STYLES[change.kind])


def _held(side: str, unless: LineKind, change: LineChange) -> str:
    """Return what a line holds on one side, or a word if it does not occur there."""
    return unless.value if change.kind is unless else format_size(getattr(change, f"{side}_bytes"))


def _line_place(change: LineChange) -> str:
    """Return where a line was and where it is now: ``train.py:88 -> :93 in forward``."""
    place = change.after or change.before
    if place is None:
        return NO_STACK
    old = change.before or place
    same_file = old.basename == place.basename
    if same_file and old.line == place.line:
        return str(place)
    function = f" in {place.function}" if place.function else ""
    now = str(replace(place, function=""))
    if same_file:
        return f"{replace(place, line=old.line, function='')} -> :{place.line}{function}"
    return f"{replace(old, function='')} -> {now}{function}"


def _blocks(change: LineChange) -> str:
    """Return the number of blocks that a line holds, before and after."""
    a, b = change.before_blocks, change.after_blocks
    return format_count(a) if a == b else f"{format_count(a)} -> {format_count(b)}"


def _sizes_text(change: model.SizeChange) -> str:
    """Return how the sizes that a line requests changed, in one clause."""
    if change.factor is not None:
        before, after = format_size(change.before_bytes), format_size(change.after_bytes)
        return f"asks {change.factor:.3g}x: {before} -> {after}"
    parts = []
    if change.new_bytes:
        parts.append(f"new sizes {_sizes(change.new_bytes, change.n_new)}")
    if change.gone_bytes:
        parts.append(f"gone {_sizes(change.gone_bytes, change.n_gone)}")
    return "; ".join(parts)


def _sizes(sizes: Sequence[int], total: int) -> str:
    shown = [format_size(s) for s in sizes[:3]]
    more = f" and {format_count(total - len(shown))} more" if total > len(shown) else ""
    return ", ".join(shown) + more


def _explained(comparison: Comparison) -> str:
    """Return how much of the difference the lines add up to."""
    delta, named = comparison.delta_bytes, comparison.explained_bytes
    if delta is None or named is None or delta == 0:
        return ""
    said = f"Lines with a stack add up to {signed_size(named)} of {signed_size(delta)}"
    if named == delta:
        return f"{said}: all of it."
    share = named / delta
    if 0 <= share <= 1:
        return f"{said} ({format_share(share, 1)}); the rest has no Python stack."
    return f"{said}; memory without a Python stack changed the other way."


def _settings(comparison: Comparison) -> doc.Section:
    is_said = any(comparison.proof and comparison.proof.text in c.text for c in comparison.causes)
    proof = "" if comparison.proof is None or is_said else comparison.proof.text
    table = doc.tabled(
        comparison.settings or (),
        doc.Column("key", lambda s: code(s.key), max_width=40),
        doc.Column(comparison.runs[0].letter, "before", "wrap"),
        doc.Column(comparison.runs[-1].letter, "after", "wrap"),
    )
    return doc.Section("Settings that differ", [table, doc.Paragraph(proof)], id="settings")
