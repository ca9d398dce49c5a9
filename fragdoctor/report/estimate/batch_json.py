"""Peak memory against batch size as JSON: schema/batch-fit-1.0.schema.json."""

from __future__ import annotations

import math
from typing import Any

from fragdoctor.model.batch_fit import BatchFit, Curve, Prediction, ReplayCheck
from fragdoctor.model.diagnosis import SCHEMA_VERSION
from fragdoctor.model.finding import Location

Json = dict[str, Any]


def batch_fit_document(fit: BatchFit) -> Json:
    """Return the document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "batch_source": fit.batch_source.value,
        "points": [
            {
                "source": p.source,
                "batch": p.batch,
                "peak_allocated_bytes": p.peak_allocated_bytes,
                "peak_active_bytes": p.peak_active_bytes,
                "peak_reserved_bytes": p.peak_reserved_bytes,
                "fitted_bytes": p.fitted_bytes,
                "is_lower_bound": p.is_lower_bound,
                "rest_bytes": p.rest_bytes,
                "peak_line": _line(p.peak_line),
                "n_requests": p.n_requests,
                "n_steps": p.n_steps or None,
            }
            for p in fit.points
        ],
        "allocated": _curve(fit.allocated),
        "active": _curve(fit.active),
        "reserved": _curve(fit.reserved),
        "moments": [
            {
                "line": _line(m.line),
                "holds_from": m.holds_from,
                "holds_to": m.holds_to,
                "curve": _curve(m.curve),
            }
            for m in fit.moments
        ],
        "line_batches": list(fit.line_batches),
        "lines": [
            {"line": _line(row.line), "bytes": list(row.n_bytes), "curve": _curve(row.curve)}
            for row in fit.lines
        ],
        "why_not_linear": list(fit.why),
        "left_out_error": fit.left_out_error,
        "rest_bytes": fit.rest_bytes,
        "replay": None if fit.replay is None else _replay(fit.replay),
        "prediction": None if fit.prediction is None else _prediction(fit.prediction),
        "warnings": list(fit.warnings),
    }


def _line(line: Location | None) -> Json | None:
    if line is None:
        return None
    return {"filename": line.filename, "line": line.line, "function": line.function}


def _curve(curve: Curve) -> Json:
    return {
        "scaling": curve.scaling.value,
        "fixed_bytes": curve.fixed_bytes,
        "per_sample_bytes": curve.per_sample_bytes,
        "bend_bytes": curve.bend_bytes,
        "worst_residual_bytes": curve.worst_residual_bytes,
        "r_squared": curve.r_squared,
    }


def _replay(replay: ReplayCheck) -> Json:
    return {
        "method": replay.method,
        "largest": _finite(replay.largest),
        "largest_without_flush": _finite(replay.largest_without_flush),
        "ceiling": _finite(replay.ceiling),
        "worst_error": replay.worst_error,
        "left_out_error": replay.left_out_error,
        "unmatched_share": replay.unmatched_share,
        "peak_bytes": replay.peak_bytes,
        "slopes_beyond": list(replay.slopes_beyond),
    }


def _finite(batch: float | None) -> float | None:
    return None if batch is None or math.isinf(batch) else batch


def _prediction(prediction: Prediction) -> Json:
    return {
        "gpu": prediction.gpu,
        "total_bytes": prediction.total_bytes,
        "context_bytes": prediction.context_bytes,
        "headroom_bytes": prediction.headroom_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "largest": prediction.largest,
        "low": prediction.low,
        "high": prediction.high,
        "method": prediction.method,
        "confidence": prediction.confidence,
        "reasons": list(prediction.reasons),
        "is_upper_bound": prediction.is_upper_bound,
        "is_extrapolated": prediction.is_extrapolated,
        "is_unbounded": prediction.is_unbounded,
        "bytes_at_largest": prediction.bytes_at_largest,
        "overhead": prediction.overhead,
    }
