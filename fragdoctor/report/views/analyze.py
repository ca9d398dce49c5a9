"""What ``fragdoctor analyze`` and ``oom`` say: the answer first, then what it rests on."""

from __future__ import annotations

from dataclasses import replace

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Confidence
from fragdoctor.report import document as doc
from fragdoctor.report import words
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.places import relative, source_line
from fragdoctor.report.views import advice, checks, holders, memory, phases, story


def document(diagnosis: Diagnosis, options: RenderOptions) -> doc.ReportDocument:
    """Return everything that a diagnosis says."""
    verdict = diagnosis.verdict
    leads_to, cure = advice.cure(diagnosis, _line_to_change(diagnosis, options))
    where = "" if verdict.device is None else f" on GPU {verdict.device}"
    tone = words.verdict_style(verdict)
    brief = (words.verdict_line(verdict), advice.brief_cure(diagnosis))
    return doc.ReportDocument(
        title=words.verdict_name(verdict),
        headline=[doc.Span(words.verdict_title(verdict), tone), doc.dim(f"{where}. "), leads_to],
        brief=[text for text in brief if text],
        lead=[*cure, *_what_it_is(diagnosis)],
        sections=[
            *memory.moment_sections(diagnosis),
            *memory.memory_sections(diagnosis),
            memory.timeline_section(diagnosis),
            holders.short_holders(diagnosis),
            story.story_section(diagnosis),
            *story.message_sections(diagnosis),
            advice.short_advice(diagnosis),
            *advice.advice_sections(diagnosis),
            checks.checklist_section(diagnosis),
            *phases.phase_sections(diagnosis),
            holders.pins_section(diagnosis),
            holders.segments_section(diagnosis),
            holders.holders_section(diagnosis),
            checks.findings_section(diagnosis),
            *checks.about_sections(diagnosis),
        ],
        footer=checks.footer(diagnosis),
        tone=tone,
        kicker=", ".join(words.source_name(s) for s in diagnosis.case.sources[:3]),
    )


def page(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the document as a page with interactive graphics."""
    from fragdoctor.report.page.page import render_page  # noqa: PLC0415 - numpy and jinja2

    return render_page(diagnosis, document(diagnosis, options))


def _line_to_change(diagnosis: Diagnosis, options: RenderOptions) -> str:
    first = next(iter(diagnosis.recommendations), None)
    if first is None or first.setting or not first.locations:
        return ""
    location = first.locations[0]
    here = replace(location, filename=relative(location.filename, options))
    return source_line(here, options.source_root)


def _what_it_is(diagnosis: Diagnosis) -> list[doc.Block]:
    """Return the finding in words: the summary, what else it may be, what would settle it."""
    verdict = diagnosis.verdict
    # What is proven has nothing left to settle.
    decider = "" if verdict.confidence is Confidence.PROVEN else verdict.decider
    facts = (("Also possible", words.also_text(verdict)), ("To settle", decider))
    further = (
        ("To settle", verdict.decider if not decider else ""),
        ("Evidence", "; ".join(words.evidence_text(e) for e in verdict.evidence)),
    )
    return [
        doc.Gap(),
        doc.Paragraph(verdict.summary),
        doc.Facts([(label, text) for label, text in facts if text]),
        doc.Facts([(label, text) for label, text in further if text], detail=doc.Detail.FULL),
    ]
