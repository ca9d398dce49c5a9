"""The options of ``fragdoctor estimate``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from fragdoctor.cli import options
from fragdoctor.cli.option_groups import OWN
from fragdoctor.frozen import frozen


class AttentionKind(StrEnum):
    """Values of ``--attention``: ``model.workload.Attention``."""

    SDPA = "sdpa"
    FLASH = "flash"
    MATH = "math"
    EAGER = "eager"


class LossKind(StrEnum):
    """Values of ``--logits``: ``model.workload.Loss``."""

    FP32 = "fp32"
    WORKING = "16-bit"
    CHUNKED = "chunked"
    FUSED = "fused"


class CacheKind(StrEnum):
    """Values of ``--cache``."""

    DYNAMIC = "dynamic"
    PAGED = "paged"
    STATIC = "static"


class Family(StrEnum):
    """How the layers of a model without a configuration are built."""

    LLAMA = "llama"
    GPT = "gpt"


_REHEARSAL: Final = "A rehearsal in place of formulas"


def _count(name: str, text: str, low: int = 0, **more: Any) -> Any:
    return options.option(name, "N", text, min=low, **more)


@frozen(kw_only=True)
class EstimateOptions(options.EstimateOutput):
    """What is asked of a model before it runs."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="A config.json, a model directory, safetensors files, or a name: llama-3.1-8b; "
            "a recipe of a training or a server: YAML, TOML, JSON or a script",
        ),
    ] = None
    args: Annotated[
        str | None,
        options.option("--args", "COMMAND", "Take a command line as a recipe: 'vllm serve ...'"),
    ] = None
    params: Annotated[
        str | None, options.option("--params", "N", "Set the parameter count: 7B, 350M, 1.3e9")
    ] = None
    gpu: options.Gpus = None
    list_gpus: Annotated[bool, typer.Option("--list-gpus", help="List the known GPUs")] = False
    list_models: Annotated[
        bool, typer.Option("--list-models", help="List the models known by name")
    ] = False
    dtype: Annotated[
        str | None,
        options.option(
            "--dtype", "KIND", "Choose fp32, bf16, amp-bf16, deepspeed-bf16, int4 and others"
        ),
    ] = None
    optimizer: Annotated[
        str,
        options.option(
            "--optimizer", "NAME", "Choose adamw, sgd, adafactor, adamw-8bit and others"
        ),
    ] = "adamw"
    master_weights: Annotated[
        bool,
        typer.Option("--master-weights", help="Keep fp32 weights and states beside 16-bit ones"),
    ] = False
    grad_dtype: Annotated[
        str | None, options.option("--grad-dtype", "KIND", "Set the precision of gradients")
    ] = None
    batch: Annotated[
        str | None,
        options.option(
            "--batch",
            "N",
            "Set the sequences a GPU a pass; of a rehearsal also 8,16 or 1..512 to search",
            rich_help_panel=OWN,
        ),
    ] = None
    seq: Annotated[int | None, _count("--seq", "Set tokens a sequence", 1)] = None
    attention: Annotated[
        AttentionKind, typer.Option("--attention", help="Choose how attention is computed")
    ] = AttentionKind.SDPA
    checkpointing: Annotated[
        str,
        options.option(
            "--checkpointing",
            "WHEN",
            "Recompute activations: none, full (each layer), sqrt, or every N layers",
        ),
    ] = "none"
    lora: Annotated[
        int | None, options.option("--lora", "RANK", "Train LoRA adapters of this rank only", min=1)
    ] = None
    lora_targets: Annotated[
        str,
        options.option("--lora-targets", "NAMES", "Adapt attention, all-linear, or named matrices"),
    ] = "attention"
    dora: Annotated[bool, typer.Option("--dora", help="Train DoRA: LoRA with magnitudes")] = False
    zero: Annotated[
        int | None, options.option("--zero", "STAGE", "Shard states by ZeRO stage", min=0, max=3)
    ] = None
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard everything, as ZeRO stage 3")] = False
    world_size: Annotated[
        int,
        _count("--world-size", "Set the GPUs that share states", 1, rich_help_panel="Several GPUs"),
    ] = 1
    tensor_parallel: Annotated[
        int, _count("--tensor-parallel", "Set the GPUs that share the matrices", 1)
    ] = 1
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="Split the residual stream with the matrices"),
    ] = False
    context_parallel: Annotated[
        int, _count("--context-parallel", "Set the GPUs that share a sequence", 1)
    ] = 1
    pipeline_parallel: Annotated[
        int, _count("--pipeline-parallel", "Set the GPUs that share the layers", 1)
    ] = 1
    expert_parallel: Annotated[
        int, _count("--expert-parallel", "Set the GPUs that share the experts", 1)
    ] = 1
    offload: Annotated[
        str | None,
        options.option(
            "--offload", "WHAT,WHAT", "Keep optimizer, parameters or activations on the host"
        ),
    ] = None
    grad_accumulation: Annotated[int, _count("--grad-accumulation", "Set the passes a step", 1)] = 1
    inference: Annotated[
        bool, typer.Option("--inference", help="Estimate weights and KV cache, without training")
    ] = False
    new_tokens: Annotated[int, _count("--new-tokens", "Leave room in the KV cache")] = 0
    kv_dtype: Annotated[
        str | None, options.option("--kv-dtype", "KIND", "Set the precision of the KV cache")
    ] = None
    cache: Annotated[
        CacheKind, typer.Option("--cache", help="Choose how the KV cache is allocated")
    ] = CacheKind.DYNAMIC
    gpu_memory_utilization: Annotated[
        float,
        options.option(
            "--gpu-memory-utilization",
            "SHARE",
            "Ask how many sequences a vLLM-like server holds with this share of the GPU",
            show_default=False,
        ),
    ] = 0.0
    max_num_seqs: Annotated[int, _count("--max-num-seqs", "Set what the server takes at once")] = 0
    max_num_batched_tokens: Annotated[
        int, _count("--max-num-batched-tokens", "Set what one step of the server reads")
    ] = 0
    keep_logits: Annotated[
        bool,
        typer.Option(
            "--keep-logits", help="Count logits held through backward, or of a whole prompt"
        ),
    ] = False
    logits: Annotated[
        LossKind | None,
        typer.Option("--logits", help="Choose of which logits the loss is computed"),
    ] = None
    family: Annotated[
        Family, typer.Option("--family", help="Choose how layers are built without a config.json")
    ] = Family.LLAMA
    vocab: Annotated[int, _count("--vocab", "Set the vocabulary")] = 0
    layers: Annotated[int, _count("--layers", "Set the layers")] = 0
    hidden: Annotated[int, _count("--hidden", "Set the hidden size")] = 0
    heads: Annotated[int, _count("--heads", "Set the query heads")] = 0
    kv_heads: Annotated[int, _count("--kv-heads", "Set the key-value heads")] = 0
    ffn: Annotated[int, _count("--ffn", "Set the feed-forward width")] = 0
    positions: Annotated[int, _count("--positions", "Set learned positions (gpt)")] = 0
    dropout: Annotated[
        float | None, options.option("--dropout", "P", "Set dropout", min=0.0, max=1.0)
    ] = None
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run the model's own class of Transformers or Diffusers",
            rich_help_panel=_REHEARSAL,
        ),
    ] = False
    model: Annotated[
        str | None,
        options.option(
            "--model",
            "MODULE:FACTORY",
            "Run your own model on fake tensors; imports it from the current directory",
        ),
    ] = None
    input_shape: Annotated[
        str | None,
        options.option("--input-shape", "N,N", "Set the input's shape where --model has none"),
    ] = None
    input_dtype: Annotated[
        str, options.option("--input-dtype", "NAME", "Set the input's dtype, as int64")
    ] = "float32"
    loss: Annotated[
        str, options.option("--loss", "ce|mean", "Choose a loss where --model has none")
    ] = ""
    steps: Annotated[
        int | None,
        options.option(
            "--steps",
            "N",
            "Stop a rehearsal after N steps; without it, when their memory repeats",
            min=1,
            max=200,
            rich_help_panel=_REHEARSAL,
        ),
    ] = None
    explain: options.Explain = False
