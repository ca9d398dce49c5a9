"""The comparison as JSON: schema/compare-1.0.schema.json. Bytes are integers, unknown is null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fragdoctor.gate.judgement import Growth, has_grown
from fragdoctor.model.comparison import Comparison, Figure, LineChange, RunSide, Trend
from fragdoctor.model.diagnosis import SCHEMA_VERSION
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.json import dumps
from fragdoctor.report.location_json import location_document

Json = dict[str, Any]


def render_comparison(
    comparison: Comparison,
    judged: Sequence[Growth],
    options: RenderOptions,  # noqa: ARG001 - CompareRenderer
) -> str:
    """Return the document of ``fragdoctor compare``."""
    return dumps(comparison_document(comparison, judged))


def comparison_document(comparison: Comparison, judged: Sequence[Growth] = ()) -> Json:
    """Return the whole comparison as plain values."""
    c = comparison
    return {
        "schema_version": SCHEMA_VERSION,
        "summary": c.summary,
        "is_same": c.is_same,
        "runs": [_run(r) for r in c.runs],
        "figures": [_figure(f) for f in c.figures],
        "basis": c.basis.value,
        "delta_bytes": c.delta_bytes,
        "explained_bytes": c.explained_bytes,
        "lines": [_line(line) for line in c.lines],
        "n_lines_left_out": c.n_lines_left_out,
        "reasons": [
            {"kind": r.kind.value, "delta_bytes": r.delta_bytes, "n_lines": r.n_lines}
            for r in c.reasons
        ],
        "causes": [
            {
                "kind": x.kind.value,
                "confidence": x.confidence.value,
                "text": x.text,
                "delta_bytes": x.delta_bytes,
                "locations": [location_document(place) for place in x.locations],
            }
            for x in c.causes
        ],
        "settings": None
        if c.settings is None
        else [{"key": s.key, "before": s.before, "after": s.after} for s in c.settings],
        "requests_equal": c.requests_equal,
        "settings_proof": _proof(c),
        "phases": [
            {"name": p.name, "before_bytes": p.before_bytes, "after_bytes": p.after_bytes}
            for p in c.phases
        ],
        "trend": None if c.trend is None else _trend(c.trend),
        "growth": {
            "has_grown": has_grown(judged),
            "judged": [_growth(g) for g in judged],
        }
        if judged
        else None,
        "notes": list(c.notes),
    }


def _run(side: RunSide) -> Json:
    return {
        "letter": side.letter,
        "name": side.name,
        "verdict": {
            "cause": side.cause.value,
            "confidence": side.confidence.value,
            "summary": side.summary,
        },
        "device": side.device,
        "devices": list(side.devices),
        "torch_version": side.torch_version or None,
        "conf": side.conf,
        "has_snapshot": side.has_snapshot,
        "has_trace": side.has_trace,
        "has_stacks": side.has_stacks,
        "is_cut": side.is_cut,
        "n_events": side.n_events,
        "n_steps": side.n_steps,
        "capacity_bytes": side.capacity_bytes,
        "peak_location": location_document(side.peak_place),
    }


def _figure(figure: Figure) -> Json:
    return {
        "id": figure.id,
        "unit": figure.unit,
        "values": list(figure.values),
        "delta": figure.delta,
    }


def _line(c: LineChange) -> Json:
    return {
        "kind": c.kind.value,
        "before": location_document(c.before),
        "after": location_document(c.after),
        "before_bytes": c.before_bytes,
        "after_bytes": c.after_bytes,
        "delta_bytes": c.delta_bytes,
        "before_blocks": c.before_blocks,
        "after_blocks": c.after_blocks,
        "sizes": None
        if c.sizes is None
        else {
            "factor": c.sizes.factor,
            "before_bytes": c.sizes.before_bytes,
            "after_bytes": c.sizes.after_bytes,
            "new_bytes": list(c.sizes.new),
            "gone_bytes": list(c.sizes.gone),
            "n_new": c.sizes.n_new,
            "n_gone": c.sizes.n_gone,
        },
        "stacks": [
            {
                "before_bytes": s.before_bytes,
                "after_bytes": s.after_bytes,
                "frames": [location_document(f) for f in s.frames],
            }
            for s in c.stacks
        ],
    }


def _proof(c: Comparison) -> Json | None:
    p = c.proof
    if p is None:
        return None
    return {
        "replayed": p.replayed,
        "under": p.under,
        "own_bytes": p.own_bytes,
        "result_bytes": p.result_bytes,
        "recorded_bytes": p.recorded_bytes,
        "fits": p.fits,
        "own_fits": p.own_fits,
        "accounted": p.accounted,
        "is_exact": p.is_exact,
        "text": p.text,
    }


def _growth(g: Growth) -> Json:
    return {
        "measure": g.measure,
        "device": g.device,
        "unit": g.unit,
        "before": g.before,
        "after": g.after,
        "allowed": g.allowed,
        "is_exceeded": g.is_exceeded,
        "message": g.text,
    }


def _trend(t: Trend) -> Json:
    return {
        "figure": t.figure,
        "unit": t.unit,
        "x": list(t.x),
        "values": list(t.values),
        "slope_bytes": t.slope_bytes,
        "slope_low_bytes": t.slope_low,
        "slope_high_bytes": t.slope_high,
        "p_value": t.p_value,
        "is_significant": t.is_significant,
        "confidence": None if t.confidence is None else t.confidence.value,
        "capacity_bytes": t.capacity_bytes,
        "exhausted_at": t.exhausted_at,
        "exhausted_from": None if t.exhausted_range is None else t.exhausted_range[0],
        "exhausted_until": None if t.exhausted_range is None else t.exhausted_range[1],
        "lines": [
            {
                "location": location_document(line.place),
                "values": list(line.values),
                "slope_bytes": line.slope_bytes,
            }
            for line in t.lines
        ],
        "text": t.text,
    }
