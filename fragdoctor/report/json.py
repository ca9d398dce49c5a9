"""JSON: the same facts as the text, with byte counts as integers and unknowns as null.

``schema/*.schema.json`` describe these documents; ``tests/report/test_json.py`` holds them
together. Within ``schema_version`` 1.x fields are only added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fragdoctor.model.diagnosis import (
    SCHEMA_VERSION,
    ChecklistItem,
    DeviceFigures,
    Diagnosis,
    FidelityReport,
    HolderReport,
    PinReport,
    Predicted,
    Recommendation,
    Verdict,
)
from fragdoctor.model.finding import Evidence, Finding
from fragdoctor.model.oom import LogMarker, OomMessage
from fragdoctor.model.simulation import ReplayResult, Simulation
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.location_json import location_document
from fragdoctor.report.phase_json import phase_document
from fragdoctor.report.story_json import story_document

Json = dict[str, Any]

_MESSAGE_FIELDS: Final = (
    "kind",
    "backend",
    "is_device_oom",
    "device_index",
    "requested_bytes",
    "total_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reserved_unallocated_bytes",
    "process_bytes",
    "private_pools_bytes",
    "limit_bytes",
    "rank",
    "line",
    "variant",
    "sub_kind",
    "is_warning",
)
_DEVICE_FIELDS: Final = (
    "device",
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "free_cached_bytes",
    "releasable_bytes",
    "pinned_free_bytes",
    "largest_free_block_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "alloc_retries",
    "ooms",
    "capacity_bytes",
    "n_events",
    "peak_active_bytes",
    "private_pools_bytes",
    "pending_free_bytes",
)
_RESULT_FIELDS: Final = (
    "conf",
    "edit",
    "capacity_bytes",
    "memory_fraction",
    "fits",
    "oom_event",
    "oom_bytes",
    "peak_reserved_bytes",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "final_reserved_bytes",
    "retries",
    "ooms",
    "driver_calls",
    "margin_bytes",
    "n_replayed",
    "torch_version",
    "smallest_capacity_bytes",
    "smallest_capacity_note",
    "note",
)


def render_diagnosis(diagnosis: Diagnosis, options: RenderOptions) -> str:  # noqa: ARG001 - Renderer
    """Return the document of ``fragdoctor analyze``."""
    return dumps(diagnosis_document(diagnosis))


def diagnosis_document(diagnosis: Diagnosis) -> Json:
    """Return the ``analyze`` document: schema/diagnosis-1.0.schema.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sources": list(diagnosis.case.sources),
        "verdict": _verdict(diagnosis.verdict),
        "checklist": [_checklist_item(item) for item in diagnosis.checklist],
        "devices": [device_document(d) for d in diagnosis.devices],
        "pins": [_pin(p) for p in diagnosis.pins],
        "holders": [_holder(h) for h in diagnosis.holders],
        "fidelity": _fidelity(diagnosis.fidelity),
        "findings": [_finding(f) for f in diagnosis.findings],
        "skipped": [
            {"code": s.code, "name": s.name, "reason": s.reason} for s in diagnosis.skipped
        ],
        "recommendations": [_recommendation(r) for r in diagnosis.recommendations],
        "rejected": [_recommendation(r) for r in diagnosis.rejected],
        "corrections": list(diagnosis.corrections),
        "notes": list(diagnosis.notes),
        "phases": [phase_document(p) for p in diagnosis.phases],
        "story": story_document(diagnosis.story),
    }


def oom_document(diagnosis: Diagnosis) -> Json:
    """Return the ``oom`` document: schema/oom-1.0.schema.json."""
    log = diagnosis.case.oom
    whole = diagnosis_document(diagnosis)
    return {
        "schema_version": SCHEMA_VERSION,
        "sources": whole["sources"],
        "messages": [message_document(m) for m in log.messages] if log else [],
        "primary": log.primary if log and log.messages else None,
        "markers": [_marker(m) for m in log.markers] if log else [],
        **{
            key: whole[key]
            for key in (
                "verdict",
                "checklist",
                "devices",
                "findings",
                "skipped",
                "recommendations",
                "rejected",
                "corrections",
                "notes",
                "story",
            )
        },
    }


