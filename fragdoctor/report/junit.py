"""JUnit XML: a suite for each input, a case for each budget and for the findings.

The dialect that CI servers share: ``testsuites / testsuite / testcase`` with ``failure``,
``error`` or ``skipped`` inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.frozen import frozen
from fragdoctor.gate.budgets import Outcome
from fragdoctor.gate.judgement import CheckReport, FileJudgement, Reason
from fragdoctor.model.diagnosis import ChecklistItem, Diagnosis, Status
from fragdoctor.model.finding import Severity
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.views.check import file_line, file_name, hint_text, place_text, shortened
from fragdoctor.report.words import verdict_line

_BUDGETS: Final = (
    "max-peak",
    "max-stranded",
    "max-retries",
    "min-headroom",
    "fits-on",
    "no-growth",
)

xml = escape.xml


@frozen
class _Case:
    """One test case; ``kind`` is "" (passed), ``failure``, ``error`` or ``skipped``."""

    name: str
    kind: str = ""
    message: str = ""
    body: Sequence[str] = ()


@frozen
class _Suite:
    name: str
    cases: Sequence[_Case]
    out: str = ""

    def count(self, kind: str) -> int:
        return sum(c.kind == kind for c in self.cases)


def render_check(report: CheckReport) -> str:
    """Return one suite for each input."""
    suites = [_Suite(file_name(f), _cases(f), file_line(f)) for f in report.files]
    if report.unjudged:
        message = "could be judged in none of the files"
        cases = [_Case(name, "error", f"--{name} {message}") for name in report.unjudged]
        suites.append(_Suite("budgets", cases))
    return _document(suites)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Return one suite: a case for each item of the checklist, and one for the findings."""
    name = ", ".join(shortened(s) for s in diagnosis.case.sources[:10]) or "input"
    cases = [_item(i) for i in diagnosis.checklist]
    errors = [f for f in diagnosis.findings if f.severity is Severity.ERROR]
    lines = [f"{f.code}: {f.message}" for f in errors]
    cases.append(_Case("findings", "failure", lines[0], lines) if lines else _Case("findings"))
    return _document([_Suite(name, cases, verdict_line(diagnosis.verdict))])


def _cases(judgement: FileJudgement) -> list[_Case]:
    error = judgement.error
    if error is not None:
        return [_Case("read", "error", error.sentence, [hint_text(judgement)])]
    cases = [_Case("read")]
    exceeded = {r.code: r for r in judgement.reasons if r.code in _BUDGETS}
    for result in judgement.budgets:
        reason = exceeded.get(result.budget)
        if reason is not None:
            cases.append(_Case(result.budget, "failure", reason.text, [_line(reason)]))
        elif result.outcome is Outcome.SKIP:
            cases.append(_Case(result.budget, "skipped", result.text))
        else:
            cases.append(_Case(result.budget))
    others = [r for r in judgement.reasons if r.code not in _BUDGETS]
    lines = [_line(r) for r in others]
    cases.append(
        _Case("findings", "failure", others[0].text, lines) if others else _Case("findings")
    )
    return cases


def _line(reason: Reason) -> str:
    place = place_text(reason)
    return shortened(f"{reason.code}: {reason.text}") + (f" [{place}]" if place else "")


def _item(item: ChecklistItem) -> _Case:
    message = ": ".join(part for part in (item.value, item.detail) if part)
    if item.status is Status.FAIL:
        return _Case(item.id, "failure", message, [item.title, message])
    if item.status is Status.SKIP:
        return _Case(item.id, "skipped", message)
    return _Case(item.id)


def _document(suites: Sequence[_Suite]) -> str:
    n_cases = sum(len(s.cases) for s in suites)
    counts = " ".join(
        f'{attribute}="{sum(s.count(kind) for s in suites)}"'
        for attribute, kind in (
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        )
    )
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="fragdoctor" tests="{n_cases}" {counts}>',
        *(line for suite in suites for line in _suite(suite)),
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _suite(suite: _Suite) -> list[str]:
    head = (
        f'  <testsuite name="{xml(suite.name)}" tests="{len(suite.cases)}"'
        f' failures="{suite.count("failure")}" errors="{suite.count("error")}"'
        f' skipped="{suite.count("skipped")}">'
    )
    lines = [head, *(line for case in suite.cases for line in _case(case, suite.name))]
    if suite.out:
        lines.append(f"    <system-out>{xml(suite.out)}</system-out>")
    return [*lines, "  </testsuite>"]


def _case(case: _Case, suite: str) -> list[str]:
    head = f'    <testcase name="{xml(case.name)}" classname="{xml(suite)}"'
    if not case.kind:
        return [f"{head}/>"]
    message = f'message="{xml(shortened(case.message))}"'
    if case.kind == "skipped":
        return [f"{head}>", f"      <skipped {message}/>", "    </testcase>"]
    body = "\n".join(xml(line) for line in case.body)
    return [
        f"{head}>",
        f'      <{case.kind} {message} type="{case.kind}">{body}</{case.kind}>',
        "    </testcase>",
    ]


def render_result(view: str, result: CheckReport | Diagnosis, options: RenderOptions) -> str:
    """Return the report of a check, or of a diagnosis: the result says which."""
    del view
    del options
    return render_check(result) if isinstance(result, CheckReport) else render_diagnosis(result)
