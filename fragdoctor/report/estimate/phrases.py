"""Sentences about an estimate that several formats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fragdoctor.model.estimate import Estimate, Fit, PhaseName
from fragdoctor.model.workload import Workload
from fragdoctor.units import format_count, format_size

PHASES: Final[Mapping[PhaseName, str]] = {
    PhaseName.FORWARD: "forward",
    PhaseName.BACKWARD: "backward",
    PhaseName.OPTIMIZER_STEP: "optimizer step",
    PhaseName.INFERENCE: "inference",
}


def verdict(estimate: Estimate) -> str:
    """Return the answer in one sentence or two."""
    footprint = estimate.footprint
    needs = (
        f"Needs {format_size(footprint.reserved_bytes)} on a GPU, CUDA context not counted; "
        f"the peak is in the {PHASES[footprint.peak.name]}."
    )
    if not estimate.fits:
        return needs
    return " ".join(_one(estimate, fit) for fit in estimate.fits)


def _one(estimate: Estimate, fit: Fit) -> str:
    usable = format_size(fit.gpu.usable_bytes)
    reserved = format_size(estimate.footprint.reserved_bytes)
    of = f"{reserved} of {usable} usable"
    if fit.fits:
        return f"Fits on {fit.gpu.name} with {format_size(fit.margin_bytes)} to spare: {of}."
    short = format_size(-fit.margin_bytes)
    return f"Does not fit on {fit.gpu.name}: {short} short, {of}.{_way_out(estimate, fit)}"


def _way_out(estimate: Estimate, fit: Fit) -> str:
    batch = fit.largest_batch
    if batch and batch < estimate.workload.batch:
        return f" Batch {format_count(batch)} would fit."
    if batch == 0 and fit is estimate.fits[0]:
        fitting = [s for s in estimate.savings if s.fits]
        if fitting:
            return f" What would: {fitting[-1].title}."
        return " Not even batch 1 fits." if not estimate.workload.inference else ""
    return ""


def workload_text(estimate: Estimate) -> str:
    """Return what was asked about, in one line or two."""
    w, footprint = estimate.workload, estimate.footprint
    parts = [f"{w.shape.name}, {count_text(footprint.n_parameters)} parameters", w.dtype]
    if w.inference:
        parts.append(f"inference of {w.batch} x {format_count(w.seq + w.new_tokens)} tokens")
    else:
        if w.seq:
            parts.append(f"batch {w.batch} x {format_count(w.seq)} tokens")
        parts += _training(w, footprint.n_trainable)
    return ", ".join(parts) + "."


def _training(w: Workload, n_trainable: int) -> list[str]:
    parts = [w.optimizer]
    if w.master_weights:
        parts.append("fp32 master weights")
    if w.lora_rank:
        parts.append(f"LoRA rank {w.lora_rank} ({count_text(n_trainable)} trained)")
    if w.checkpointing != "none":
        parts.append(f"checkpointing {w.checkpointing}")
    if w.zero_stage:
        parts.append(f"ZeRO-{w.zero_stage} on {w.world_size} GPUs")
    if w.grad_accumulation > 1:
        parts.append(f"{w.grad_accumulation} passes a step")
    if w.attention.value != "sdpa":
        parts.append(f"{w.attention.value} attention")
    return parts


def count_text(n: int) -> str:
    """Return a parameter count for people: ``6.74B``."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{n / factor:.3g}{unit}" if n < 100 * factor else f"{n / factor:.0f}{unit}"
    return str(n)


def batch_text(batch: int | None) -> str:
    """Return a largest batch for a table."""
    return "-" if batch is None else "none" if batch == 0 else format_count(batch)
