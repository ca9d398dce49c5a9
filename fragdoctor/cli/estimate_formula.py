"""The part of ``fragdoctor estimate`` that answers by formulas over a model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.estimation.request import Request
    from fragdoctor.model.estimate import Estimate, GpuModel
    from fragdoctor.report.base import RenderOptions


def answer(chosen: EstimateOptions, look: RenderOptions) -> str:
    """Return the report on a model whose shape is known or assumed.

    Raises:
        ConfigError: options that exclude each other.
        InputError: an input is no model.
    """
    from fragdoctor.estimation.gpus import gpu_of

    if chosen.fsdp and chosen.zero is not None:
        raise ConfigError("--fsdp and --zero exclude each other.", hint="FSDP is stage 3.")
    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    found = _estimate(_request(chosen, gpus), gpus)
    return rendered(found, look, explain=chosen.explain, as_json=chosen.as_json)


def _request(chosen: EstimateOptions, gpus: Sequence[GpuModel]) -> Request:
    from fragdoctor.estimation.guess import Overrides
    from fragdoctor.estimation.request import Request

    return Request(
        inputs=tuple(chosen.inputs or ()),
        params=chosen.params or "",
        dtype=chosen.dtype or "",
        optimizer=chosen.optimizer,
        master_weights=chosen.master_weights,
        grad_dtype=chosen.grad_dtype or "",
        batch=chosen.batch or 1,
        seq=chosen.seq or 0,
        attention=chosen.attention.value,
        checkpointing=chosen.checkpointing.strip().lower(),
        lora_rank=chosen.lora or 0,
        lora_targets=chosen.lora_targets,
        zero_stage=3 if chosen.fsdp else chosen.zero or 0,
        world_size=chosen.world_size,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        new_tokens=chosen.new_tokens,
        kv_dtype=chosen.kv_dtype or "",
        keeps_logits=chosen.keep_logits,
        architecture=gpus[0].architecture if gpus else "",
        overrides=Overrides(
            vocab=chosen.vocab,
            n_layers=chosen.layers,
            hidden=chosen.hidden,
            n_heads=chosen.heads,
            n_kv_heads=chosen.kv_heads,
            ffn=chosen.ffn,
            positions=chosen.positions,
            family=chosen.family.value,
            dropout=chosen.dropout,
        ),
    )


def _estimate(request: Request, gpus: Sequence[GpuModel]) -> Estimate:
    from fragdoctor.estimation.formula import formula_footprint
    from fragdoctor.estimation.judge import Route, judged
    from fragdoctor.estimation.request import error_of, workload_of

    with console.Progress("Estimating"):
        workload = workload_of(request)
        return judged(workload, Route(formula_footprint, error_of(workload)), gpus)


def rendered(answer: Estimate, look: RenderOptions, *, explain: bool, as_json: bool) -> str:
    """Return an estimate as text or JSON."""
    if as_json:
        from fragdoctor.report.estimate.json import estimate_document
        from fragdoctor.report.json import dumps

        return dumps(estimate_document(answer))
    from fragdoctor.report.estimate.text import render_estimate

    return render_estimate(answer, look, explain=explain)


def gpu_list(look: RenderOptions, *, as_json: bool) -> str:
    """Return the list of known GPUs."""
    from fragdoctor.estimation.gpus import known_gpus

    if as_json:
        from fragdoctor.report.estimate.json import gpus_document
        from fragdoctor.report.json import dumps

        return dumps(gpus_document(known_gpus()))
    from fragdoctor.report.estimate.text import render_gpus

    return render_gpus(known_gpus(), look)
