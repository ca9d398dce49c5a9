"""``fragdoctor estimate``: will it fit, and what would make it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli import estimate_options as given
from fragdoctor.cli.estimate_routes import Route, refuse_unused, route_of
from fragdoctor.cli.exit import OK

if TYPE_CHECKING:
    from fragdoctor.report.base import RenderOptions


def estimate(
    ctx: typer.Context,
    inputs: given.Inputs = None,
    params: given.Params = None,
    gpu: given.Gpus = None,
    list_gpus: given.ListGpus = False,
    dtype: given.Dtype = None,
    optimizer: given.Optimizer = "adamw",
    master_weights: given.MasterWeights = False,
    grad_dtype: given.GradDtype = None,
    batch: given.Batch = None,
    seq: given.Seq = None,
    attention: given.AttentionOption = given.AttentionKind.SDPA,
    checkpointing: given.Checkpointing = "none",
    lora: given.Lora = None,
    lora_targets: given.LoraTargets = "attention",
    zero: given.Zero = None,
    fsdp: given.Fsdp = False,
    world_size: given.WorldSize = 1,
    grad_accumulation: given.GradAccumulation = 1,
    inference: given.Inference = False,
    new_tokens: given.NewTokens = 0,
    kv_dtype: given.KvDtype = None,
    keep_logits: given.KeepLogits = False,
    family: given.FamilyOption = given.Family.LLAMA,
    vocab: given.Vocab = 0,
    layers: given.Layers = 0,
    hidden: given.Hidden = 0,
    heads: given.Heads = 0,
    kv_heads: given.KvHeads = 0,
    ffn: given.Ffn = 0,
    positions: given.Positions = 0,
    dropout: given.Dropout = None,
    per_process: given.PerProcess = None,
    processes: given.Processes = None,
    headroom: given.Headroom = None,
    context: given.Context = None,
    model: given.Model = None,
    input_shape: given.InputShape = None,
    input_dtype: given.InputDtype = "float32",
    loss: given.Loss = "",
    steps: given.Steps = 2,
    batches: given.Batches = None,
    capacity: given.Capacity = None,
    explain: given.Explain = False,
    output_format: given.OutputFormat = given.EstimateFormat.TEXT,
    verbose: given.Verbose = False,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int:
    """Estimate the memory of a run and print whether it fits."""
    chosen = given.EstimateOptions.of(locals())
    look = console.render_options(quiet=quiet, no_color=no_color, to_file=output is not None)
    console.check_output(output, force=force, inputs=inputs or [])
    route = route_of(chosen)
    on_the_line = given_parameters(ctx)
    refuse_unused(route, on_the_line)
    console.write_report(_answer(route, chosen, look, on_the_line), output, force=force)
    return OK


def given_parameters(ctx: typer.Context) -> frozenset[str]:
    """Return the names of the parameters that stand on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(n for n, source in sources.items() if source and source.name == "COMMANDLINE")


def _answer(
    route: Route, chosen: given.EstimateOptions, look: RenderOptions, on_the_line: frozenset[str]
) -> str:
    """Return the report of a route; each is loaded only when it is taken."""
    if route is Route.GPUS:
        from fragdoctor.cli.estimate_formula import gpu_list

        return gpu_list(look, output_format=chosen.output_format.value)
    if route is Route.BATCHES:
        from fragdoctor.cli import estimate_fit

        return estimate_fit.answer(chosen, look)
    if route is Route.PROCESSES:
        from fragdoctor.cli import estimate_processes

        return estimate_processes.answer(chosen, look)
    if route in (Route.MODEL, Route.MODEL_INFERENCE):
        from fragdoctor.cli import estimate_model

        return estimate_model.answer(chosen, look, on_the_line)
    from fragdoctor.cli import estimate_formula

    return estimate_formula.answer(chosen, look)
