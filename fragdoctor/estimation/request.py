"""Turns options as people write them into a checked workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.layer import adapted
from fragdoctor.estimation.model_shapes import (
    MAX_PARAMETERS,
    GivenSizes,
    guessed_shape,
    model_of,
    parse_count,
)
from fragdoctor.estimation.states import check_parallel
from fragdoctor.estimation.training_choices import dtype_bytes, optimizer_of, precision_of
from fragdoctor.model.workload import Attention, FsdpKind, Loss, ModelShape, Role, Workload

OFFLOADABLE: Final = ("optimizer", "parameters", "activations")
DEFAULT_SEQ: Final = 2048
MAX_BATCH: Final = 1 << 24
MAX_SEQ: Final = 1 << 28
MAX_WORLD: Final = 1 << 20


OPTIONS: Final = frozenset(Workload.__struct_fields__) - {"shape", "stage", "stream_shards"}
"""The options of :func:`workload_of` besides the model."""


def workload_of(
    inputs: Sequence[str] = (), params: str = "", sizes: GivenSizes | None = None, **asked: Any
) -> Workload:
    """Return the workload to estimate.

    Args:
        inputs: files or a name that describe a model; if empty, a count or dimensions are needed.
        params: a parameter count such as ``7B``.
        sizes: dimensions given by hand.
        asked: fields of a workload (:data:`OPTIONS`), with choices and lists as text; "" and 0 =
            not given.

    Raises:
        ConfigError: options are wrong or exclude each other.
        InputError: an input cannot be read.
    """
    for name in asked.keys() - OPTIONS:
        raise ConfigError(
            f"estimate() has no option {name!r}.", hint=f"It has {', '.join(sorted(OPTIONS))}."
        )
    chosen = {
        **asked,
        "attention": Attention(asked.get("attention") or "sdpa"),
        "loss": Loss(asked["loss"]) if asked.get("loss") else None,
        "fsdp_kind": FsdpKind(asked["fsdp_kind"]) if asked.get("fsdp_kind") else None,
        "lora_targets": _listed(asked.get("lora_targets") or "attention"),
        "offload": _listed(asked.get("offload") or ""),
        "optimizer": optimizer_of(asked.get("optimizer") or "adamw").name,
    }
    shape, stored = _shape(inputs, params, sizes or GivenSizes())
    shape = _with_stated_head(shape, chosen["loss"])
    workload = Workload(shape, **chosen)
    _check(workload)
    dtype = precision_of(workload.dtype if asked.get("dtype") else _default_dtype(stored, workload))
    name, notes = dtype.name, list(shape.assumptions)
    if workload.inference and name == "fp8":
        name = "fp8-weights"  # unlike in training, there are no 16-bit weights besides
    is_quantised = bool(stored) and not precision_of(stored).trains_base
    if is_quantised and name != stored and not workload.inference:
        notes.append(
            f"The file's weights are quantized and cannot be trained that way, so {name} weights "
            "are counted. --lora RANK trains adapters on the quantized weights."
        )
    seq, more = _length(workload)
    notes += more
    if not asked.get("dtype"):
        in_file = f"; the file stores {stored}" if stored and stored != name else ""
        notes.append(f"The precision is assumed to be {name}{in_file}; --dtype sets it.")
    frozen_base = workload.inference or workload.lora_rank > 0
    workload = replace(
        workload,
        shape=replace(shape, assumptions=tuple(notes)),
        dtype=name,
        master_weights=workload.master_weights or (dtype.has_master and not frozen_base),
        seq=seq,
    )
    if not (dtype.trains_base or frozen_base):
        raise ConfigError(
            f"Weights in {name} cannot be trained.",
            hint="Add --lora RANK to train adapters on them, or --inference.",
        )
    if dtype.gathered and workload.zero_stage < 3:
        raise ConfigError(
            f"{name} is the mixed precision of FSDP, which shards the weights.",
            hint="Add --fsdp --world-size N, or use --dtype amp-bf16.",
        )
    _check_targets(workload)
    check_parallel(workload)
    return workload


def _with_stated_head(shape: ModelShape, loss: Loss | None) -> ModelShape:
    """Return a shape with the head that a stated loss means: over the vocabulary, or over classes.

    A few classes take no memory to speak of.
    """
    if loss is Loss.NONE:
        kept = tuple(g for g in shape.parameters if g.role is not Role.HEAD)
        return replace(shape, parameters=kept, has_lm_head=False, may_have_head=False)
    return shape.with_head() if loss and shape.may_have_head else shape


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_targets(workload: Workload) -> None:
    """Refuse LoRA that would adapt nothing."""
    if workload.lora_rank and not adapted(workload):
        names = dict.fromkeys(
            g.name.removesuffix(".weight").split(".")[-1]
            for g in workload.shape.parameters
            if g.layered and len(g.shape) == 2
        )
        raise ConfigError(
            f"--lora-targets {','.join(workload.lora_targets)} names no matrix of the model.",
            hint=f"Choose attention, all-linear, or from {', '.join(list(names)[:12]) or 'none'}.",
        )


def _shape(inputs: Sequence[str], params: str, given: GivenSizes) -> tuple[ModelShape, str]:
    if inputs:
        if params or given.any_given:
            raise ConfigError(
                "An input describes the model: --params and dimensions such as --layers do not "
                "go with it.",
                hint="Give one or the other, or change the file.",
            )
        found = model_of(inputs)
        return found.shape, found.dtype
    if not params and not given.any_given:
        raise ConfigError(
            "There is nothing to estimate.",
            hint="Give a config.json, a model directory, or --params 7B.",
        )
    return guessed_shape(parse_count(params) if params else 0, given), ""


def _default_dtype(stored: str, workload: Workload) -> str:
    """Return the dtype of the file if it can be trained, else fp32, which is PyTorch's default."""
    if workload.inference:  # vLLM's --dtype auto serves fp32 checkpoints in 16 bits
        is_served = workload.cache == "paged"
        return "bf16" if not stored or (stored == "fp32" and is_served) else stored
    if stored and (precision_of(stored).trains_base or workload.lora_rank):
        return stored
    return "fp32"


