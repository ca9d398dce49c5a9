"""What ``fragdoctor check`` says: which files pass, which fail, and why."""

from __future__ import annotations

from typing import Final

from fragdoctor.gate.budgets import RESERVED_NOTE, Measures, Outcome, Reason
from fragdoctor.gate.judgement import CheckReport, FileJudgement, GateStatus
from fragdoctor.report import document as doc
from fragdoctor.report.document import Span, Style, code, dim, location_text, strong
from fragdoctor.report.words import shortened, source_name, verdict_title
from fragdoctor.units import format_size, plural

STATUS_WORDS: Final = {
    GateStatus.OK: ("ok", Style.GOOD),
    GateStatus.FAILED: ("FAILED", Style.BAD),
    GateStatus.ERROR: ("ERROR", Style.BAD),
}


def document(report: CheckReport) -> doc.ReportDocument:
    """Return the judgment of all files, failing files first."""
    failed = report.exit_code != 0
    title = "GPU memory check failed" if failed else "GPU memory check passed"
    if report.has_nothing:
        title = "Nothing to judge"
    files = sorted(report.files, key=lambda f: f.status is GateStatus.OK)
    listing = doc.Listing([_item(f) for f in files])
    tone = Style.BAD if failed else Style.GOOD
    return doc.ReportDocument(
        title=title,
        headline=[Span(title, tone), dim(f"  {total_line(report)}")],
        brief=[
            *(f"{_status_word(f)[0]:<6}  {file_name(f)}{_after_name(f)}" for f in files),
            total_line(report),
        ],
        sections=[
            doc.Section("Files", (listing,), id="files"),
            doc.Section("Remarks", (doc.Bullets(remarks(report)),), id="remarks"),
        ],
        tone=tone,
    )


def _status_word(judgement: FileJudgement) -> tuple[str, Style]:
    return STATUS_WORDS[judgement.status] if judgement.is_judged else ("-", Style.DIM)


def _item(judgement: FileJudgement) -> doc.ListItem:
    word, style = _status_word(judgement)
    head: doc.Content = [code(file_name(judgement)), _after_name(judgement)]
    details = _details(judgement)
    return doc.ListItem(head, (doc.Bullets(details),) if details else (), word, style)


def _details(judgement: FileJudgement) -> list[doc.Content]:
    lines: list[doc.Content] = []
    for reason in judgement.reasons:
        text, place = shortened(reason.text), place_text(reason)
        is_named = bool(reason.locations) and reason.locations[0].short in reason.text
        at: list[str | Span] = [" (", code(place), ")"] if place and not is_named else []
        lines.append([strong(reason.code), f": {text}", *at])
    lines += [
        [Span("warning", Style.WARN), f" {f.code}: {shortened(f.message)}"]
        for f in judgement.warnings
    ]
    lines += [
        f"{result.budget} not judged: {shortened(result.text)}"
        for result in judgement.budgets
        if result.outcome is Outcome.SKIP
    ]
    hint = hint_text(judgement)
    return [*lines, hint] if hint else lines


def file_name(judgement: FileJudgement) -> str:
    """Return the name of an input as people should read it."""
    return shortened(source_name(judgement.name))


def file_line(judgement: FileJudgement) -> str:
    """Return the outcome for one file: verdict and figures, or why it could not be read."""
    if judgement.error is not None:
        return shortened(judgement.error.sentence)
    if judgement.diagnosis is None:
        return judgement.remark
    parts = [verdict_title(judgement.diagnosis.verdict)]
    parts += [_measures(m) for m in judgement.measures]
    return "; ".join(p for p in parts if p)


def _after_name(judgement: FileJudgement) -> str:
    """Return what follows the name of a file; the sentence of an error may begin with the name."""
    name, line = file_name(judgement), file_line(judgement)
    return line.removeprefix(name) if line.startswith(f"{name} ") else f": {line}"


def _measures(m: Measures) -> str:
    """Return the figures of one device in a phrase; reserved memory comes last, as information."""
    parts = (
        (m.peak_bytes, f"peak {m.peak_kind} {format_size(m.peak_bytes)}"),
        (m.stranded_bytes, f"stranded {format_size(m.stranded_bytes)}"),
        (m.retries, plural(m.retries or 0, "retry", "retries")),
        (m.reserved_bytes, f"peak reserved {format_size(m.reserved_bytes)}"),
    )
    figures = ", ".join(text for value, text in parts if value is not None)
    return figures if m.is_only or not figures else f"GPU {m.device}: {figures}"


def place_text(reason: Reason) -> str:
    """Return the user's line that a reason is about, or "" if it is unknown."""
    return shortened(location_text(reason.locations[0])) if reason.locations else ""


def hint_text(judgement: FileJudgement) -> str:
    """Return what to try next if an input could not be read, or "" if there is no hint."""
    return shortened(judgement.error.hint) if judgement.error is not None else ""


def total_line(report: CheckReport) -> str:
    """Return the number of files for each outcome."""
    counts = (
        (GateStatus.FAILED, "failed"),
        (GateStatus.OK, "passed"),
        (GateStatus.ERROR, "could not be read"),
    )
    parts = [f"{n} {word}" for status, word in counts if (n := report.count(status))]
    if n_empty := sum(not f.is_judged for f in report.files):
        parts.append(f"{n_empty} with nothing to judge")
    return f"{plural(len(report.files), 'file')}: {', '.join(parts) or 'nothing to judge'}."


def remarks(report: CheckReport) -> list[str]:
    """Return remarks about the check as a whole."""
    lines = [
        f"--{name} could not be judged in any of the files, so the check does not pass."
        for name in report.unjudged
    ]
    if report.has_nothing:
        lines.append(
            "No figure of GPU memory and no failure was found, so the check does not pass: give it "
            "snapshots, memory_stats(), or logs of runs that print them."
        )
    n_new = sum(f.is_new for f in report.files)
    if n_new:
        lines.append(
            f"{plural(n_new, 'file is', 'files are')} not in the baseline: all findings count."
        )
    return [*lines, *report.notes, RESERVED_NOTE]
