"""The options of ``fragdoctor estimate``, as the command line has them and as routes read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from fragdoctor.cli import options


class EstimateFormat(StrEnum):
    """Formats of an estimate."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


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
PerProcess = Annotated[
    int | None,
    typer.Option(
        "--per-process",
        metavar="SIZE",
        parser=options.size,
        help="Ask how many processes of this reserved memory share the GPU",
        show_default=False,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        max=1000,
        metavar="N",
        help="Ask whether so many processes fit side by side",
        show_default=False,
    ),
]
Headroom = Annotated[
    int | None,
    typer.Option(
        "--headroom",
        metavar="SIZE",
        parser=options.size,
        help="Keep so much of the GPU free; a twentieth of it otherwise",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="SIZE",
        parser=options.size,
        help="Set what the CUDA context of one process takes",
        show_default=False,
    ),
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="N,N,...",
        help="Set the batch size of each recording, in their order",
        show_default=False,
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        metavar="SIZE",
        parser=options.size,
        help="Set what PyTorch can have, instead of --gpu, for recordings at several batch sizes",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """All options with their values; the names are those of the command's parameters."""

    inputs: Sequence[str] | None
    params: str | None
    gpu: Sequence[str] | None
    list_gpus: bool
    dtype: str | None
    optimizer: str
    master_weights: bool
    grad_dtype: str | None
    batch: int | None
    seq: int | None
    attention: AttentionKind
    checkpointing: str
    lora: int | None
    lora_targets: str
    zero: int | None
    fsdp: bool
    world_size: int
    grad_accumulation: int
    inference: bool
    new_tokens: int
    kv_dtype: str | None
    keep_logits: bool
    family: Family
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    positions: int
    dropout: float | None
    per_process: int | None
    processes: int | None
    headroom: int | None
    context: int | None
    model: str | None
    input_shape: str | None
    input_dtype: str
    loss: str
    steps: int
    batches: str | None
    capacity: int | None
    explain: bool
    output_format: EstimateFormat
    verbose: bool
    output: Path | None
    force: bool
    quiet: bool
    no_color: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among the values of a command's parameters."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})
