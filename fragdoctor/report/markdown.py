"""Markdown: for a pull request, an issue, or ``$GITHUB_STEP_SUMMARY``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fragdoctor.model.diagnosis import Diagnosis, Recommendation, Status
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.phase_words import (
    CATEGORY_NAMES,
    PHASE_NAMES,
    limits_sentence,
    main_line,
    passes_text,
    peak_sentence,
    shown_phases,
    sureness,
)
from fragdoctor.report.phrases import (
    also_text,
    fidelity_line,
    location_text,
    predicted_text,
    verdict_line,
    verdict_title,
)
from fragdoctor.report.story_rows import (
    story_facts,
    story_rows,
    trend_span,
    trend_text,
    trend_title,
)
from fragdoctor.units import format_count, format_size

_MARKS = {Status.PASS: "ok", Status.WARN: "warn", Status.FAIL: "**FAIL**", Status.SKIP: "skip"}
_SHOWN = 5
_STORY_ROWS = 20

md = escape.markdown


def render_diagnosis(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the report as GitHub-flavoured Markdown."""
    if options.verbosity is Verbosity.QUIET:
        return f"{md(verdict_line(diagnosis.verdict))}\n"
    verbose = options.verbosity is Verbosity.VERBOSE
    limit = None if verbose else _SHOWN
    blocks = [
        *_head(diagnosis),
        *_story(diagnosis, verbose=verbose),
        *_checklist(diagnosis),
        *_devices(diagnosis),
        *_phases(diagnosis),
        *_pins(diagnosis, limit),
        *_holders(diagnosis, limit),
        *_recommendations(diagnosis, limit),
        *_rejected(diagnosis),
        *_findings(diagnosis, limit),
        *_remarks(diagnosis),
    ]
    return "\n\n".join(blocks) + "\n"


def _head(diagnosis: Diagnosis) -> list[str]:
    verdict = diagnosis.verdict
    where = "" if verdict.device is None else f", GPU {verdict.device}"
    blocks = [f"## {md(verdict_title(verdict))}{where}", md(verdict.summary)]
    if verdict.also:
        blocks.append(f"Also: {md(also_text(verdict))}.")
    if verdict.decider:
        blocks.append(f"To settle: {md(verdict.decider)}")
    return blocks


def _story(diagnosis: Diagnosis, *, verbose: bool) -> list[str]:
    if diagnosis.story is None:
        return []
    rows, n_left = story_rows(diagnosis, 10 * _STORY_ROWS if verbose else _STORY_ROWS)
    lines = [
        (
            md(row.time),
            row.line,
            md(row.who),
            ("&rarr; " if row.is_consequence else "") + md(row.what),
            md(row.note),
        )
        for row in rows
    ]
    title = f"Story: {md(story_facts(diagnosis.story))}"
    blocks = _section(title, ("Time", "Line", "Who", "What", "Why"), lines)
    if n_left:
        blocks.append(f"{format_count(n_left)} events left out.")
    trends = [
        (md(trend_title(t)), trend_span(t), t.direction.value, md(trend_text(t)))
        for t in diagnosis.story.trends
    ]
    return blocks + _section("Trends", ("Figure", "From", "", "How"), trends)


def _checklist(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (_MARKS[i.status], md(i.title), md(i.value), md(i.detail), md(i.source))
        for i in diagnosis.checklist
    ]
    return _section("Checklist", ("", "Check", "Value", "Detail", "From"), rows)


def _devices(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            str(d.device),
            *(
                "-" if value is None else format_size(value)
                for value in (
                    d.capacity_bytes,
                    d.reserved_bytes,
                    d.allocated_bytes,
                    d.pinned_free_bytes,
                    d.releasable_bytes,
                    d.peak_reserved_bytes,
                )
            ),
            "-" if d.alloc_retries is None else format_count(d.alloc_retries),
        )
        for d in diagnosis.devices
        if d.reserved_bytes
    ]
    titles = ("GPU", "Capacity", "Reserved", "Live", "Pinned", "Releasable", "Peak", "Retries")
    return _section("Memory", titles, rows)


