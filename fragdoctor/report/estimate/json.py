"""An estimate as JSON: ``schema/estimate-1.0.schema.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fragdoctor.model.estimate import (
    SCHEMA_VERSION,
    Estimate,
    Fit,
    Footprint,
    GpuModel,
    Item,
    Phase,
    Saving,
)
from fragdoctor.model.workload import Workload
from fragdoctor.report.estimate.phrases import verdict

Json = dict[str, Any]


def estimate_document(estimate: Estimate) -> Json:
    """Return the document; byte counts are integers, unknowns null."""
    footprint = estimate.footprint
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "estimate",
        "route": footprint.route,
        "summary": verdict(estimate),
        "fits": estimate.fits[0].fits if estimate.fits else None,
        "margin_bytes": estimate.fits[0].margin_bytes if estimate.fits else None,
        "largest_batch": estimate.fits[0].largest_batch if estimate.fits else None,
        "peak_allocated_bytes": footprint.peak_allocated_bytes,
        "peak_reserved_bytes": footprint.reserved_bytes,
        "peak_phase": footprint.peak.name.value,
        "n_parameters": footprint.n_parameters,
        "n_trainable": footprint.n_trainable,
        "workload": _workload(estimate.workload),
        "items": _items(footprint),
        "phases": [_phase(p) for p in footprint.phases],
        "layer": [
            {"operation": k.operation, "what": k.what, "formula": k.formula, "bytes": k.n_bytes}
            for k in footprint.layer
        ],
        "lines": [
            {
                "filename": line.filename,
                "line": line.line,
                "function": line.function,
                "item": line.item,
                "bytes": line.n_bytes,
            }
            for line in footprint.lines
        ],
        "gpus": [_fit(f) for f in estimate.fits],
        "savings": [_saving(s) for s in estimate.savings],
        "notes": list(footprint.notes),
        "error": estimate.error,
    }


def gpus_document(gpus: Sequence[GpuModel]) -> Json:
    """Return the known GPUs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "gpus",
        "gpus": [_gpu(g) for g in gpus],
    }


def _workload(w: Workload) -> Json:
    shape = w.shape
    return {
        "model": shape.name,
        "source": shape.source,
        "is_guess": shape.is_guess,
        "n_layers": shape.n_layers or None,
        "hidden": shape.hidden or None,
        "n_heads": shape.n_heads or None,
        "n_kv_heads": shape.n_kv_heads or None,
        "ffn": shape.ffn or None,
        "vocab": shape.vocab or None,
        "dtype": w.dtype,
        "optimizer": None if w.inference else w.optimizer,
        "master_weights": w.master_weights,
        "grad_dtype": w.grad_dtype or None,
        "batch": w.batch,
        "seq": w.seq or None,
        "attention": w.attention.value,
        "checkpointing": w.checkpointing,
        "lora_rank": w.lora_rank or None,
        "zero_stage": w.zero_stage,
        "world_size": w.world_size,
        "grad_accumulation": w.grad_accumulation,
        "inference": w.inference,
        "new_tokens": w.new_tokens,
    }


def _items(footprint: Footprint) -> list[Json]:
    at_peak = {s.item: s.n_bytes for s in footprint.peak.shares}
    return [_item(item, at_peak.get(item.id, 0)) for item in footprint.items]


def _item(item: Item, at_peak_bytes: int) -> Json:
    return {
        "id": item.id,
        "title": item.title,
        "at_peak_bytes": at_peak_bytes,
        "largest_bytes": item.n_bytes,
        "formula": item.formula,
        "numbers": item.numbers,
        "source": item.source,
        "sureness": item.sureness.value,
        "note": item.note,
    }


def _phase(phase: Phase) -> Json:
    return {
        "name": phase.name.value,
        "peak_bytes": phase.n_bytes,
        "moment": phase.moment,
        "shares": [{"item": s.item, "bytes": s.n_bytes} for s in phase.shares],
    }


def _gpu(gpu: GpuModel) -> Json:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "total_bytes": gpu.total_bytes,
        "context_bytes": gpu.context_bytes,
        "usable_bytes": gpu.usable_bytes,
        "architecture": gpu.architecture or None,
        "source": gpu.source,
    }


def _fit(fit: Fit) -> Json:
    return {
        **_gpu(fit.gpu),
        "fits": fit.fits,
        "margin_bytes": fit.margin_bytes,
        "largest_batch": fit.largest_batch,
        "other_lengths": [{"seq": seq, "largest_batch": b} for seq, b in fit.other_lengths],
    }


def _saving(saving: Saving) -> Json:
    return {
        "id": saving.id,
        "title": saving.title,
        "option": saving.option,
        "peak_allocated_bytes": saving.peak_bytes,
        "peak_reserved_bytes": saving.reserved_bytes,
        "saved_bytes": saving.saved_bytes,
        "cost": saving.cost,
        "fits": saving.fits,
        "source": saving.source,
    }
