"""JUnit XML: a suite for each input, a case for each budget and for the findings.

The dialect that CI servers share: ``testsuites / testsuite / testcase`` with ``failure``,
``error`` or ``skipped`` inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element, SubElement

from msgspec import Struct

from fragdoctor.gate.budgets import Budgets, Outcome, Reason
from fragdoctor.gate.judgement import CheckReport, FileJudgement
from fragdoctor.model.diagnosis import ChecklistItem, Diagnosis, Status
from fragdoctor.model.finding import Severity
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.views.check import file_line, file_name, hint_text, place_text
from fragdoctor.report.words import shortened, verdict_line

_BUDGETS: Final = tuple(name.replace("_", "-") for name in Budgets.__struct_fields__)


class _Case(Struct, frozen=True):
    """One test case; ``kind`` is "" (passed), ``failure``, ``error`` or ``skipped``."""

    name: str
    kind: str = ""
    message: str = ""
    body: Sequence[str] = ()


def render(result: CheckReport | Diagnosis, options: RenderOptions) -> str:
    """Return a suite for each input of a check, or a single suite for a diagnosis.

    The suite of a diagnosis has a case for each checklist item, and one for the findings.
    """
    del options
    root = _element(None, "testsuites", name="fragdoctor")
    if isinstance(result, CheckReport):
        for judgement in result.files:
            _add(root, file_name(judgement), _cases(judgement), file_line(judgement))
        message = "could not be judged in any of the files"
        unjudged = [_Case(name, "error", f"--{name} {message}") for name in result.unjudged]
        if unjudged:
            _add(root, "budgets", unjudged)
    else:
        name = ", ".join(shortened(s) for s in result.case.sources[:10]) or "input"
        errors = [f for f in result.findings if f.severity is Severity.ERROR]
        lines = [f"{f.code}: {f.message}" for f in errors]
        cases = [*map(_item, result.checklist), _findings(lines[:1], lines)]
        _add(root, name, cases, verdict_line(result.verdict))
    for element in (root, *root):
        for count, tag in _COUNTS.items():
            element.set(count, str(len([*element.iter(tag)])))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, "unicode")}\n'


_COUNTS: Final = {
    "tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped",
}  # fmt: skip


def _add(root: Element, name: str, cases: Iterable[_Case], out: str = "") -> None:
    suite = _element(root, "testsuite", name=name)
    for case in cases:
        found = _element(suite, "testcase", name=case.name, classname=name)
        if case.kind:
            message = shortened(case.message)
            kind = {} if case.kind == "skipped" else {"type": case.kind}
            _element(found, case.kind, case.body, message=message, **kind)
    if out:
        _element(suite, "system-out", [out])


def _element(
    parent: Element | None, tag: str, lines: Sequence[str] = (), **attributes: str
) -> Element:
    """Return a new element; its text is made visible here, and escaped when it is written."""
    shown = {name: escape.visible(value) for name, value in attributes.items()}
    element = Element(tag, shown) if parent is None else SubElement(parent, tag, shown)
    element.text = "\n".join(map(escape.visible, lines)) or None
    return element


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
    return [*cases, _findings([r.text for r in others[:1]], lines)]


def _findings(message: Sequence[str], lines: Sequence[str]) -> _Case:
    return _Case("findings", "failure", message[0], lines) if message else _Case("findings")


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