def simulation_document(simulation: Simulation) -> Json:
    """Return the ``simulate`` document: schema/simulation-1.0.schema.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": simulation.device,
        "method": simulation.method,
        "lower_bound_bytes": simulation.lower_bound_bytes,
        "baseline": _result(simulation.baseline),
        "results": [_result(r) for r in simulation.results],
        "best": None if simulation.best is None else _result(simulation.best),
        "pareto": [_result(r) for r in simulation.pareto],
        "fidelity": _fidelity(simulation.fidelity),
        "notes": list(simulation.notes),
    }


def error_document(code: str, message: str, hint: str = "", offset: int | None = None) -> Json:
    """Return the document that stands on standard output when there is no result."""
    return {
        "error": {"code": code, "message": message, "hint": hint, "offset": offset},
    }


def message_document(message: OomMessage) -> Json:
    """Return one message with the figures that it prints."""
    document = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
    document["other_processes"] = [
        {"pid": p.pid, "bytes": p.n_bytes} for p in message.other_processes
    ]
    document["live_bytes"] = message.live_bytes
    document["text"] = message.text
    return document


def dumps(document: Json) -> str:
    """Return a document as ASCII JSON, ending in a newline.

    Everything beyond ASCII is written as an escape, so that no control or bidirectional character
    reaches a terminal; numbers that JSON does not know become null.
    """
    return json.dumps(_plain(document), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:  # noqa: PLR0911 - one line a type
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return escape.json_text(str(value))
    if isinstance(value, Mapping):
        return {escape.json_text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "item"):  # a numpy scalar
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return escape.json_text(str(value))


def _verdict(verdict: Verdict) -> Json:
    return {
        "cause": verdict.cause.value,
        "confidence": verdict.confidence.value,
        "summary": verdict.summary,
        "device": verdict.device,
        "also": [c.value for c in verdict.also],
        "evidence": [_evidence(e) for e in verdict.evidence],
        "decider": verdict.decider,
    }


def _checklist_item(item: ChecklistItem) -> Json:
    return {
        "id": item.id,
        "title": item.title,
        "status": item.status.value,
        "value": item.value,
        "detail": item.detail,
        "source": item.source,
    }


def device_document(figures: DeviceFigures) -> Json:
    """Return the figures of one device: an entry of ``devices``."""
    return {name: getattr(figures, name) for name in _DEVICE_FIELDS}


def _pin(pin: PinReport) -> Json:
    return {
        "device": pin.device,
        "n_blocks": pin.n_blocks,
        "block_bytes": pin.block_bytes,
        "pinned_bytes": pin.pinned_bytes,
        "location": location_document(pin.location),
        "stack": [location_document(f) for f in pin.stack],
        "age_events": pin.age_events,
    }


def _holder(holder: HolderReport) -> Json:
    return {
        "device": holder.device,
        "now_bytes": holder.now_bytes,
        "peak_bytes": holder.peak_bytes,
        "n_blocks": holder.n_blocks,
        "location": location_document(holder.location),
        "stack": [location_document(f) for f in holder.stack],
    }


def _fidelity(fidelity: FidelityReport) -> Json:
    return {
        "share": fidelity.share,
        "era": fidelity.era or None,
        "reason": fidelity.reason,
        "details": dict(fidelity.details),
    }


def _finding(finding: Finding) -> Json:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.name.lower(),
        "confidence": finding.confidence.value,
        "message": finding.message,
        "device": finding.device,
        "n_bytes": finding.n_bytes,
        "evidence": [_evidence(e) for e in finding.evidence],
        "locations": [location_document(place) for place in finding.locations],
        "fingerprint": finding.fingerprint,
    }


def _recommendation(one: Recommendation) -> Json:
    return {
        "rank": one.rank,
        "code": one.code,
        "title": one.title,
        "setting": one.setting,
        "change": one.change,
        "why": one.why,
        "locations": [location_document(place) for place in one.locations],
        "predicted": _predicted(one.predicted),
        "confidence": one.confidence.value,
        "cost": one.cost,
        "caveats": list(one.caveats),
        "verify": one.verify,
        "evidence": [_evidence(e) for e in one.evidence],
        "saves_bytes": one.saves_bytes,
    }


def _predicted(predicted: Predicted) -> Json:
    return {
        "fits": predicted.fits,
        "peak_reserved_bytes": predicted.peak_reserved_bytes,
        "retries": predicted.retries,
        "method": predicted.method,
        "driver_calls": predicted.driver_calls,
        "margin_bytes": predicted.margin_bytes,
        "fidelity_share": predicted.fidelity_share,
    }


def _result(result: ReplayResult) -> Json:
    return {name: getattr(result, name) for name in _RESULT_FIELDS}


def _evidence(evidence: Evidence) -> Json:
    return {
        "name": evidence.name,
        "value": evidence.value,
        "unit": evidence.unit,
        "source": evidence.source,
    }


def _marker(marker: LogMarker) -> Json:
    return {"kind": marker.kind, "line": marker.line, "rank": marker.rank, "text": marker.text}