def _length(workload: Workload) -> tuple[int, Sequence[str]]:
    shape = workload.shape
    if not workload.seq:
        seq = min(DEFAULT_SEQ, shape.max_positions or DEFAULT_SEQ)
        return seq, (f"Sequences of {seq} tokens are assumed; --seq sets the length.",)
    tokens = workload.seq + workload.new_tokens
    if not shape.max_positions or tokens <= shape.max_positions:
        return workload.seq, ()
    if any(g.name == "embedding.positions" for g in shape.parameters):
        raise ConfigError(
            f"{tokens} tokens do not fit: the model has a table of {shape.max_positions} "
            "positions.",
            hint=f"At most --seq {shape.max_positions}, new tokens included.",
        )
    beyond = f"{tokens} tokens are more than the {shape.max_positions} positions"
    note = f"{beyond} that the model was made for: its answers are bad there unless it is extended."
    return workload.seq, (note,)


def _check(workload: Workload) -> None:
    """Refuse values beyond anything that exists, and combinations that make no sense."""
    for name, value, limit in (
        ("--batch", workload.batch, MAX_BATCH),
        ("--seq", workload.seq, MAX_SEQ),
        ("--new-tokens", workload.new_tokens, MAX_SEQ),
        ("--world-size", workload.world_size, MAX_WORLD),
        ("--lora", workload.lora_rank, 1 << 16),
        ("The model's parameter count", workload.shape.n_parameters, MAX_PARAMETERS),
    ):
        if value > limit:
            raise ConfigError(f"{name} {value} is out of range.", hint=f"At most {limit}.")
    for dtype in filter(None, (workload.grad_dtype, workload.kv_dtype)):
        dtype_bytes(dtype)
    choice = workload.checkpointing
    is_count = choice.isascii() and choice.isdigit() and 0 < int(choice[:9]) < 10**6
    holds = workload.keeps_logits and choice == "none"
    caches = workload.cache == "dynamic" or (workload.cache == "tuple" and holds)
    unknown = next((part for part in workload.offload if part not in OFFLOADABLE), "")
    rows = (
        (unknown, f"{unknown!r} cannot be offloaded.",
         f"Choose from {', '.join(OFFLOADABLE)}, separated by commas."),
        (not (is_count or choice in ("none", "full", "sqrt")),
         f"{choice!r} is not a kind of checkpointing.",
         "Choose none, full, sqrt, or a number of layers."),
        (not workload.inference and (workload.kv_dtype or workload.new_tokens or not caches),
         "--kv-dtype, --new-tokens and --cache are about the KV cache.",
         ("Add --inference. A training loop that holds a cache with the logits, without "
          "checkpointing, is --keep-logits --cache tuple.")),
        (workload.zero_stage and workload.world_size == 1 and not workload.offload,
         "ZeRO and FSDP share states among GPUs, but the number of GPUs is missing.",
         "Add for example --world-size 8."),
    )  # fmt: skip
    for is_wrong, said, hint in rows:
        if is_wrong:
            raise ConfigError(said, hint=hint)
