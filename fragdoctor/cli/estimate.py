"""``fragdoctor estimate``: will it fit, and what would make it fit."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, estimate_fit, estimate_processes, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.estimate.request import Request
    from fragdoctor.estimate.tracing.plan import Plan
    from fragdoctor.model.estimate import Estimate, GpuModel
    from fragdoctor.report.base import RenderOptions


class EstimateFormat(StrEnum):
    """Formats of an estimate."""

    TEXT = "text"
    JSON = "json"


class AttentionKind(StrEnum):
    """Values of ``--attention``: ``model.workload.Attention``."""

    SDPA = "sdpa"
    FLASH = "flash"
    MATH = "math"
    EAGER = "eager"


class Family(StrEnum):
    """How the layers of a model without a configuration are built."""

    LLAMA = "llama"
    GPT = "gpt"


def _option(*names: str, metavar: str, text: str) -> object:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[INPUT]...",
        help="A config.json, a model directory, safetensors files, or recordings",
    ),
]
Params = Annotated[
    str | None, _option("--params", metavar="N", text="Set the parameter count: 7B, 350M, 1.3e9")
]
Gpus = Annotated[
    list[str] | None,
    _option("--gpu", metavar="NAME|SIZE", text="Ask for a GPU: a100-40g, h100, 24GiB; repeatable"),
]
ListGpus = Annotated[bool, typer.Option("--list-gpus", help="List the known GPUs")]
Dtype = Annotated[
    str | None,
    _option(
        "--dtype",
        metavar="KIND",
        text="Choose fp32, bf16, fp16, amp-bf16, amp-fp16, fp8, int8 or int4",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", metavar="NAME", help="Choose adamw, sgd, adafactor, adamw-8bit and others"
    ),
]
MasterWeights = Annotated[
    bool, typer.Option("--master-weights", help="Keep fp32 weights and states beside 16-bit ones")
]
GradDtype = Annotated[
    str | None,
    _option("--grad-dtype", metavar="KIND", text="Set the precision of gradients"),
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Set the sequences a GPU a pass")
]
Seq = Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Set tokens a sequence")]
AttentionOption = Annotated[
    AttentionKind, typer.Option("--attention", help="Choose how attention is computed")
]
Checkpointing = Annotated[
    str,
    typer.Option(
        "--checkpointing",
        metavar="WHEN",
        help="Recompute activations: none, full (each layer), sqrt, or every N layers",
    ),
]
Lora = Annotated[
    int | None,
    typer.Option("--lora", min=1, metavar="RANK", help="Train LoRA adapters of this rank only"),
]
LoraTargets = Annotated[
    str,
    typer.Option(
        "--lora-targets", metavar="NAMES", help="Adapt attention, all-linear, or named matrices"
    ),
]
Zero = Annotated[
    int | None,
    typer.Option("--zero", min=0, max=3, metavar="STAGE", help="Shard states by ZeRO stage"),
]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Shard everything, as ZeRO stage 3")]
WorldSize = Annotated[
    int, typer.Option("--world-size", min=1, metavar="N", help="Set the GPUs that share states")
]
GradAccumulation = Annotated[
    int,
    typer.Option("--grad-accumulation", min=1, metavar="N", help="Set the passes a step"),
]
Inference = Annotated[
    bool, typer.Option("--inference", help="Estimate weights and KV cache, without training")
]
KvDtype = Annotated[
    str | None, _option("--kv-dtype", metavar="KIND", text="Set the precision of the KV cache")
]
KeepLogits = Annotated[
    bool,
    typer.Option("--keep-logits", help="Count logits held by the loop during backward"),
]
NewTokens = Annotated[
    int, typer.Option("--new-tokens", min=0, metavar="N", help="Leave room in the KV cache")
]
Vocab = Annotated[int, typer.Option("--vocab", min=0, metavar="N", help="Set the vocabulary")]
Layers = Annotated[int, typer.Option("--layers", min=0, metavar="N", help="Set the layers")]
Hidden = Annotated[int, typer.Option("--hidden", min=0, metavar="N", help="Set the hidden size")]
Heads = Annotated[int, typer.Option("--heads", min=0, metavar="N", help="Set the query heads")]
KvHeads = Annotated[
    int, typer.Option("--kv-heads", min=0, metavar="N", help="Set the key-value heads")
]
Ffn = Annotated[int, typer.Option("--ffn", min=0, metavar="N", help="Set the feed-forward width")]
Positions = Annotated[
    int, typer.Option("--positions", min=0, metavar="N", help="Set learned positions (gpt)")
]
FamilyOption = Annotated[
    Family, typer.Option("--family", help="Choose how layers are built without a config.json")
]
Dropout = Annotated[
    float | None,
    typer.Option(
        "--dropout", min=0.0, max=1.0, metavar="P", help="Set dropout", show_default=False
    ),
]
Model = Annotated[
    str | None,
    _option(
        "--model",
        metavar="MODULE:FACTORY",
        text="Run your own model on fake tensors; imports it from the current directory",
    ),
]
InputShape = Annotated[
    str | None,
    _option("--input-shape", metavar="N,N", text="Set the input's shape where --model has none"),
]
InputDtype = Annotated[
    str, typer.Option("--input-dtype", metavar="NAME", help="Set the input's dtype, as int64")
]
Loss = Annotated[
    str, typer.Option("--loss", metavar="ce|mean", help="Choose a loss where --model has none")
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, max=20, metavar="N", help="Trace this many steps (--model)")
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show the traceback of an error inside --model")
]
Explain = Annotated[bool, typer.Option("--explain", help="Show formulas, values and sources")]
OutputFormat = Annotated[
    EstimateFormat, typer.Option("--format", help="Choose the output format", show_default=True)
]


def estimate(
    inputs: Inputs = None,
    params: Params = None,
    gpu: Gpus = None,
    list_gpus: ListGpus = False,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    master_weights: MasterWeights = False,
    grad_dtype: GradDtype = None,
    batch: Batch = None,
    seq: Seq = None,
    attention: AttentionOption = AttentionKind.SDPA,
    checkpointing: Checkpointing = "none",
    lora: Lora = None,
    lora_targets: LoraTargets = "attention",
    zero: Zero = None,
    fsdp: Fsdp = False,
    world_size: WorldSize = 1,
    grad_accumulation: GradAccumulation = 1,
    inference: Inference = False,
    new_tokens: NewTokens = 0,
    kv_dtype: KvDtype = None,
    keep_logits: KeepLogits = False,
    family: FamilyOption = Family.LLAMA,
    vocab: Vocab = 0,
    layers: Layers = 0,
    hidden: Hidden = 0,
    heads: Heads = 0,
    kv_heads: KvHeads = 0,
    ffn: Ffn = 0,
    positions: Positions = 0,
    dropout: Dropout = None,
    per_process: estimate_processes.PerProcess = None,
    processes: estimate_processes.Processes = None,
    headroom: estimate_processes.Headroom = None,
    context: estimate_processes.Context = None,
    model: Model = None,
    input_shape: InputShape = None,
    input_dtype: InputDtype = "float32",
    loss: Loss = "",
    steps: Steps = 2,
    batches: estimate_fit.Batches = None,
    capacity: estimate_fit.Capacity = None,
    explain: Explain = False,
    output_format: OutputFormat = EstimateFormat.TEXT,
    verbose: Verbose = False,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int:
    """Estimate the memory of a run and print whether it fits."""
    look = console.render_options(quiet=quiet, no_color=no_color, to_file=output is not None)
    console.check_output(output, force=force, inputs=inputs or [])

    from fragdoctor.estimate.gpus import gpu_of, known_gpus
    from fragdoctor.estimate.guess import Overrides
    from fragdoctor.estimate.request import Request
    from fragdoctor.estimate.tracing.plan import Plan, parse_shape

    as_json = output_format is EstimateFormat.JSON
    if list_gpus:
        console.write_report(_gpu_list(known_gpus(), look, as_json=as_json), output, force=force)
        return OK
    if estimate_fit.is_about_batches(inputs or [], batches):
        report = estimate_fit.answer(
            inputs or [], gpu or [], look, batches=batches, capacity=capacity, context=context,
            headroom=headroom, explain=explain, as_json=as_json,
        )  # fmt: skip
        console.write_report(report, output, force=force)
        return OK
    if estimate_processes.is_about_processes(inputs or [], per_process, processes):
        report = estimate_processes.answer(
            inputs or [], gpu or [], look, per_process=per_process, processes=processes,
            headroom=headroom, context=context, as_json=as_json,
        )  # fmt: skip
        console.write_report(report, output, force=force)
        return OK
    if capacity is not None:
        raise ConfigError(
            "--capacity is for recordings at several batch sizes.", hint="Write --gpu SIZE."
        )
    if fsdp and zero is not None:
        raise ConfigError("--fsdp and --zero exclude each other.", hint="FSDP is stage 3.")
    gpus = [gpu_of(name) for name in dict.fromkeys(gpu or ())]
    if model is not None:
        _refuse(
            "--model",
            "the traced code decides that: build it so in the factory, or drop the option",
            {
                "--zero": zero, "--fsdp": fsdp, "--world-size": world_size > 1, "--lora": lora,
                "--lora-targets": lora_targets != "attention",
                "--checkpointing": checkpointing != "none", "--seq": seq,
                "--attention": attention is not AttentionKind.SDPA,
                "--master-weights": master_weights, "--grad-dtype": grad_dtype,
                "--new-tokens": new_tokens, "--kv-dtype": kv_dtype, "--keep-logits": keep_logits,
                "--vocab": vocab, "--layers": layers, "--hidden": hidden, "--heads": heads,
                "--kv-heads": kv_heads, "--ffn": ffn, "--positions": positions,
                "--dropout": dropout is not None, "--family": family is not Family.LLAMA,
            },
        )  # fmt: skip
        if inputs or params:
            raise ConfigError("--model takes no other model.", hint="Give one of them.")
        plan = Plan(
            batch=batch,
            input_shape=parse_shape(input_shape or ""),
            input_dtype=input_dtype,
            loss=loss,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            inference=inference,
            steps=steps,
        )
        answer = traced(model, plan, gpus, dtype=dtype or "", verbose=verbose)
        console.write_report(_rendered(answer, look, explain, as_json), output, force=force)
        return OK
    _refuse(
        "formulas",
        "they belong to --model MODULE:FACTORY",
        {
            "--input-shape": input_shape, "--input-dtype": input_dtype != "float32",
            "--loss": loss, "--steps": steps != 2,
        },
    )  # fmt: skip
    request = Request(
        inputs=tuple(inputs or ()),
        params=params or "",
        dtype=dtype or "",
        optimizer=optimizer,
        master_weights=master_weights,
        grad_dtype=grad_dtype or "",
        batch=batch or 1,
        seq=seq or 0,
        attention=attention.value,
        checkpointing=checkpointing.strip().lower(),
        lora_rank=lora or 0,
        lora_targets=lora_targets,
        zero_stage=3 if fsdp else zero or 0,
        world_size=world_size,
        grad_accumulation=grad_accumulation,
        inference=inference,
        new_tokens=new_tokens,
        kv_dtype=kv_dtype or "",
        keeps_logits=keep_logits,
        architecture=gpus[0].architecture if gpus else "",
        overrides=Overrides(
            vocab=vocab, n_layers=layers, hidden=hidden, n_heads=heads, n_kv_heads=kv_heads,
            ffn=ffn, positions=positions, family=family.value, dropout=dropout,
        ),
    )  # fmt: skip
    answer = answered(request, gpus)
    console.write_report(_rendered(answer, look, explain, as_json), output, force=force)
    return OK


def _refuse(route: str, why: str, given: Mapping[str, object]) -> None:
    """Refuse options that the chosen route would silently ignore."""
    named = [flag for flag, value in given.items() if value]
    if named:
        verb = "does" if len(named) == 1 else "do"
        raise ConfigError(
            f"{', '.join(named)} {verb} not go with {route}.", hint=f"{why[0].upper()}{why[1:]}."
        )


def answered(request: Request, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate that was asked for.

    Other kinds of input, such as snapshots at several batch sizes, branch off here.

    Raises:
        ConfigError: the input is a recording, not a model.
    """
    from fragdoctor.estimate.formula import formula_footprint
    from fragdoctor.estimate.judge import Route, judged
    from fragdoctor.estimate.request import error_of, workload_of
    from fragdoctor.estimate.shapes import is_capture

    for name in request.inputs:
        if is_capture(Path(name)):
            raise ConfigError(
                f"{name} is a recording or a text, not a model; estimates from recordings are not "
                "part of this version.",
                hint="Give a config.json or safetensors, or run: fragdoctor analyze",
            )
    with console.Progress("Estimating"):
        workload = workload_of(request)
        return judged(workload, Route(formula_footprint, error_of(workload)), gpus)


