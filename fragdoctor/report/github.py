"""GitHub workflow commands: an annotation for each result, at the user's line if it is known.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from typing import Final

from fragdoctor.gate.judgement import CheckReport
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Severity
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.results import Result, results_of_check, results_of_diagnosis, title_of
from fragdoctor.report.views.check import remarks, total_line
from fragdoctor.report.words import verdict_line

_COMMANDS: Final = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "notice",
}


def render(result: CheckReport | Diagnosis, options: RenderOptions) -> str:
    """Return an annotation for each result, then a check's totals or the verdict, as plain text."""
    if isinstance(result, CheckReport):
        found, said = results_of_check(result, options), [total_line(result), *remarks(result)]
    else:
        found, said = results_of_diagnosis(result, options), [verdict_line(result.verdict)]
    return "".join(
        f"{line}\n" for line in (*map(_annotation, found), *map(escape.github_message, said))
    )


def _annotation(result: Result) -> str:
    prop = escape.github_property
    place = result.place
    at = [f"file={prop(place.path)}"]
    if place.line is not None:
        at.append(f"line={place.line}")
    at.append(f"title={prop(f'{result.code} {title_of(result.code)}')}")
    message = escape.github_message(result.sourced)
    return f"::{_COMMANDS[result.level]} {','.join(at)}::{message}"
