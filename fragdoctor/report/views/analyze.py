"""What ``fragdoctor analyze`` and ``oom`` say: the answer first, then its basis."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.diagnosis import ChecklistItem, DeviceFigures, Diagnosis, Failure, Status
from fragdoctor.model.finding import Confidence, Finding, Location, Severity
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.simulation import OutlookBasis
from fragdoctor.model.snapshot import Provenance
from fragdoctor.report import document as doc
from fragdoctor.report import words
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.document import Detail, Span, Style, code, dim, location_text
from fragdoctor.report.source_files import MAX_QUOTED, links_to, relative, source_text
from fragdoctor.report.views import advice, device_memory, holders, log_story, modules
from fragdoctor.units import format_share, format_size, plural

_SOURCES: Final = {"memory_stats": "stats", "oom message": "message"}
_MAX_OTHER: Final = 20
_MAX_SETTINGS: Final = 28
_SHORT_NOTES: Final = 2
_MAX_TO_COPY: Final = 3
_MOST_LINKED: Final = 12
_SAID_ELSEWHERE: Final = ("message", "rejected")
"""Sections that a page with an explorer folds: its headline and its what-ifs say the same."""

_SCRIPT: Final = re.compile(r"[\w.][\w./-]*\.py")
"""A script path that can be copied into a shell without quotes."""

_REHEARSE: Final = "Rehearse the program without a GPU: that shows what the rest of the step needs."


def checklist_section(diagnosis: Diagnosis) -> doc.Section:
    """Return each item of the checklist with its outcome, its figure, and the input behind it."""
    table = doc.tabled(
        diagnosis.checklist,
        doc.Column("", lambda i: Span(*words.STATUS_WORDS[i.status])),
        doc.Column("", lambda i: words.CHECK_TITLES.get(i.id, i.title)),
        doc.Column("", _outcome, "wrap"),
        doc.Column("", _source, style=Style.DIM),
        notes=lambda i: [dim(i.detail)] if i.detail and i.status is not Status.SKIP else [],
        style=lambda i: words.STATUS_WORDS[i.status][1],
    )
    return doc.Section("Checklist", [table], id="checklist", detail=Detail.FULL)


def _outcome(item: ChecklistItem) -> doc.Content:
    if item.status is not Status.SKIP:
        return item.value or "-"
    # For an unknown value, the reason is all there is to say.
    return dim(". ".join(x for x in (item.value, item.detail) if x) or "-")


def _source(item: ChecklistItem) -> str:
    source = item.source
    for long, short in _SOURCES.items():
        source = source.replace(long, short)
    return source.replace(" and ", ", ")


def evidence_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the figures that the verdict is based on, each with the input that it comes from."""
    table = doc.tabled(
        diagnosis.verdict.evidence,
        doc.Column("", "name"),
        doc.Column("", words.evidence_value, "right"),
        doc.Column("", "source", "wrap", style=Style.DIM),
    )
    decider = diagnosis.verdict.decider
    note = f"decided by {decider}" if decider else ""
    return doc.Section("Evidence", [table], note, "evidence", detail=Detail.FULL)


def findings_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the findings of the rules, with evidence and places."""
    table = doc.tabled(
        diagnosis.findings,
        doc.Column("", lambda f: Span(f.code, words.SEVERITY_STYLES[f.severity])),
        doc.Column("", "message", "wrap"),
        notes=_finding_notes,
    )
    note = "fragdoctor explain CODE says more"
    return doc.Section("Findings", [table], note, "findings", detail=Detail.FULL)


def _finding_notes(finding: Finding) -> list[doc.Content]:
    lines: list[doc.Content] = [dim(location_text(place)) for place in finding.locations[:1]]
    if finding.evidence:
        lines.append(dim("; ".join(words.evidence_text(e) for e in finding.evidence)))
    return lines


def about_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return corrected claims, facts about the inputs, and the rules that could not run."""
    has_replay = diagnosis.fidelity.share is not None or diagnosis.case.snapshot is not None
    fidelity = words.fidelity_text(diagnosis.fidelity) if has_replay else ""
    notes = doc.bullets(*diagnosis.notes, *diagnosis.replay_notes, fidelity)
    about = (notes, doc.facts(*_facts(diagnosis)))
    skipped = doc.tabled(
        diagnosis.skipped,
        doc.Column("", "code"),
        doc.Column("", "name", "wrap"),
        doc.Column("", "reason", "wrap", style=Style.DIM),
    )
    corrections = doc.Bullets(list(diagnosis.corrections))
    short = [("Note", note) for note in diagnosis.notes[:_SHORT_NOTES]]
    full = partial(doc.Section, detail=Detail.FULL)
    return [
        doc.Section("", [doc.Facts(short)], detail=Detail.SHORT),
        full("Common advice, corrected", [corrections], id="corrections"),
        full("About this input", about, id="about"),
        full("Rules that could not run", [skipped], id="skipped"),
    ]


