"""The report of many ranks as JSON: schema/fleet-1.0.schema.json."""

from __future__ import annotations

from typing import Any

from fragdoctor.model.finding import Severity
from fragdoctor.model.fleet import (
    FLEET_SCHEMA_VERSION,
    Difference,
    FleetReport,
    OddRank,
    RankAdvice,
    RankFinding,
    RankGroup,
    RankRow,
    Skew,
    SourceLine,
)
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.json import device_document, dumps

Json = dict[str, Any]


def render_fleet(report: FleetReport, options: RenderOptions) -> str:  # noqa: ARG001 - Renderer
    """Return the document of ``fragdoctor analyze`` for several ranks."""
    return dumps(fleet_document(report))


def fleet_document(report: FleetReport) -> Json:
    """Return the whole report as plain values."""
    verdict = report.verdict
    return {
        "schema_version": FLEET_SCHEMA_VERSION,
        "kind": "fleet",
        "verdict": {
            "cause": verdict.cause.value,
            "summary": verdict.summary,
            "n_ranks": verdict.n_ranks,
            "n_read": verdict.n_read,
            "n_failed": verdict.n_failed,
            "first_failed": verdict.first_failed or None,
            "odd": list(verdict.odd),
            "failed": list(verdict.failed),
        },
        "skew": [_skew(s) for s in report.skew],
        "groups": [_group(g) for g in report.groups],
        "odd": [_odd(o) for o in report.odd],
        "ranks": [_rank(row) for row in report.rows],
        "notes": list(report.notes),
    }


def _skew(skew: Skew) -> Json:
    return {
        "name": skew.name,
        "n": skew.n,
        "minimum": skew.minimum,
        "median": skew.median,
        "maximum": skew.maximum,
        "mad": skew.mad,
        "over_median": skew.over_median,
        "path": skew.path,
        "label": skew.label,
        "n_highest": skew.n_highest,
    }


def _group(group: RankGroup) -> Json:
    return {
        "id": group.id,
        "paths": list(group.paths),
        "labels": list(group.labels),
        "cause": group.cause.value,
        "n_failed": group.n_failed,
        "median_peak_bytes": group.median_peak_bytes,
        "min_peak_bytes": group.min_peak_bytes,
        "max_peak_bytes": group.max_peak_bytes,
        "median_pinned_free_bytes": group.median_pinned_bytes,
        "median_alloc_retries": group.median_retries,
        "settings": dict(group.settings),
        "holders": [_line(h) for h in group.holders],
        "is_odd": group.is_odd,
        "reference": group.reference or None,
        "differences": [_difference(d) for d in group.differences],
        "representative": group.representative,
        "recommendation": _advice(group.advice),
    }


def _odd(odd: OddRank) -> Json:
    return {
        "path": odd.path,
        "label": odd.label,
        "group": odd.group,
        "reference": odd.reference or None,
        "differences": [_difference(d) for d in odd.differences],
    }


def _difference(difference: Difference) -> Json:
    return {
        "kind": difference.kind.value,
        "text": difference.text,
        "name": difference.name or None,
        "location": None if difference.line is None else _line(difference.line),
        "value": difference.value,
        "others": difference.others,
        "delta_bytes": difference.delta_bytes,
    }


def _rank(row: RankRow) -> Json:
    r = row.rank
    return {
        "label": row.label,
        "group": row.group or None,
        "is_odd": row.is_odd,
        "path": r.path,
        "inputs": list(r.inputs),
        "rank": r.rank,
        "rank_source": r.rank_source.value or None,
        "local_rank": r.local_rank,
        "host": r.host or None,
        "job": r.job or None,
        "status": "ok" if r.is_read else "error",
        "error": None
        if r.is_read
        else {"code": r.error_code, "message": r.error, "hint": r.hint, "exit_code": r.exit_code},
        "verdict": {"cause": r.cause.value, "confidence": r.confidence, "summary": r.summary}
        if r.is_read
        else None,
        "has_failed": r.has_failed,
        "refused_bytes": r.refused_bytes,
        "device": None if r.figures is None else device_document(r.figures),
        "conf": r.conf,
        "settings": dict(r.settings) if r.settings_known else None,
        "version_low": r.version_low,
        "version_high": r.version_high,
        "holders": [_line(h) for h in r.holders],
        "pins": [_line(p) for p in r.pins],
        "sites": [_line(s) for s in r.sites],
        "findings": [_finding(f) for f in r.findings],
        "recommendation": _advice(r.advice),
        "large_sizes": [{"size_bytes": size, "n": n} for size, n in r.large_sizes],
        "size_histogram": [{"log2": log, "n": n} for log, n in r.size_histogram],
        "n_events": r.n_events,
        "n_allocs": r.n_allocs,
        "first_us": r.first_us,
        "last_us": r.last_us,
        "failed_us": r.failed_us,
        "is_replayed": r.is_replayed,
    }


def _line(line: SourceLine) -> Json:
    return {
        "filename": line.filename,
        "line": line.line,
        "function": line.function,
        "n_bytes": line.n_bytes,
        "n_blocks": line.n_blocks,
    }


def _finding(finding: RankFinding) -> Json:
    return {
        "code": finding.code,
        "severity": Severity(finding.severity).name.lower(),
        "n_bytes": finding.n_bytes,
    }


def _advice(advice: RankAdvice | None) -> Json | None:
    if advice is None:
        return None
    return {
        "code": advice.code,
        "title": advice.title,
        "setting": advice.setting,
        "change": advice.change,
        "confidence": advice.confidence,
        "method": advice.method,
        "fits": advice.fits,
    }
