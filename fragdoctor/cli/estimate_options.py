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
    under,
)
from fragdoctor.model.workload import Attention, FsdpKind, Loss

_training, _training_flag = under(TRAINING)
_several_gpus, _several_gpus_flag = under(SEVERAL_GPUS)
_inference, _inference_flag = under(INFERENCE)
_rehearsal, _rehearsal_flag = under(REHEARSAL)
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
    optimizer: str = _training(
        "NAME", "Choose adamw, sgd, adafactor, adamw-8bit and others", default="adamw"
    )
    master_weights: bool = _training_flag("Keep fp32 weights and states beside 16-bit ones")
    grad_dtype: str | None = _training("KIND", "Set the precision of gradients")
    batch: str | None = option(
        "N", "Set the sequences per GPU and pass; a rehearsal also takes 8,16 or 1..512 to search"
    )
    seq: int | None = option("N", "Set the tokens per sequence", min=1)
    varying_lengths: bool = _training_flag("Count the cache of batches that differ in length")
    expandable_segments: bool = flag("Count PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    attention: Attention = option(None, "Choose how attention is computed", default=Attention.SDPA)
    checkpointing: str = _training(
        "WHEN",
        "Recompute activations: none, full (each layer), sqrt, or every N layers",
        default="none",
    )
    lora: int | None = _training("RANK", "Train LoRA adapters only, of this rank or of 16", min=1)
    lora_targets: str = _training(
        "NAMES", "Adapt attention, all-linear, or named matrices", default="attention"
    )
    dora: bool = _training_flag("Train DoRA: LoRA with magnitudes")
    zero: int | None = _several_gpus("STAGE", "Shard states by ZeRO stage", min=0, max=3)
    fsdp: bool = _several_gpus_flag("Shard everything, as ZeRO stage 3")
    fsdp_kind: FsdpKind | None = _several_gpus(
        None, "Say which FSDP: 2, 1, or 1 with adapters and frozen weights in one unit"
    )
    world_size: int = _count("Set the GPUs that share states", SEVERAL_GPUS, 1)
    tensor_parallel: int = _count("Set the GPUs that share the matrices", SEVERAL_GPUS, 1)
    sequence_parallel: bool = _several_gpus_flag("Split the residual stream with the matrices")
    context_parallel: int = _count("Set the GPUs that share a sequence", SEVERAL_GPUS, 1)
    pipeline_parallel: int = _count("Set the GPUs that share the layers", SEVERAL_GPUS, 1)
    expert_parallel: int = _count("Set the GPUs that share the experts", SEVERAL_GPUS, 1)
    plan: bool = _several_gpus_flag("Find the fewest GPUs, and how to use them")
    verify: bool = _several_gpus_flag("Rehearse the best two plans that --rehearse can run")
    price: str | None = _several_gpus("NAME=DOLLARS", "Set the price of a GPU per hour, for --plan")
    offload: str | None = _training(
        "WHAT,WHAT", "Keep optimizer, parameters or activations on the host"
    )
    grad_accumulation: int = _count("Set the passes per step", TRAINING, 1)
    inference: bool = _inference_flag("Estimate weights and KV cache, without training")
    new_tokens: int = _count("Leave room in the KV cache", INFERENCE)
    kv_dtype: str | None = _inference("KIND", "Set the precision of the KV cache")
    cache: CacheKind = _inference(None, "Choose how the KV cache is allocated", default="dynamic")
    gpu_memory_utilization: float = _inference(
        "SHARE",
        "Ask how many sequences a vLLM-like server holds with this share of the GPU",
        default=0.0,
        show_default=False,
    )
    max_num_seqs: int = _count("Set the sequences that the server takes at once", INFERENCE)
    max_num_batched_tokens: int = _count(
        "Set the tokens that one step of the server reads", INFERENCE
    )
    keep_logits: bool = _training_flag("Count logits held through backward, or of a whole prompt")
    logits: Loss | None = _training(None, "Choose which logits the loss is computed from")
    family: Family = option(
        None, "Choose how layers are built without a config.json", default="llama", group=SHAPE
    )
    vocab: int = _count("Set the vocabulary", SHAPE)
    layers: int = _count("Set the layers", SHAPE)
    hidden: int = _count("Set the hidden size", SHAPE)
    heads: int = _count("Set the query heads", SHAPE)
    kv_heads: int = _count("Set the key-value heads", SHAPE)
    ffn: int = _count("Set the feed-forward width", SHAPE)
    positions: int = _count("Set learned positions (gpt)", SHAPE)
    dropout: float | None = _training("P", "Set dropout", min=0.0, max=1.0)
    rehearse: bool = _rehearsal_flag("Run the model's own class of Transformers or Diffusers")
    model: str | None = _rehearsal(
        "MODULE:FACTORY",
        "Run your own model on fake tensors; imports it from the current directory",
    )
    steps: int | None = _rehearsal(
        "N", "Stop a rehearsal after N steps; by default, when their memory repeats", min=1, max=200
    )
    explain: bool = flag("Show formulas, values and sources")
