"""JSON of the training phases; a part of the ``analyze`` document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fragdoctor.model.phases import CategoryShare, PhaseFigures, PhaseReport
from fragdoctor.report.location_json import location_document

Json = dict[str, Any]


def phase_document(report: PhaseReport) -> Json:
    """Return the phases of one device."""
    return {
        "device": report.device,
        "method": report.method,
        "reason": report.reason,
        "phases": [_figures(p) for p in report.phases],
        "peak_phase": report.peak_phase.value,
        "peak_bytes": report.peak_bytes,
        "at_peak": _shares(report.at_peak),
        "at_rest": _shares(report.at_rest),
        "rest_bytes": report.rest_bytes,
        "coverage": report.coverage,
        "n_spans": report.n_spans,
        "spans": [
            {
                "phase": s.phase.value,
                "first_event": s.first_event,
                "last_event": s.last_event,
                "peak_bytes": s.peak_bytes,
            }
            for s in report.spans
        ],
    }


def _figures(figures: PhaseFigures) -> Json:
    return {
        "phase": figures.phase.value,
        "n_passes": figures.n_passes,
        "median_peak_bytes": figures.median_peak_bytes,
        "worst_peak_bytes": figures.worst_peak_bytes,
        "worst_event": figures.worst_event,
        "held": _shares(figures.held),
    }


def _shares(shares: Sequence[CategoryShare]) -> list[Json]:
    return [
        {
            "category": s.category.value,
            "bytes": s.n_bytes,
            "n_blocks": s.n_blocks,
            "confidence": s.confidence.value,
            "lines": [
                {"location": location_document(x.location), "bytes": x.n_bytes} for x in s.lines
            ],
        }
        for s in shares
    ]
