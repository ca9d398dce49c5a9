"""From options as people write them to a checked workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, replace
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.layer import adapted
from fragdoctor.estimation.model_shapes import (
    MAX_PARAMETERS,
    Overrides,
    guessed_shape,
    model_of,
    parse_count,
)
from fragdoctor.estimation.states import check_parallel
from fragdoctor.estimation.training_choices import dtype_bytes, optimizer_of, precision_of
from fragdoctor.frozen import frozen
from fragdoctor.model.workload import Attention, FsdpKind, Loss, ModelShape, Workload

_QUANTISED: Final = ("int4", "nf4", "int8", "fp8-weights", "gptq", "awq", "mxfp4")
OFFLOADABLE: Final = ("optimizer", "parameters", "activations")
DEFAULT_SEQ: Final = 2048
MAX_BATCH: Final = 1 << 24
MAX_SEQ: Final = 1 << 28
MAX_WORLD: Final = 1 << 20
MAX_LAYERS: Final = 2000
FORMULA_ERROR: Final = (
    "How sure: on 64 recorded runs of GPT- and Llama-like models the peak came out within 7 % and "
    "reserved memory within 15 %, on PyTorch's own allocator with steps of 84 models of "
    "Transformers, most in 3 precisions, the peak within 5 % for 9 of 10 and within 10 % for all; "
    "code that keeps other tensors differs more. --rehearse runs the model's own class where its "
    "library is installed, --model your own code."
)

NO_LAYERS_ERROR: Final = (
    "How sure: parameters, gradients and optimizer states follow from the counts; activations, "
    "which can be the larger part, are not in it."
)
INFERENCE_ERROR: Final = (
    "How sure: 3 recorded prefills of Llama-like models came out within 5 %; a server such as vLLM "
    "takes the rest of the GPU for its cache."
)


@frozen
class Request:
    """The options of ``fragdoctor estimate``; "" and 0 = not given."""

    inputs: Sequence[str] = ()
    params: str = ""
    dtype: str = ""
    optimizer: str = "adamw"
    master_weights: bool = False
    grad_dtype: str = ""
    batch: int = 1
    seq: int = 0
    attention: str = "sdpa"
    checkpointing: str = "none"
    lora_rank: int = 0
    lora_targets: str = "attention"
    zero_stage: int = 0
    is_fsdp: bool = False
    fsdp_kind: str = ""
    world_size: int = 1
    grad_accumulation: int = 1
    inference: bool = False
    new_tokens: int = 0
    kv_dtype: str = ""
    cache: str = "dynamic"
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    offload: str = ""
    dora: bool = False
    keeps_logits: bool = False
    logits: str = ""
    compute: str = ""
    overrides: Overrides = field(default_factory=Overrides)


def error_of(workload: Workload) -> str:
    """Return how far off the formulas may be for this workload, in a sentence."""
    if not workload.shape.has_layers:
        return NO_LAYERS_ERROR
    return INFERENCE_ERROR if workload.inference else FORMULA_ERROR


def workload_of(request: Request) -> Workload:
    """Return what is to be estimated.

    Raises:
        ConfigError: options that are wrong or exclude each other.
        InputError: an input cannot be read.
    """
    _check(request)
    shape, stored = _shape(request)
    dtype = precision_of(request.dtype or _default_dtype(stored, request)).name
    if request.inference and dtype == "fp8":
        dtype = "fp8-weights"  # no 16-bit weights beside them, unlike in training
    if stored in _QUANTISED and dtype != stored and not request.inference:
        shape = replace(shape, assumptions=(*shape.assumptions, _dequantised(dtype)))
    seq, notes = _length(request, shape)
    if not request.dtype:
        in_file = f"; the file stores {stored}" if stored and stored != dtype else ""
        notes = (*notes, f"The precision is taken to be {dtype}{in_file}; --dtype sets it.")
    if notes:
        shape = replace(shape, assumptions=(*shape.assumptions, *notes))
    _check_dtype(request, dtype)
    workload = Workload(
        **_as_asked(request),
        shape=shape,
        dtype=dtype,
        optimizer=optimizer_of(request.optimizer).name,
        master_weights=request.master_weights
        or (precision_of(dtype).has_master and not request.inference and not request.lora_rank),
        seq=seq,
        attention=Attention(request.attention),
        loss=Loss(request.logits) if request.logits else None,
        fsdp_kind=FsdpKind(request.fsdp_kind) if request.fsdp_kind else None,
        lora_targets=tuple(t.strip() for t in request.lora_targets.split(",") if t.strip()),
        offload=_offloaded(request.offload),
    )
    _check_targets(workload)
    _check_size(workload)
    check_parallel(workload)
    if precision_of(dtype).gathered and request.zero_stage < 3:
        raise ConfigError(
            f"{dtype} is the mixed precision of FSDP, which shards the weights.",
            hint="Add --fsdp --world-size N, or use --dtype amp-bf16.",
        )
    return workload


def _as_asked(request: Request) -> dict[str, Any]:
    """Return the fields of a workload that are as they were asked for."""
    read = {"dtype", "optimizer", "master_weights", "seq", "attention", "lora_targets", "offload",
            "loss", "fsdp_kind"}  # fmt: skip
    names = {f.name for f in fields(Workload)} - read
    return {f.name: getattr(request, f.name) for f in fields(Request) if f.name in names}


def _check_size(workload: Workload) -> None:
    """Refuse models beyond anything that exists: their estimates would only waste time."""
    n = workload.shape.n_parameters
    if n > MAX_PARAMETERS or workload.shape.n_layers > MAX_LAYERS:
        raise ConfigError(
            f"A model of {n} parameters in {workload.shape.n_layers} layers is out of range.",
            hint=f"At most {MAX_PARAMETERS} parameters and {MAX_LAYERS} layers: check the input.",
        )


def _offloaded(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in parts:
        if part not in OFFLOADABLE:
            raise ConfigError(
                f"{part!r} is nothing that can be offloaded.",
                hint=f"Choose of {', '.join(OFFLOADABLE)}, separated by commas.",
            )
    return parts


def _check_targets(workload: Workload) -> None:
    """Refuse LoRA that would adapt nothing."""
    if not workload.lora_rank:
        return
    groups = workload.shape.parameters
    if not adapted(workload):
        names = dict.fromkeys(
            g.name.removesuffix(".weight").split(".")[-1]
            for g in groups
            if g.layered and len(g.shape) == 2
        )
        raise ConfigError(
            f"--lora-targets {','.join(workload.lora_targets)} names no matrix of the model.",
            hint=f"Choose attention, all-linear, or from {', '.join(list(names)[:12]) or 'none'}.",
        )


def _shape(request: Request) -> tuple[ModelShape, str]:
    given = request.overrides
    if request.inputs:
        if request.params or given.any_given:
            raise ConfigError(
                "An input describes the model: --params and dimensions such as --layers do not "
                "go with it.",
                hint="Give one or the other, or change the file.",
            )
        found = model_of(request.inputs)
        return found.shape, found.dtype
    if not request.params and not given.any_given:
        raise ConfigError(
            "There is nothing to estimate.",
            hint="Give a config.json, a model directory, safetensors files, or --params 7B.",
        )
    return guessed_shape(parse_count(request.params) if request.params else 0, given), ""


def _default_dtype(stored: str, request: Request) -> str:
    """The dtype of the file, where it can be trained; else fp32, as PyTorch does by itself."""
    if request.inference:
        return stored or "bf16"
    if stored and (precision_of(stored).trains_base or request.lora_rank):
        return stored
    return "fp32"


def _dequantised(dtype: str) -> str:
    return (
        f"The file's weights are quantised and cannot be trained so: {dtype} weights are counted. "
        "--lora RANK trains adapters on the quantised ones."
    )


def _length(request: Request, shape: ModelShape) -> tuple[int, Sequence[str]]:
    if not shape.has_layers:
        return 0, ()
    if request.seq:
        return request.seq, _beyond(request.seq + request.new_tokens, shape)
    seq = min(DEFAULT_SEQ, shape.max_positions or DEFAULT_SEQ)
    return seq, (f"Sequences of {seq} tokens are assumed; --seq sets the length.",)


def _beyond(tokens: int, shape: ModelShape) -> Sequence[str]:
    """Refuse or warn of more tokens than the model has positions."""
    if not shape.max_positions or tokens <= shape.max_positions:
        return ()
    if any(g.name == "embedding.positions" for g in shape.parameters):
        raise ConfigError(
            f"{tokens} tokens do not fit: the model has a table of {shape.max_positions} "
            "positions.",
            hint=f"At most --seq {shape.max_positions}, new tokens included.",
        )
    beyond = f"{tokens} tokens are more than the {shape.max_positions} positions"
    return (f"{beyond} that the model was made for: it answers badly there unless extended.",)


def _check(request: Request) -> None:
    for name, value, limit in (
        ("--batch", request.batch, MAX_BATCH),
        ("--seq", request.seq, MAX_SEQ),
        ("--new-tokens", request.new_tokens, MAX_SEQ),
        ("--world-size", request.world_size, MAX_WORLD),
        ("--lora", request.lora_rank, 1 << 16),
    ):
        if value > limit:
            raise ConfigError(f"{name} {value} is out of range.", hint=f"At most {limit}.")
    if request.grad_dtype:
        dtype_bytes(request.grad_dtype)
    if request.kv_dtype:
        dtype_bytes(request.kv_dtype)
    choice = request.checkpointing
    if choice not in ("none", "full", "sqrt") and not (
        choice.isascii() and choice.isdigit() and 0 < int(choice[:9]) < 10**6
    ):
        raise ConfigError(
            f"{choice!r} is no way of checkpointing.",
            hint="Choose none, full, sqrt, or a number of layers.",
        )
    if not request.inference and (request.kv_dtype or request.new_tokens):
        raise ConfigError(
            "--kv-dtype and --new-tokens are about the KV cache.", hint="Add --inference."
        )
    if request.zero_stage and request.world_size == 1:
        raise ConfigError(
            "ZeRO and FSDP share states among GPUs: the number of GPUs is missing.",
            hint="Add for example --world-size 8.",
        )


def _check_dtype(request: Request, dtype: str) -> None:
    if precision_of(dtype).trains_base or request.inference or request.lora_rank:
        return
    raise ConfigError(
        f"Weights in {dtype} cannot be trained.",
        hint="Add --lora RANK to train adapters on them, or --inference.",
    )