def _facts(diagnosis: Diagnosis) -> list[tuple[str, doc.Content]]:
    """Return what the inputs are, what wrote them, and the settings that they record."""
    facts: list[tuple[str, doc.Content]] = [
        ("Input", code(words.source_name(s))) for s in diagnosis.case.sources[:_MAX_OTHER]
    ]
    snapshot = diagnosis.case.snapshot
    if snapshot is None:
        return facts
    facts += file_facts(snapshot.provenance)
    for device, analysis in sorted(diagnosis.analyses.items()):
        held = (
            plural(analysis.n_events, "event"),
            plural(analysis.n_segments, "segment"),
            plural(analysis.n_blocks, "block"),
            f"{format_share(analysis.capture.has_stacks, 1)} with a stack",
        )
        facts.append((f"GPU {device}", ", ".join(held)))
    return [*facts, *setting_facts(snapshot.settings)]


def file_facts(p: Provenance) -> list[tuple[str, doc.Content]]:
    """Return what a file is, and what wrote it; "" for what is not known."""
    how = [p.container, p.compression, f"protocol {p.protocol}" if p.protocol >= 0 else ""]
    unpacked = " after decompression" if p.compression else ""
    low, high = p.version_low or "the first", p.version_high or "today"
    is_dated = p.version_low or p.version_high
    broken = plural(p.n_replaced_strings, "string with broken characters")
    return [
        ("File", ", ".join(t for t in how if t)),
        ("Size", f"{format_size(p.n_bytes)}{unpacked}" if p.n_bytes else ""),
        ("Written by",
         f"PyTorch between {low} and {high}, judged by its keys" if is_dated else ""),
        ("Not understood", ", ".join([*p.unknown_keys, *p.unknown_values][:_MAX_OTHER])),
        ("Repaired", broken if p.n_replaced_strings else ""),
    ]  # fmt: skip


def setting_facts(s: AllocatorSettings) -> list[tuple[str, doc.Content]]:
    """Return the settings that a file records: as given, then in full."""
    if not s.is_recorded:
        return [("Settings", "not recorded in this file; PyTorch's defaults are assumed")]
    listed = "; ".join(f"{k} {v}" for k, v in [*s.described().items()][:_MAX_SETTINGS])
    return [("Settings", code(s.conf) if s.conf else "defaults"), ("In full", listed)]


def footer(diagnosis: Diagnosis) -> str:
    """Return what the full report adds to the short one."""
    n_failed = sum(i.status is Status.FAIL for i in diagnosis.checklist)
    n_serious = sum(f.severity > Severity.INFO for f in diagnosis.findings)
    n_advice = len(diagnosis.recommendations)
    failed = f" ({n_failed} failed)" if n_failed else ""
    parts = [
        f"the checklist{failed}" if diagnosis.checklist else "",
        "what strands memory" if diagnosis.stranders else "",
        "phases" if diagnosis.phases else "",
        plural(n_serious, "finding") if n_serious else "",
        plural(n_advice, "recommendation") if n_advice else "",
    ]
    *most, last = [p for p in parts if p] or [""]
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Add --full to see {listed}." if listed else ""