def _phases(diagnosis: Diagnosis) -> list[str]:
    blocks: list[str] = []
    for report in shown_phases(diagnosis):
        rows = [
            (
                PHASE_NAMES[p.phase],
                *passes_text(p),
                format_size(p.worst_peak_bytes),
            )
            for p in report.phases
        ]
        titles = ("Phase", "Passes", "Usual peak", "Worst")
        blocks += _section(f"Training phases of GPU {report.device}", titles, rows)
        sentence = " ".join(s for s in (peak_sentence(report), limits_sentence(report)) if s)
        blocks += [md(sentence)] if sentence else []
        shares = [
            (CATEGORY_NAMES[s.category], format_size(s.n_bytes), sureness(s), _code(main_line(s)))
            for s in report.at_peak
        ]
        blocks += _section("At the peak", ("Memory", "Allocated", "Sure", "Mostly from"), shares)
    return blocks


def _pins(diagnosis: Diagnosis, limit: int | None) -> list[str]:
    rows = [
        (
            str(p.device),
            format_size(p.pinned_bytes),
            format_count(p.n_blocks),
            format_size(p.block_bytes),
            _code(location_text(p.location)),
        )
        for p in diagnosis.pins[:limit]
    ]
    titles = ("GPU", "Frees", "Blocks", "Size", "Held since")
    return _section("Pins: live blocks that keep free memory from being used", titles, rows)


def _holders(diagnosis: Diagnosis, limit: int | None) -> list[str]:
    rows = [
        (
            str(h.device),
            format_size(h.now_bytes),
            "-" if h.peak_bytes is None else format_size(h.peak_bytes),
            format_count(h.n_blocks),
            _code(location_text(h.location)),
        )
        for h in diagnosis.holders[:limit]
    ]
    titles = ("GPU", "Now", "At peak", "Blocks", "Allocated at")
    return _section("Holders: live memory by source line", titles, rows)


def _recommendations(diagnosis: Diagnosis, limit: int | None) -> list[str]:
    if not diagnosis.recommendations:
        return []
    items = [_recommendation(r) for r in diagnosis.recommendations[:limit]]
    return ["### What to do", "\n".join(items)]


def _recommendation(one: Recommendation) -> str:
    lines = [f"{one.rank}. **{md(one.title)}** ({one.confidence.value})"]
    if one.setting:
        lines.append(f"   {escape.markdown_code(one.setting)}")
    facts = [
        ("Change", one.change),
        ("Why", one.why),
        ("Predicted", predicted_text(one.predicted)),
        *(("At", location_text(place)) for place in one.locations[:2]),
        ("Cost", one.cost),
        *(("Mind", caveat) for caveat in one.caveats),
        ("Verify", one.verify),
    ]
    lines += [f"   - {label}: {md(body)}" for label, body in facts if body]
    return "\n".join(lines)


def _rejected(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            _code(r.setting.removeprefix("PYTORCH_CUDA_ALLOC_CONF=") or r.change or r.title),
            md(r.why),
            md(predicted_text(r.predicted)),
        )
        for r in diagnosis.rejected
    ]
    return _section("Would not help here", ("Setting", "Why", "Predicted"), rows)


def _findings(diagnosis: Diagnosis, limit: int | None) -> list[str]:
    findings = sorted(diagnosis.findings, key=lambda f: (-int(f.severity), -f.n_bytes, f.code))
    rows = [(md(f.code), f.severity.name.lower(), md(f.message)) for f in findings[:limit]]
    return _section("Findings", ("Rule", "Severity", "Finding"), rows)


def _remarks(diagnosis: Diagnosis) -> list[str]:
    blocks = []
    if diagnosis.corrections:
        blocks += ["### Often said, but wrong here", _bullets(diagnosis.corrections)]
    fidelity = fidelity_line(diagnosis)
    notes = [*diagnosis.notes, *([fidelity] if fidelity else [])]
    if notes:
        blocks += ["### About this input", _bullets(notes)]
    return blocks


def _section(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    head = [_row(titles), _row("---" for _ in titles)]
    return [f"### {title}", "\n".join([*head, *(_row(r) for r in rows)])]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {md(sentence)}" for sentence in sentences)


def _code(text: str) -> str:
    return escape.markdown_code(text, in_table=True)
