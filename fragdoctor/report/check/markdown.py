"""The report of a check as Markdown: fits a pull request and ``$GITHUB_STEP_SUMMARY``."""

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

MAX_BYTES: Final = 900_000
"""GitHub drops a step summary of more than 1 MiB altogether."""

_WORDS: Final = {Status.OK: "passed", Status.FAILED: "**FAILED**", Status.ERROR: "**ERROR**"}

md = escape.markdown


def render_check(report: CheckReport, options: RenderOptions) -> str:
    """Return a table of files, then the reasons of each file that fails."""
    failed = report.exit_code != 0
    title = "GPU memory check failed" if failed else "GPU memory check passed"
    blocks = [f"## {title}", total_line(report)]
    rows = [
        f"| {_WORDS[f.status]} | {_code(file_name(f))} | {md(file_line(f))} |"
        for f in _shown(report)
    ]
    blocks.append("\n".join(["| | File | Verdict and figures |", "| --- | --- | --- |", *rows]))
    if options.verbosity is not Verbosity.QUIET:
        blocks += [b for f in _shown(report) if (b := _details(f))]
        blocks.append("\n".join(f"- {md(line)}" for line in remarks(report)))
    return _bounded(blocks)


def _shown(report: CheckReport) -> list[FileJudgement]:
    """Return the files, those that do not pass first."""
    return sorted(report.files, key=lambda f: f.status is Status.OK)


def _details(judgement: FileJudgement) -> str:
    lines = []
    for reason in judgement.reasons:
        place = place_text(reason)
        at = f" at {_code(place)}" if place else ""
        lines.append(f"- **{md(reason.code)}**: {md(reason_text(reason))}{at}")
    lines += [f"- {md(b)} not judged: {md(reason)}" for b, reason in skipped_budgets(judgement)]
    if hint := hint_text(judgement):
        lines.append(f"- {md(hint)}")
    return "\n".join([f"### {_code(file_name(judgement))}", "", *lines]) if lines else ""


def _bounded(blocks: list[str]) -> str:
    """Return the blocks as far as they fit, and say what was left out."""
    kept: list[str] = []
    size = 0
    for block in blocks:
        size += len(block.encode("utf-8", "surrogatepass")) + 2
        if size > MAX_BYTES:
            kept.append("The rest is left out: the summary would be too long.")
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _code(text: str) -> str:
    return escape.markdown_code(text, in_table=True)
