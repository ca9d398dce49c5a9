"""What remains to be said: findings, corrected claims, capture, fidelity, skipped rules."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Finding, Severity
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import evidence_text, fidelity_line, location_text
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_count

_SHOWN: Final = 5
_STYLES: Final = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "dim",
}


def write_findings(page: Page, diagnosis: Diagnosis) -> None:
    """Write what the rules found; with --verbose all of it, with evidence and places."""
    verbose = page.options.verbosity is Verbosity.VERBOSE
    findings = sorted(diagnosis.findings, key=lambda f: (-int(f.severity), -f.n_bytes, f.code))
    shown = findings if verbose else [f for f in findings if f.severity > Severity.INFO][:_SHOWN]
    if shown:
        page.heading("Findings", "fragdoctor explain CODE tells more")
        page.table(
            [Column(), Column("wrap")],
            [[(f.code, _STYLES[f.severity]), f.message] for f in shown],
            below=[_below(f) if verbose else [] for f in shown],
        )
    if len(findings) > len(shown) and shown:
        n_more = format_count(len(findings) - len(shown))
        page.paragraph((f"{n_more} more with --verbose", "dim"))


def write_remarks(page: Page, diagnosis: Diagnosis) -> None:
    """Write corrected claims, notes on the capture, the replay's fidelity, skipped rules."""
    if diagnosis.corrections:
        page.heading("Often said, but wrong here")
        _bullets(page, list(diagnosis.corrections))
    fidelity = fidelity_line(diagnosis)
    if diagnosis.notes or fidelity:
        page.heading("About this input")
        _bullets(page, [*diagnosis.notes, *([fidelity] if fidelity else [])])
    if page.options.verbosity is Verbosity.VERBOSE:
        _write_skipped(page, diagnosis)
        _write_sources(page, diagnosis)


def _write_skipped(page: Page, diagnosis: Diagnosis) -> None:
    if diagnosis.skipped:
        page.heading("Skipped rules")
        page.table(
            [Column(), Column("wrap"), Column("wrap")],
            [[s.code, s.name, (s.reason, "dim")] for s in diagnosis.skipped],
        )


def _write_sources(page: Page, diagnosis: Diagnosis) -> None:
    if diagnosis.case.sources:
        page.heading("Inputs")
        page.table([Column("path")], [[source] for source in diagnosis.case.sources])


def _below(finding: Finding) -> list[Cell]:
    lines: list[Cell] = [(location_text(place), "dim") for place in finding.locations]
    if finding.evidence:
        lines.append(("; ".join(evidence_text(e) for e in finding.evidence), "dim"))
    return lines


def _bullets(page: Page, sentences: list[str]) -> None:
    for sentence in sentences:
        page.labelled("-", sentence, indent=2, label_width=2)
