"""The report of a check as JSON: schema/check-1.0.schema.json."""

from __future__ import annotations

from typing import Any

from fragdoctor.gate.budgets import BudgetResult, Measures
from fragdoctor.gate.judgement import CheckReport, FileJudgement, Reason
from fragdoctor.model.diagnosis import SCHEMA_VERSION
from fragdoctor.model.finding import Finding
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.json import dumps
from fragdoctor.report.location_json import location_document

Json = dict[str, Any]


def render_check(report: CheckReport, options: RenderOptions) -> str:  # noqa: ARG001 - Renderer
    """Return the document of ``fragdoctor check``."""
    return dumps(check_document(report))


def check_document(report: CheckReport) -> Json:
    """Return the whole judgement as plain values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": report.exit_code,
        "budgets": list(report.budgets),
        "unjudged": list(report.unjudged),
        "has_baseline": report.has_baseline,
        "files": [_file(f) for f in report.files],
        "notes": list(report.notes),
    }


def _file(judgement: FileJudgement) -> Json:
    error, diagnosis = judgement.error, judgement.diagnosis
    return {
        "name": judgement.name,
        "status": judgement.status.value,
        "exit_code": judgement.exit_code,
        "verdict": None
        if diagnosis is None
        else {
            "cause": diagnosis.verdict.cause.value,
            "confidence": diagnosis.verdict.confidence.value,
            "summary": diagnosis.verdict.summary,
            "device": diagnosis.verdict.device,
        },
        "devices": [_measures(m) for m in judgement.measures],
        "reasons": [_reason(r) for r in judgement.reasons],
        "budgets": [_budget(b) for b in judgement.budgets],
        "findings": [_finding(f) for f in judgement.findings],
        "in_baseline": not judgement.is_new,
        "error": None
        if error is None
        else {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "offset": error.offset,
        },
    }


def _measures(m: Measures) -> Json:
    return {
        "device": m.device,
        "peak_bytes": m.peak_bytes,
        "peak_kind": m.peak_kind,
        "pinned_free_bytes": m.pinned_bytes,
        "alloc_retries": m.retries,
        "ooms": m.ooms,
        "capacity_bytes": m.capacity_bytes,
        "peak_reserved_bytes": m.reserved_bytes,
    }


def _reason(reason: Reason) -> Json:
    return {
        "code": reason.code,
        "severity": reason.severity.name.lower(),
        "message": reason.text,
        "device": reason.device,
        "locations": [location_document(place) for place in reason.locations],
        "fingerprint": reason.fingerprint,
    }


def _budget(result: BudgetResult) -> Json:
    return {
        "budget": result.budget,
        "outcome": result.outcome.value,
        "message": result.text,
        "device": result.device,
        "measured": result.measured,
        "limit": result.limit,
    }


def _finding(finding: Finding) -> Json:
    return {
        "code": finding.code,
        "severity": finding.severity.name.lower(),
        "message": finding.message,
        "device": finding.device,
        "n_bytes": finding.n_bytes,
        "fingerprint": finding.fingerprint,
    }
