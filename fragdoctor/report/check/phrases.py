"""Sentences that the formats of a check share. Raw text: a format escapes it for its sink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.gate.budgets import RESERVED_NOTE, Measures, Outcome
from fragdoctor.gate.judgement import CheckReport, FileJudgement, Reason, Status
from fragdoctor.report.phrases import location_text, verdict_title
from fragdoctor.units import format_size, plural

MAX_TEXT: Final = 1000
"""Characters of one reason; a name of a megabyte must not become a megabyte of report."""


def shortened(text: str) -> str:
    """Return text of at most ``MAX_TEXT`` characters."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def file_name(judgement: FileJudgement) -> str:
    """Return the name of an input for people."""
    return "standard input" if judgement.name == "-" else shortened(judgement.name)


def file_line(judgement: FileJudgement) -> str:
    """Return what one file came out as: verdict and figures, or why it could not be read."""
    if judgement.error is not None:
        return shortened(judgement.error.sentence)
    if judgement.diagnosis is None:
        return judgement.remark
    parts = [verdict_title(judgement.diagnosis.verdict)]
    parts += [measures_text(m) for m in judgement.measures]
    return "; ".join(p for p in parts if p)


def measures_text(m: Measures) -> str:
    """Return the figures of one device in one phrase; reserved memory last, for information."""
    parts = []
    if m.peak_bytes is not None:
        parts.append(f"peak {m.peak_kind} {format_size(m.peak_bytes)}")
    if m.pinned_bytes is not None:
        parts.append(f"pinned {format_size(m.pinned_bytes)}")
    if m.retries is not None:
        parts.append(plural(m.retries, "retry", "retries"))
    if m.reserved_bytes is not None:
        parts.append(f"reserved {format_size(m.reserved_bytes)}")
    figures = ", ".join(parts)
    return figures if m.is_only or not figures else f"GPU {m.device}: {figures}"


def reason_text(reason: Reason) -> str:
    """Return why a file fails, in one sentence."""
    return shortened(reason.text)


def place_text(reason: Reason) -> str:
    """Return the user's line that a reason is about, "" where none is known."""
    return shortened(location_text(reason.locations[0])) if reason.locations else ""


def skipped_budgets(judgement: FileJudgement) -> Iterator[tuple[str, str]]:
    """Yield (budget, reason) for each budget that this input cannot answer."""
    for result in judgement.budgets:
        if result.outcome is Outcome.SKIP:
            yield result.budget, shortened(result.text)


def hint_text(judgement: FileJudgement) -> str:
    """Return what to try next where an input could not be read, "" where nothing is known."""
    return shortened(judgement.error.hint) if judgement.error is not None else ""


def total_line(report: CheckReport) -> str:
    """Return how many files came out how."""
    counts = (
        (Status.FAILED, "failed"),
        (Status.OK, "passed"),
        (Status.ERROR, "could not be read"),
    )
    parts = [f"{n} {word}" for status, word in counts if (n := report.count(status))]
    return f"{plural(len(report.files), 'file')}: {', '.join(parts) or 'nothing to judge'}."


def remarks(report: CheckReport) -> list[str]:
    """Return what has to be said about the check as a whole."""
    lines = [
        f"--{name} could be judged in none of the files, so the check does not pass."
        for name in report.unjudged
    ]
    n_new = sum(f.is_new for f in report.files)
    if n_new:
        lines.append(
            f"{plural(n_new, 'file is', 'files are')} not in the baseline: all findings count."
        )
    return [*lines, *report.notes, RESERVED_NOTE]
