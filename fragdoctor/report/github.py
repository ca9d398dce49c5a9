"""GitHub workflow commands: an annotation for each result, at the user's line where it is known.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fragdoctor.gate.judgement import CheckReport
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Severity
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.results import Result, results_of_check, results_of_diagnosis
from fragdoctor.report.views.check import remarks, total_line
from fragdoctor.report.words import verdict_line

_COMMANDS: Final = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "notice",
}


def render_check(report: CheckReport, options: RenderOptions) -> str:
    """Return one annotation for each reason, then the totals as plain text."""
    lines = [_annotation(r) for r in results_of_check(report, options)]
    plain = [total_line(report), *remarks(report)]
    return _text([*lines, *(escape.github_message(line) for line in plain)])


def render_diagnosis(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return one annotation for each finding from warnings on, then the verdict."""
    lines = [_annotation(r) for r in results_of_diagnosis(diagnosis, options)]
    return _text([*lines, escape.github_message(verdict_line(diagnosis.verdict))])


def _annotation(result: Result) -> str:
    prop = escape.github_property
    place = result.place
    at = [f"file={prop(place.path)}"]
    if place.line is not None:
        at.append(f"line={place.line}")
    at.append(f"title={prop(f'{result.code} {result.title}')}")
    source = "" if result.source in ("", place.path) else f" [{result.source}]"
    message = escape.github_message(f"{result.message}{source}")
    return f"::{_COMMANDS[result.level]} {','.join(at)}::{message}"


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def render_result(view: str, result: CheckReport | Diagnosis, options: RenderOptions) -> str:
    """Return the report of a check, or of a diagnosis: the result says which."""
    del view
    if isinstance(result, CheckReport):
        return render_check(result, options)
    return render_diagnosis(result, options)
