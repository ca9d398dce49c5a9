"""SARIF 2.1.0 for code scanning: few results, each with a place and a fingerprint.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fragdoctor import __version__
from fragdoctor.errors import FragdoctorError
from fragdoctor.gate.judgement import CheckReport
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Severity
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.json import dumps
from fragdoctor.report.results import (
    Result,
    ResultPlace,
    results_of_check,
    results_of_diagnosis,
    title_of,
)
from fragdoctor.rules.registry import explanation, find_rule

Json = dict[str, Any]

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
FINGERPRINT: Final = "fragdoctor/v1"
_ROOT: Final = "%SRCROOT%"
_LEVELS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(result: CheckReport | Diagnosis, options: RenderOptions) -> str:
    """Return a log with one run: why files fail, or the findings from warnings up."""
    if isinstance(result, CheckReport):
        failures = [f.error for f in result.files if f.error is not None]
        results = list(results_of_check(result, options))
        return dumps(_log(results, failures, has_baseline=result.has_baseline))
    return dumps(_log(list(results_of_diagnosis(result, options)), ()))


def _log(
    results: Sequence[Result], failures: Sequence[FragdoctorError], *, has_baseline: bool = False
) -> Json:
    codes = sorted({r.code for r in results})
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "fragdoctor",
                        "version": __version__,
                        "semanticVersion": __version__,
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [_invocation(failures)],
                "results": [_result(r, codes.index(r.code), has_baseline) for r in results],
            }
        ],
    }


def _invocation(failures: Sequence[FragdoctorError]) -> Json:
    """Return whether all inputs could be read, with a notification for each that could not."""
    notes = [
        {
            "level": "error",
            "message": {"text": escape.visible(error.sentence)[:1000]},
        }
        for error in failures
    ]
    return {"executionSuccessful": not failures, "toolExecutionNotifications": notes}


def _rule(code: str) -> Json:
    rule = find_rule(code)
    document: Json = {"id": code, "shortDescription": {"text": title_of(code)}}
    if rule is not None:
        document["name"] = "".join(word.capitalize() for word in rule.name.split("-"))
        facts = "\n\n".join(f"{heading}: {text}" for heading, text in explanation(rule.text))
        document["fullDescription"] = {"text": rule.summary}
        document["help"] = {"text": facts or rule.summary}
        document["defaultConfiguration"] = {"level": _LEVELS[rule.severity]}
    return document


def _result(result: Result, rule_index: int, has_baseline: bool) -> Json:
    document: Json = {
        "ruleId": result.code,
        "ruleIndex": rule_index,
        "level": _LEVELS[result.level],
        "message": {"text": escape.visible(result.sourced)},
        "locations": [_location(result.place)],
        "partialFingerprints": {FINGERPRINT: escape.visible(result.fingerprint)},
    }
    if has_baseline:
        document["baselineState"] = "new"
    if len(result.stack) > 1:
        document["stacks"] = [
            {
                "message": {"text": "Allocated at, innermost first"},
                "frames": [{"location": _location(place)} for place in result.stack],
            }
        ]
    return document


def _location(place: ResultPlace) -> Json:
    artifact: Json = {"uri": place.uri}
    if place.is_relative:
        artifact["uriBaseId"] = _ROOT
    physical: Json = {"artifactLocation": artifact}
    if place.line is not None:
        physical["region"] = {"startLine": place.line}
    document: Json = {"physicalLocation": physical}
    if place.function:
        document["logicalLocations"] = [
            {"name": escape.visible(place.function)[:200], "kind": "function"}
        ]
    return document
