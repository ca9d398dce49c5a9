"""The report for people at a terminal: verdict first, then the evidence, then what to do."""

from __future__ import annotations

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.phrases import verdict_line
from fragdoctor.report.text.advice import write_recommendations, write_rejected
from fragdoctor.report.text.checklist import write_checklist
from fragdoctor.report.text.holders import write_holders, write_pins
from fragdoctor.report.text.memory import write_memory
from fragdoctor.report.text.messages import write_messages
from fragdoctor.report.text.page import Page
from fragdoctor.report.text.phases import write_phases
from fragdoctor.report.text.remarks import write_findings, write_remarks
from fragdoctor.report.text.segments import write_segments
from fragdoctor.report.text.story import write_story
from fragdoctor.report.text.timeline import write_timeline
from fragdoctor.report.text.verdict import write_verdict


def render_diagnosis(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the report as text; with ``Verbosity.QUIET`` the verdict in one line."""
    if options.verbosity is Verbosity.QUIET:
        return escape.terminal(verdict_line(diagnosis.verdict)) + "\n"
    page = Page(options)
    write_verdict(page, diagnosis)
    write_messages(page, diagnosis)
    write_story(page, diagnosis)
    write_checklist(page, diagnosis)
    write_memory(page, diagnosis)
    write_timeline(page, diagnosis)
    write_phases(page, diagnosis)
    write_pins(page, diagnosis)
    write_segments(page, diagnosis)
    write_holders(page, diagnosis)
    write_recommendations(page, diagnosis)
    write_rejected(page, diagnosis)
    write_findings(page, diagnosis)
    write_remarks(page, diagnosis)
    return page.render()
