"""The options of ``fragdoctor estimate``."""

from __future__ import annotations

from typing import Any, Literal

from fragdoctor.cli.options import (
    INFERENCE,
    REHEARSAL,
    SEVERAL_GPUS,
    SHAPE,
    TRAINING,
    EstimateOutput,
    argument,
    flag,
    option,
    taken,
)
from fragdoctor.model.workload import Attention, FsdpKind, Loss

CacheKind = Literal["dynamic", "paged", "static", "tuple"]
Family = Literal["llama", "gpt"]
"""The architecture of the layers of a model without a configuration."""


def _count(text: str, group: str, default: int = 0) -> Any:
    """Declare a number whose default is its minimum; 0 means unset."""
    return option("N", text, default=default, group=group, min=default)


@taken
class EstimateOptions(EstimateOutput):
    """Options of the command."""

    inputs: list[str] | None = argument(
        "[MODEL]...",
        "A config.json, a model directory, or a name: llama-3.1-8b; "
        "a recipe of a training or a server: YAML, TOML, JSON or a script; or a question in words",
        default=None,
    )
    args: str | None = option("COMMAND", "Take a command line as a recipe: 'vllm serve ...'")
    params: str | None = option("N", "Set the parameter count: 7B, 350M, 1.3e9")
    gpu: list[str] | None = option("NAME|SIZE", "Ask for a GPU: a100-40g, h100, 24GiB; repeatable")
    list_gpus: bool = flag("List the known GPUs")
    list_models: bool = flag("List the models known by name")
    dtype: str | None = option(
        "KIND", "Choose fp32, bf16, amp-bf16, deepspeed-bf16, int4 and others"
    )
    optimizer: str = option(
        "NAME", "Choose adamw, sgd, adafactor, adamw-8bit and others",
        default="adamw", group=TRAINING,
    )  # fmt: skip
    master_weights: bool = flag("Keep fp32 weights and states beside 16-bit ones", group=TRAINING)
    grad_dtype: str | None = option("KIND", "Set the precision of gradients", group=TRAINING)
    batch: str | None = option(
        "N", "Set the sequences per GPU and pass; a rehearsal also takes 8,16 or 1..512 to search"
    )
    seq: int | None = option("N", "Set the tokens per sequence", min=1)
    varying_lengths: bool = flag("Count the cache of batches that differ in length", group=TRAINING)
    attention: Attention = option(None, "Choose how attention is computed", default=Attention.SDPA)
    checkpointing: str = option(
        "WHEN", "Recompute activations: none, full (each layer), sqrt, or every N layers",
        default="none", group=TRAINING,
    )  # fmt: skip
    lora: int | None = option(
        "RANK", "Train LoRA adapters only, of this rank or of 16", group=TRAINING, min=1
    )
    lora_targets: str = option(
        "NAMES", "Adapt attention, all-linear, or named matrices",
        default="attention", group=TRAINING,
    )  # fmt: skip
    dora: bool = flag("Train DoRA: LoRA with magnitudes", group=TRAINING)
    zero: int | None = option(
        "STAGE", "Shard states by ZeRO stage", group=SEVERAL_GPUS, min=0, max=3
    )
    fsdp: bool = flag("Shard everything, as ZeRO stage 3", group=SEVERAL_GPUS)
    fsdp_kind: FsdpKind | None = option(
        None, "Say which FSDP: 2, 1, or 1 with adapters and frozen weights in one unit",
        group=SEVERAL_GPUS,
    )  # fmt: skip
    world_size: int = _count("Set the GPUs that share states", SEVERAL_GPUS, 1)
    tensor_parallel: int = _count("Set the GPUs that share the matrices", SEVERAL_GPUS, 1)
    sequence_parallel: bool = flag(
        "Split the residual stream with the matrices", group=SEVERAL_GPUS
    )
    context_parallel: int = _count("Set the GPUs that share a sequence", SEVERAL_GPUS, 1)
    pipeline_parallel: int = _count("Set the GPUs that share the layers", SEVERAL_GPUS, 1)
    expert_parallel: int = _count("Set the GPUs that share the experts", SEVERAL_GPUS, 1)
    plan: bool = flag("Find the fewest GPUs, and how to use them", group=SEVERAL_GPUS)
    verify: bool = flag("Rehearse the best two plans that --rehearse can run", group=SEVERAL_GPUS)
    price: str | None = option(
        "NAME=DOLLARS", "Set the price of a GPU per hour, for --plan", group=SEVERAL_GPUS
    )
    offload: str | None = option(
        "WHAT,WHAT", "Keep optimizer, parameters or activations on the host", group=TRAINING
    )
    grad_accumulation: int = _count("Set the passes per step", TRAINING, 1)
    inference: bool = flag("Estimate weights and KV cache, without training", group=INFERENCE)
    new_tokens: int = _count("Leave room in the KV cache", INFERENCE)
    kv_dtype: str | None = option("KIND", "Set the precision of the KV cache", group=INFERENCE)
    cache: CacheKind = option(
        None, "Choose how the KV cache is allocated", default="dynamic", group=INFERENCE
    )
    gpu_memory_utilization: float = option(
        "SHARE",
        "Ask how many sequences a vLLM-like server holds with this share of the GPU",
        default=0.0,
        group=INFERENCE,
        show_default=False,
    )
    max_num_seqs: int = _count("Set the sequences that the server takes at once", INFERENCE)
    max_num_batched_tokens: int = _count(
        "Set the tokens that one step of the server reads", INFERENCE
    )
    keep_logits: bool = flag(
        "Count logits held through backward, or of a whole prompt", group=TRAINING
    )
    logits: Loss | None = option(
        None, "Choose which logits the loss is computed from", group=TRAINING
    )
    family: Family = option(
        None, "Choose how layers are built without a config.json",
        default="llama", group=SHAPE,
    )  # fmt: skip
    vocab: int = _count("Set the vocabulary", SHAPE)
    layers: int = _count("Set the layers", SHAPE)
    hidden: int = _count("Set the hidden size", SHAPE)
    heads: int = _count("Set the query heads", SHAPE)
    kv_heads: int = _count("Set the key-value heads", SHAPE)
    ffn: int = _count("Set the feed-forward width", SHAPE)
    positions: int = _count("Set learned positions (gpt)", SHAPE)
    dropout: float | None = option("P", "Set dropout", group=TRAINING, min=0.0, max=1.0)
    rehearse: bool = flag("Run the model's own class of Transformers or Diffusers", group=REHEARSAL)
    model: str | None = option(
        "MODULE:FACTORY",
        "Run your own model on fake tensors; imports it from the current directory",
        group=REHEARSAL,
    )
    loss: str = option(
        "ce|mean", "Choose a loss where --model has none", default="", group=REHEARSAL
    )
    steps: int | None = option(
        "N",
        "Stop a rehearsal after N steps; by default, when their memory repeats",
        group=REHEARSAL,
        min=1,
        max=200,
    )
    explain: bool = flag("Show formulas, values and sources")
