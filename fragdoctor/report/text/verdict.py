"""The head of the report: what it is, in one sentence with its two numbers."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import Cause, Diagnosis
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import CAUSE_TITLES, evidence_text, verdict_title
from fragdoctor.report.text.page import Page, Span

_LABEL_WIDTH: Final = 11


def verdict_style(cause: Cause) -> str:
    """Return the colour of a cause: green is well, yellow is open, red is a problem."""
    if cause in (Cause.HEALTHY, Cause.NOT_MEMORY):
        return "bold green"
    return "bold yellow" if cause is Cause.UNKNOWN else "bold red"


def write_verdict(page: Page, diagnosis: Diagnosis) -> None:
    """Write the verdict, what else the evidence supports, and what would settle the rest."""
    verdict = diagnosis.verdict
    head: list[Span] = [(verdict_title(verdict), verdict_style(verdict.cause))]
    if verdict.device is not None:
        head.append((f"  GPU {verdict.device}", "dim"))
    page.paragraph(head, indent=0)
    page.paragraph(verdict.summary, indent=0)
    if verdict.also:
        also = ", ".join(CAUSE_TITLES[c].lower() for c in verdict.also)
        _labelled(page, "Also", also)
    if verdict.decider:
        _labelled(page, "To settle", verdict.decider)
    if page.options.verbosity is Verbosity.VERBOSE and verdict.evidence:
        _labelled(page, "Evidence", "; ".join(evidence_text(e) for e in verdict.evidence))


def _labelled(page: Page, label: str, body: str) -> None:
    page.labelled((label, "dim"), body, indent=0, label_width=_LABEL_WIDTH)