def traced(
    model: str, plan: Plan, gpus: Sequence[GpuModel], *, dtype: str, verbose: bool
) -> Estimate:
    """Return the estimate of the user's own model; what its code prints goes to standard error.

    Raises:
        ConfigError: the model cannot be traced; with ``verbose`` its traceback is printed first.
    """
    from fragdoctor.estimate.tracing.route import traced_estimate

    # A real GPU is neither needed nor touched, even if it is full.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        with console.Progress("Tracing"), redirect_stdout(sys.stderr):
            return traced_estimate(model, plan, gpus, dtype=dtype)
    except ConfigError as err:
        if verbose and err.__cause__ is not None:
            sys.stderr.write("".join(traceback.format_exception(err.__cause__)))
        raise


def _rendered(answer: Estimate, look: RenderOptions, explain: bool, as_json: bool) -> str:
    if as_json:
        from fragdoctor.report.estimate.json import estimate_document
        from fragdoctor.report.json import dumps

        return dumps(estimate_document(answer))
    from fragdoctor.report.estimate.text import render_estimate

    return render_estimate(answer, look, explain=explain)


def _gpu_list(gpus: Sequence[GpuModel], look: RenderOptions, *, as_json: bool) -> str:
    if as_json:
        from fragdoctor.report.estimate.json import gpus_document
        from fragdoctor.report.json import dumps

        return dumps(gpus_document(gpus))
    from fragdoctor.report.estimate.text import render_gpus

    return render_gpus(gpus, look)