def document(
    diagnosis: Diagnosis, options: RenderOptions, *, is_rehearsed: bool = False
) -> doc.ReportDocument:
    """Return the document of a diagnosis; a rehearsed program has its own next step."""
    verdict = diagnosis.verdict
    leads_to, cure = advice.cure(diagnosis, _line_to_change(diagnosis, options))
    tone = words.verdict_style(verdict)
    brief = (words.verdict_line(verdict), advice.brief_cure(diagnosis))
    failed = words.failure_line(diagnosis.failure)
    headline: doc.Content = [
        doc.Span(words.verdict_title(verdict, is_placed=not failed), tone),
        ". ",
        leads_to,
    ]
    is_explored = bool(diagnosis.analyses)  # the page draws them and lets the reader explore
    in_time = (
        *device_memory.memory_sections(diagnosis),
        device_memory.timeline_section(diagnosis),
    )
    to_do = (
        *log_story.message_sections(diagnosis),
        advice.short_advice(diagnosis),
        *advice.advice_sections(diagnosis),
    )
    details = (
        evidence_section(diagnosis),
        checklist_section(diagnosis),
        *device_memory.phase_sections(diagnosis),
        holders.stranders_section(diagnosis),
        holders.segments_section(diagnosis),
        holders.owners_section(diagnosis),
        holders.holders_section(diagnosis),
        findings_section(diagnosis),
        *about_sections(diagnosis),
    )
    failure: list[doc.DocumentBlock] = []
    if failed:
        line = _line_that_asked(diagnosis, options)
        failure = [doc.Code([line], is_quoted=True), doc.Paragraph(headline)]
        headline = doc.Span(failed, Style.BAD)
    return doc.ReportDocument(
        title=words.verdict_name(verdict),
        headline=headline,
        brief=[text for text in brief if text],
        lead=[*failure, *cure, *_what_it_is(diagnosis, options, is_rehearsed=is_rehearsed)],
        sections=[
            *device_memory.moment_sections(diagnosis),
            *(replace(s, is_folded=is_explored) for s in in_time),
            holders.short_holders(diagnosis),
            modules.modules_section(diagnosis),
            log_story.story_section(diagnosis),
            *(replace(s, is_folded=is_explored and s.id in _SAID_ELSEWHERE) for s in to_do),
            *(replace(s, is_folded=True) for s in details),
        ],
        figures=key_figures(diagnosis),
        footer=footer(diagnosis),
        tone=tone,
        kicker=", ".join(words.source_name(s) for s in diagnosis.case.sources[:3]),
        places=links_to(_lines_named(diagnosis), options),
    )


def _lines_named(diagnosis: Diagnosis) -> Iterator[Location]:
    """Yield the source lines that a report is most likely to name."""
    if diagnosis.failure is not None:
        yield from filter(None, (diagnosis.failure.location, diagnosis.failure.backward_of))
    yield from (Location(f.filename, f.first_line, f.function) for f in diagnosis.functions)
    held = [row.location for row in diagnosis.holders[:_MOST_LINKED]]
    stranding = [row.location for row in diagnosis.stranders[:_MOST_LINKED]]
    yield from (location for location in (*held, *stranding) if location is not None)
    for one in diagnosis.recommendations[:_MOST_LINKED]:
        yield from one.locations


