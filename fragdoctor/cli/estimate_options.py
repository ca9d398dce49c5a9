"""Options of ``fragdoctor estimate``, and the routes to an answer, each of which uses some.

An option that the chosen route does not use is refused, never silently ignored: the answer would
look as if the option had been taken into account.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal

from fragdoctor.cli.options import (
    DECLARED,
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
from fragdoctor.errors import ConfigError
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


class Route(StrEnum):
    """A route to an answer; the value is its name in sentences."""

    GPUS = "--list-gpus"
    MODELS = "--list-models"
    MODEL = "--model"
    LIBRARY = "--rehearse"
    FILE = "formulas for a model's file"
    COUNT = "formulas for --params or dimensions"


PARAMETERS: Final = tuple(field.name for field in fields(EstimateOptions))
"""All parameters of the command, in order."""

FORMULAS: Final = (Route.FILE, Route.COUNT)
_OUTPUT: Final = frozenset(field.name for field in fields(EstimateOutput))
_REHEARSED: Final = frozenset({"gpu", "dtype", "batch", "inference"})
_FORMULA: Final = frozenset(
    {"args", "gpu", "dtype", "batch", "seq", "attention", "lora", "lora_targets", "zero", "fsdp",
     "fsdp_kind", "plan", "price", "verify", "world_size", "inference", "explain",
     "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "dora",
     "keep_logits", "expandable_segments"}
)  # fmt: skip


def _group(name: str) -> frozenset[str]:
    """Return the parameters under a heading of the help."""
    found = ((field.name, field.metadata[DECLARED]) for field in fields(EstimateOptions))
    return frozenset(n for n, one in found if one.more.get("rich_help_panel") == name) - _FORMULA


_TRAINING: Final = _group(TRAINING) - {"dropout"} | {"sequence_parallel", "cache"}
_CACHE: Final = _group(INFERENCE)
_SHAPE: Final = _group(SHAPE) | {"params"}
_USED: Final[Mapping[Route, tuple[AbstractSet[str], AbstractSet[str]]]] = MappingProxyType(
    {
        Route.GPUS: ({"list_gpus"}, set()),
        Route.MODELS: ({"list_models"}, set()),
        Route.MODEL: (
            _REHEARSED | {"model"},
            {"optimizer", "grad_accumulation", "steps"},
        ),
        Route.LIBRARY: (
            _REHEARSED | {"inputs", "rehearse", "seq", "attention", "lora", "lora_targets"},
            {"optimizer", "checkpointing", "grad_accumulation", "steps", "fsdp", "world_size"},
        ),
        Route.FILE: (_FORMULA | {"inputs"}, _TRAINING),
        Route.COUNT: (_FORMULA | _SHAPE, _TRAINING | {"dropout"}),
    }
)
"""Route -> (parameters that it always uses, parameters that it uses without ``--inference``)."""

NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lora_targets": "lora",
        "dora": "lora",
        "fsdp_kind": "fsdp",
        **dict.fromkeys(("price", "verify"), "plan"),
        "sequence_parallel": "tensor_parallel",
        "max_num_seqs": "gpu_memory_utilization",
        "max_num_batched_tokens": "gpu_memory_utilization",
    }
)
"""Option -> another one without which it has no meaning."""

_HINTS: Final[Mapping[Route, str]] = MappingProxyType(
    {
        Route.MODEL: "Your code decides that: set it in the factory.",
        Route.LIBRARY: "Leave it out, or leave --rehearse out: formulas support it.",
        Route.FILE: "The file describes the model; see fragdoctor estimate --help.",
        Route.COUNT: "See fragdoctor estimate --help.",
    }
)
_BELONGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "steps": "It needs --rehearse or --model MODULE:FACTORY.",
        "rehearse": "It needs a config.json, or the name of a model.",
        **dict.fromkeys(_CACHE, "It is about the KV cache: add --inference."),
    }
)


def used(route: Route, *, inference: bool) -> AbstractSet[str]:
    """Return the parameters that a route uses, with ``--inference`` or without it."""
    always, in_training = _USED[route]
    in_inference = _CACHE if route in FORMULAS else frozenset()
    return _OUTPUT | always | (in_inference if inference else in_training)


def used_by_formulas(*, inference: bool) -> AbstractSet[str]:
    """Return the parameters that formulas use, which configuration files may set."""
    return used(Route.FILE, inference=inference) | used(Route.COUNT, inference=inference)


def flag_of(parameter: str) -> str:
    """Return a parameter as it is written on the command line."""
    return "an input" if parameter == "inputs" else f"--{parameter.replace('_', '-')}"


def route_of(chosen: EstimateOptions) -> Route:
    """Return the route that the options choose; options that do not fit it are refused later."""
    if chosen.list_gpus or chosen.list_models:
        return Route.GPUS if chosen.list_gpus else Route.MODELS
    if chosen.model is not None:
        return Route.MODEL
    if chosen.inputs:
        return Route.LIBRARY if chosen.rehearse else Route.FILE
    return Route.COUNT


def refuse_unused(route: Route, given: AbstractSet[str], *, inference: bool) -> None:
    """Refuse options on the command line that would have no effect.

    Raises:
        ConfigError: one sentence with the options and the route.
    """
    unused = [n for n in PARAMETERS if n in given and n not in used(route, inference=inference)]
    if unused:
        verb = "does" if len(unused) == 1 else "do"
        way = f"{route} with --inference" if inference else str(route)
        hint = _HINTS.get(route, "Leave it out.")
        if unused[0] in used(route, inference=not inference):
            hint = "Leave it out, or drop --inference."
        if route in FORMULAS:
            hint = _BELONGS.get(unused[0], hint)
        raise ConfigError(f"{', '.join(map(flag_of, unused))} {verb} not go with {way}.", hint=hint)
    for name, other in NEEDS.items():
        if name in given and other not in given:
            raise ConfigError(
                f"{flag_of(name)} means nothing without {flag_of(other)}.",
                hint=f"Add {flag_of(other)}, or leave it out.",
            )
