"""The report of a check for a terminal or a CI log: one line a file, and the reasons."""

from __future__ import annotations

from typing import Final

from fragdoctor.gate.judgement import CheckReport, FileJudgement, Status
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.check.phrases import (
    file_line,
    file_name,
    hint_text,
    place_text,
    reason_text,
    remarks,
    skipped_budgets,
    total_line,
)

_WORDS: Final = {Status.OK: "ok", Status.FAILED: "FAILED", Status.ERROR: "ERROR"}
_COLORS: Final = {Status.OK: "32", Status.FAILED: "1;31", Status.ERROR: "1;35"}
_INDENT: Final = " " * 8


def render_check(report: CheckReport, options: RenderOptions) -> str:
    """Return the report; quiet leaves the reasons out."""
    lines: list[str] = []
    for judgement in report.files:
        lines.append(_head(judgement, options))
        if options.verbosity is not Verbosity.QUIET:
            lines += [f"{_INDENT}{escape.terminal(line)}" for line in _details(judgement)]
    lines.append(total_line(report))
    if options.verbosity is not Verbosity.QUIET:
        lines += [escape.terminal(line) for line in remarks(report)]
    return "\n".join(lines) + "\n"


def _head(judgement: FileJudgement, options: RenderOptions) -> str:
    word = _WORDS[judgement.status].ljust(6)
    if options.color:
        word = f"\x1b[{_COLORS[judgement.status]}m{word}\x1b[0m"
    name, line = escape.terminal(file_name(judgement)), escape.terminal(file_line(judgement))
    return f"{word}  {name}: {line}"


def _details(judgement: FileJudgement) -> list[str]:
    lines = []
    for reason in judgement.reasons:
        place = place_text(reason)
        at = f" [{place}]" if place else ""
        lines.append(f"{reason.code}: {reason_text(reason)}{at}")
    lines += [f"{name}: not judged: {reason}" for name, reason in skipped_budgets(judgement)]
    hint = hint_text(judgement)
    return [*lines, hint] if hint else lines