def _line_that_asked(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the source of the line whose request failed, ``52 | x = f(y)``, or "" if unknown."""
    failure = diagnosis.failure
    place = None if failure is None else failure.location or failure.backward_of
    if failure is None or place is None:
        return ""
    recorded = failure.source_text or _recorded_line(diagnosis, place)
    text = source_text(place, options)
    if recorded not in text:  # the file has changed since, or is another program's
        text = recorded
    return f"{place.line} | {text}" if text else ""


def _line_to_change(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the source of the line to change, ``train.py:143: loss.backward()``, or ""."""
    first = next(iter(diagnosis.recommendations), None)
    if first is None or first.setting or not first.locations:
        return ""
    place = first.locations[0]
    text = source_text(place, options) or _recorded_line(diagnosis, place)
    return f"{place.at}: {text}" if text else ""


def _recorded_line(diagnosis: Diagnosis, place: Location) -> str:
    """Return a line of the program as recorded in its bundle, or "" if it is not there."""
    lines = diagnosis.case.source_lines.get(place.filename, {})
    return lines.get(place.line, "").strip()[:MAX_QUOTED]


def _rehearsal_of(diagnosis: Diagnosis, options: RenderOptions) -> tuple[str, ...]:
    """Return the command that continues a recording with a rehearsal of its program.

    The stacks name the program; if it is not below the root, only its file name is used.
    """
    sources = [shlex.quote(source) for source in diagnosis.case.sources[:_MAX_TO_COPY]]
    if diagnosis.case.bundle is not None and diagnosis.case.bundle.command:
        return (f"fragdoctor analyze {' '.join(sources)} --rehearse",)
    scripts = (a.trace.stacks.script for a in diagnosis.analyses.values())
    script = relative(next(filter(None, scripts), "train.py"), options)
    is_elsewhere = posixpath.isabs(script) or ":" in script  # a Windows drive
    script = posixpath.basename(script) if is_elsewhere else script
    script = script if _SCRIPT.fullmatch(script) else "train.py"
    return (
        f"fragdoctor rehearse {script} --unlimited --snapshot rehearsed.pickle",
        f"fragdoctor analyze {' '.join(sources)} --continue-with rehearsed.pickle",
    )


def _what_it_is(
    diagnosis: Diagnosis, options: RenderOptions, *, is_rehearsed: bool
) -> list[doc.DocumentBlock]:
    """Return the verdict in words: the summary, other possible causes, what would settle it."""
    verdict = diagnosis.verdict
    # A proven verdict leaves nothing to settle.
    settled_by = "" if verdict.confidence is Confidence.PROVEN else verdict.settled_by
    outlook = verdict.outlook
    is_cut_off = outlook is not None and outlook.basis is OutlookBasis.LOWER_BOUND
    is_cut_off = is_cut_off and not is_rehearsed
    further = "" if settled_by else verdict.settled_by
    return [
        doc.Gap(),
        doc.Paragraph(verdict.summary),
        doc.facts(
            ("Also possible", words.also_text(verdict)),
            ("To be sure", settled_by),
            ("To learn more", _REHEARSE if is_cut_off else ""),
        ),
        doc.Code(_rehearsal_of(diagnosis, options) if is_cut_off else ()),
        doc.facts(("To be sure", further), detail=doc.Detail.FULL),
    ]


def key_figures(diagnosis: Diagnosis) -> list[doc.Figure]:
    """Return the few figures that a page shows large beside its answer.

    They are what was requested, available and missing; for a run that fits, the room left.
    """
    failure = diagnosis.failure
    device = diagnosis.verdict.device if failure is None else failure.device
    figures = diagnosis.figures_of(device) or next(iter(diagnosis.devices), None)
    if failure is not None and failure.requested_bytes:
        return _of_failure(failure, failure.requested_bytes, figures)
    return _of_room(figures) if figures is not None else []


def _of_failure(
    failure: Failure, asked_bytes: int, figures: DeviceFigures | None
) -> list[doc.Figure]:
    """Return the request, the largest piece that could have served it, and the shortfall."""
    free_bytes, segment_bytes = failure.free_bytes, failure.segment_bytes or 0
    asked = [doc.Figure("requested", format_size(asked_bytes), "")]
    hole = None
    if figures is not None and (figures.moment is None or figures.moment.is_end):
        hole = figures.largest_free_block_bytes
    on_device = (free_bytes, "on the device")
    if failure.limit_bytes is not None:
        on_device = (failure.left_bytes, "under the limit")
    pieces = [
        (n_bytes, where)
        for n_bytes, where in ((hole, "in the cache"), on_device)
        if n_bytes is not None
    ]
    if not pieces:
        return asked
    largest, where = max(pieces)
    found = doc.Figure("largest piece free", format_size(largest), where)
    if largest < asked_bytes:
        missing = doc.Figure("missing", format_size(asked_bytes - largest), "in one piece")
    elif where != "in the cache" and largest < segment_bytes:
        of = f"of a segment of {format_size(segment_bytes)}"
        missing = doc.Figure("missing", format_size(segment_bytes - largest), of)
    else:  # a limit may be lower than what was free
        return [*asked, found]
    return [*asked, found, missing]


def _of_room(figures: DeviceFigures) -> list[doc.Figure]:
    """Return the peak, the capacity, and the difference."""
    reserved, capacity = figures.peak_reserved_bytes, figures.capacity_bytes
    is_known = reserved is not None and capacity is not None
    room = max((capacity or 0) - (reserved or 0), 0) if is_known else None
    shown = (
        ("peak allocated", figures.peak_allocated_bytes, ""),
        ("peak reserved", reserved, ""),
        ("to spare", room, f"of {format_size(capacity)}"),
    )
    return [doc.Figure(name, format_size(n), of) for name, n, of in shown if n is not None]
