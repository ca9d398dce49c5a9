"""``fragdoctor estimate``: will it fit, and what would make it fit.

Recordings at several batch sizes and several processes on one GPU are questions of their own, with
commands of their own: ``fit`` and ``pack``. What used to ask them here is still understood.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import Asked, EstimateOptions, asked_of, older_parameters
from fragdoctor.cli.estimate_routes import Route, refuse_unused, route_of
from fragdoctor.cli.exit import OK
from fragdoctor.cli.fit import FitOptions, fit
from fragdoctor.cli.options import command_with, parameters_of
from fragdoctor.cli.pack import PackOptions, pack
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.estimation.request import Request
    from fragdoctor.model.estimate import Estimate, GpuModel
    from fragdoctor.report.base import RenderOptions


def estimate(asked: Asked) -> int:
    """Estimate the memory of a run and print whether it fits."""
    route = route_of(asked)
    refuse_unused(route, asked.given)
    if route is Route.FIT:
        return fit(asked.options(FitOptions))
    if route is Route.PACK:
        return pack(asked.options(PackOptions))
    chosen: EstimateOptions = asked.options(EstimateOptions)
    console.answer(chosen, chosen.inputs, lambda look: _answer(route, chosen, look, asked.given))
    return OK


def _answer(
    route: Route, chosen: EstimateOptions, look: RenderOptions, given: frozenset[str]
) -> str:
    """Return the report of a route; its modules are loaded only when it is taken."""
    if route is Route.GPUS:
        from fragdoctor.estimation.gpus import known_gpus
        from fragdoctor.report.base import render

        return render("gpus", chosen.output_format.value, known_gpus(), look)
    if route is Route.MODELS:
        from fragdoctor.estimation.shapes import known_models
        from fragdoctor.report.base import render

        return render("models", chosen.output_format.value, known_models(), look)
    if route in (Route.MODEL, Route.MODEL_INFERENCE):
        return _of_model(chosen, look, given)
    return _of_formulas(chosen, look)


def _of_formulas(chosen: EstimateOptions, look: RenderOptions) -> str:
    """Return the report on a model whose shape is known or assumed.

    Raises:
        ConfigError: options that exclude each other.
        InputError: an input is no model.
    """
    from fragdoctor.estimation.formula import estimate_of
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.report.base import render

    if chosen.fsdp and chosen.zero is not None:
        raise ConfigError("--fsdp and --zero exclude each other.", hint="FSDP is stage 3.")
    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    with console.Progress("Estimating"):
        found = estimate_of(_request(chosen, gpus), gpus)
    if chosen.gpu_memory_utilization:
        found = _with_server(found, chosen, gpus)
    return render("estimate", chosen.output_format.value, found, look, explain=chosen.explain)


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
        cache="paged" if chosen.gpu_memory_utilization else chosen.cache.value,
        tensor_parallel=chosen.tensor_parallel,
        context_parallel=chosen.context_parallel,
        pipeline_parallel=chosen.pipeline_parallel,
        expert_parallel=chosen.expert_parallel,
        sequence_parallel=chosen.sequence_parallel,
        offload=chosen.offload or "",
        dora=chosen.dora,
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


def _with_server(found: Estimate, chosen: EstimateOptions, gpus: Sequence[GpuModel]) -> Estimate:
    """Return an estimate with what a server holds on the first GPU.

    Raises:
        ConfigError: no GPU is named.
    """
    from fragdoctor.estimation.serving import serving_of

    if not gpus:
        raise ConfigError(
            "A server's cache depends on the GPU, and none is named.", hint="Add --gpu h100."
        )
    serving = serving_of(
        found.workload,
        gpus[0],
        utilization=chosen.gpu_memory_utilization,
        max_seqs=chosen.max_num_seqs,
        max_batched_tokens=chosen.max_num_batched_tokens,
    )
    return replace(found, serving=serving)


def _of_model(chosen: EstimateOptions, look: RenderOptions, given: frozenset[str]) -> str:
    """Return the report on the user's own model; what its code prints goes to standard error.

    Args:
        chosen: all options.
        look: how to print.
        given: names of those on the command line; refused where the factory decides by itself.

    Raises:
        ConfigError: the model cannot be traced; with ``--verbose`` its traceback is printed first.
    """
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.rehearse.tracing.model_estimate import traced_estimate
    from fragdoctor.rehearse.tracing.training_setup import TrainingSetup, parse_shape
    from fragdoctor.report.base import render

    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    setup = TrainingSetup(
        batch=chosen.batch,
        input_shape=parse_shape(chosen.input_shape or ""),
        input_dtype=chosen.input_dtype,
        loss=chosen.loss,
        optimizer=chosen.optimizer,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        steps=chosen.steps,
        given=given,
    )
    try:
        with console.Progress("Tracing"), redirect_stdout(sys.stderr):
            found = traced_estimate(chosen.model or "", setup, gpus, dtype=chosen.dtype or "")
    except ConfigError as err:
        if chosen.verbose and err.__cause__ is not None:
            sys.stderr.write("".join(traceback.format_exception(err.__cause__)))
        raise
    return render("estimate", chosen.output_format.value, found, look, explain=chosen.explain)


command = command_with(
    [*parameters_of(EstimateOptions), *older_parameters()],
    lambda **values: estimate(asked_of(**values)),
)
