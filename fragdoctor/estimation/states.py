"""The part of a model that one of several GPUs holds, and what training adds to its parameters.

* Tensor parallelism splits the matrices of each layer by heads and by feed-forward width, and the
  embedding and head by vocabulary; norms and the residual stream stay whole, unless sequence
  parallelism also splits the stream (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
* Context parallelism splits the sequence; keys and values of the other parts pass through two
  buffers (Liu et al. 2023, https://arxiv.org/abs/2310.01889).
* Pipeline parallelism splits the layers; with one forward, one backward (Narayanan et al. 2021,
  https://arxiv.org/abs/2104.04473) the first stage holds as many micro batches as there are stages.
* Expert parallelism splits the experts among the GPUs of data parallelism; tokens travel to them
  and back (GShard, https://arxiv.org/abs/2006.16668).

Training adds gradients and optimizer states.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.layer import FP32, adapted
from fragdoctor.estimation.training_choices import (
    OptimizerSpec,
    dtype_bytes,
    optimizer_of,
    precision_of,
)
from fragdoctor.model.workload import FsdpKind, ParameterGroup, Role, Workload, shared

TOKENS: Final = "embedding.tokens"
LINEAR: Final = (Role.LINEAR, Role.EXPERT)
_BY_ROWS: Final = ("qkv", "up")
_BY_COLUMNS: Final = ("out", "down")


def n_gpus(workload: Workload) -> int:
    """Return the number of GPUs in the whole run."""
    return (
        workload.world_size * workload.tensor_parallel * workload.context_parallel
        * workload.pipeline_parallel
    )  # fmt: skip


def check_parallel(workload: Workload) -> None:
    """Refuse degrees of parallelism that the model cannot be split by.

    Raises:
        ConfigError: there are too few heads, layers or experts, or they do not divide evenly.
    """
    shape = workload.shape
    limits = (
        ("--tensor-parallel", workload.tensor_parallel, shape.n_heads, "heads", True),
        ("--pipeline-parallel", workload.pipeline_parallel, shape.n_layers, "layers", False),
        ("--expert-parallel", workload.expert_parallel, shape.n_experts, "experts", True),
    )
    for flag, degree, limit, what, divides in limits:
        if degree > 1 and (degree > limit or (divides and limit % degree)):
            raise ConfigError(
                f"{flag} {degree} does not go with {limit} {what}.",
                hint=f"Choose a divisor of {limit}." if limit else "Leave it out.",
            )


def local_part(workload: Workload) -> Workload:
    """Return one GPU's part as a workload of its own, or the same workload if nothing is split."""
    if not workload.degrees:
        return workload
    tensor, pipeline, shape = workload.tensor_parallel, workload.pipeline_parallel, workload.shape
    micro_batches = max(1, workload.grad_accumulation)
    place = {"first": 0, "middle": pipeline // 2, "last": pipeline - 1}.get(workload.stage, 0)
    in_flight = min(pipeline - place, micro_batches)
    local = replace(
        shape,
        parameters=tuple(_part(g, workload) for g in shape.parameters if _is_on(g, workload)),
        has_lm_head=shape.has_lm_head and workload.stage in ("", "last"),
        n_layers=ceil(shape.n_layers / pipeline),
        n_heads=max(1, shape.n_heads // tensor),
        n_kv_heads=max(1, shape.n_kv_heads // tensor) if shape.n_kv_heads else 0,
        ffn=ceil(shape.ffn / tensor),
        shared_ffn=ceil(shape.shared_ffn / tensor),
        vocab=ceil(shape.vocab / tensor),
        n_sliding_layers=ceil(shape.n_sliding_layers / pipeline),
    )
    return replace(
        workload,
        shape=local,
        batch=workload.batch * (1 if workload.inference else in_flight),
        seq=ceil(workload.seq / workload.context_parallel),
        stream_shards=tensor if workload.sequence_parallel else 1,
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
    )


def _is_on(group: ParameterGroup, workload: Workload) -> bool:
    """Return whether a pipeline stage holds a parameter: embedding first, head and norm last."""
    if group.layered or not workload.stage:
        return True
    is_head = slot_of(group) in ("head", "final_norm")
    is_both = workload.shape.tied_head and group.name == TOKENS
    return workload.stage == ("last" if is_head else "first") or (
        is_both and workload.stage == "last"
    )


def _part(group: ParameterGroup, workload: Workload) -> ParameterGroup:
    count, shape, tensor = group.count, list(group.shape), workload.tensor_parallel
    if group.layered:
        count = ceil(count / workload.pipeline_parallel)
    if group.role is Role.EXPERT:
        count = ceil(count / workload.expert_parallel)
    is_table = group.role is Role.HEAD or group.name == TOKENS
    if is_table or (group.slot in _BY_ROWS and group.role is not Role.NORM):
        shape[0] = ceil(shape[0] / tensor)
    elif group.slot in _BY_COLUMNS and len(shape) > 1:
        shape[-1] = ceil(shape[-1] / tensor)
    return replace(group, shape=tuple(shape), count=count)


def communication_elements(workload: Workload) -> int:
    """Return the number of elements in the buffers that one layer's tensors travel through."""
    shape, tokens = workload.shape, workload.batch * workload.seq
    local = ceil(tokens / workload.context_parallel)
    width = max(1, shape.n_kv_heads // workload.tensor_parallel) * shape.head_dim
    each = {
        "tensor": shape.hidden,  # the whole residual stream, reduced or gathered
        "context": 2 * 2 * width,  # keys and values of the next part and of the one after it
        "expert": 2 * max(1, shape.experts_per_token) * shape.hidden,  # to the experts and back
        "pipeline": 2 * shape.hidden,  # received and sent
    }
    return local * sum(each[kind] for kind in workload.degrees)


class GroupState(ParameterGroup, frozen=True, kw_only=True):
    """A parameter group with the sizes of each of its tensors on one GPU.

    Its ``slot`` is also set outside the layers: ``embedding``, ``head`` or ``final_norm``.

    Attributes:
        per_layer: tensors of the group in one layer, or all of them for a group outside the layers.
        stored_bytes: the parameter as stored between steps.
        gathered_bytes: the parameter gathered for use (stage 3).
        gradient_bytes: the gradient as backward makes it.
        kept_gradient_bytes: the part of the gradient that stays on this GPU.
        has_gradient: whether there is a gradient. A frozen parameter also has one in an FSDP 1 unit
            with trained ones (``_validate_frozen_params`` in PyTorch's
            ``distributed/fsdp/wrap.py``).
        state_bytes: all optimizer states, without fp32 master weights.
        step_bytes: one temporary copy in the optimizer's step.
        n_own: elements that this GPU updates.
    """

    per_layer: float
    is_trained: bool
    stored_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    kept_gradient_bytes: int
    has_gradient: bool
    state_bytes: int
    step_bytes: int
    n_own: int


def slot_of(group: ParameterGroup, *, tied_head: bool = False) -> str:
    """Return where a group is used: its slot in the layer, or its place outside the layers.

    A tied token embedding is also the head's weight, and its gradient first appears there.
    """
    if tied_head and group.name == TOKENS:
        return "head"
    if group.slot or group.layered:
        return group.slot or "up"
    by_role = {Role.HEAD: "head", Role.NORM: "final_norm"}
    return by_role.get(group.role, "embedding")


def states_of(workload: Workload) -> Sequence[GroupState]:
    """Return the sizes of each parameter group on one GPU, adapters in fp32 as PEFT keeps them."""
    precision = precision_of(workload.dtype)
    found = []
    for group in workload.shape.parameters:
        stored = precision.linear_weight if group.role in LINEAR else precision.weight
        if group.role is Role.EXPERT and precision.expert_weight:
            stored = precision.expert_weight
        found.append(_state(workload, group, stored))
    for group in adapted(workload):
        (rows, columns), rank = group.shape, workload.lora_rank
        shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
        if workload.dora:
            shapes["lora_magnitude"] = (rows,)
        for name, shape in shapes.items():
            adapter = replace(group, name=f"{group.name}.{name}", shape=shape, role=Role.OTHER)
            found.append(_state(workload, adapter, FP32, is_adapter=True))
    return tuple(found)


LIVE_PARAMETERS: Final = 10**9
"""Gathered parameters that DeepSpeed keeps before it frees any: the default of
``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``,
https://www.deepspeed.ai/docs/config-json/."""


def gathered_layers(workload: Workload) -> int:
    """Return how many layers are gathered at once: FSDP's prefetch, or DeepSpeed's limit."""
    is_here = workload.world_size == 1 and "parameters" not in workload.offload
    if workload.zero_stage < 3 or is_here:
        return 0
    n_layers = max(1, workload.shape.n_layers)
    each = sum(g.n_total for g in workload.shape.parameters if g.layered) / n_layers
    if workload.is_fsdp or not each:
        return 2
    return max(1, min(n_layers, int(LIVE_PARAMETERS / each)))


def _state(
    workload: Workload, group: ParameterGroup, stored: float, *, is_adapter: bool = False
) -> GroupState:
    optimizer, precision = optimizer_of(workload.optimizer), precision_of(workload.dtype)
    is_trained = is_adapter or not workload.lora_rank
    stage, world = workload.zero_stage, max(1, workload.world_size)
    if group.role is Role.EXPERT:  # only GPUs with the same experts are replicas of each other
        world = max(1, world // workload.expert_parallel)
    used = min(stored, FP32) if is_adapter else precision.gathered or min(stored, FP32)
    grad = dtype_bytes(workload.grad_dtype) if workload.grad_dtype else min(used, stored)
    # With FSDP 1, accumulation runs under no_sync, where gradients stay whole (documentation of
    # FullyShardedDataParallel.no_sync).
    is_first = workload.fsdp_kind in (FsdpKind.FIRST, FsdpKind.MIXED)
    is_whole = world == 1 or stage < 2 or (is_first and workload.grad_accumulation > 1)
    kept = grad if is_adapter or is_whole else precision.kept_gradient or grad
    away = "optimizer" in workload.offload
    if away and stage >= 2:  # ZeRO-Offload moves this GPU's part of the gradients to the host too
        kept = 0.0
    here = 0.0 if "parameters" in workload.offload and stage >= 3 else stored
    state_element = FP32 if workload.master_weights and not is_adapter else stored
    own = ceil(group.n_each / (world if stage >= 1 else 1))
    is_tied = workload.shape.tied_head and workload.shape.has_lm_head
    return GroupState(
        **shared(replace(group, slot=slot_of(group, tied_head=is_tied)), ParameterGroup),
        per_layer=group.count / max(1, workload.shape.n_layers) if group.layered else group.count,
        is_trained=is_trained,
        stored_bytes=int(ceil(group.n_each / (world if stage >= 3 else 1)) * here),
        gathered_bytes=int(group.n_each * used),
        gradient_bytes=int(group.n_each * grad),
        kept_gradient_bytes=int(ceil(group.n_each / (1 if is_whole else world)) * kept),
        has_gradient=is_trained or workload.fsdp_kind is FsdpKind.MIXED,
        state_bytes=(
            _state_bytes(optimizer, group, own, state_element) if is_trained and not away else 0
        ),
        step_bytes=int(own * state_element),
        n_own=own,
    )


def _state_bytes(optimizer: OptimizerSpec, group: ParameterGroup, own: int, element: float) -> int:
    if optimizer.is_paged:  # the driver moves states to the host when the GPU is full
        return 0
    copies, kept, more = optimizer.copies, own, 0.0
    is_matrix = len(group.shape) == 2 and group.role in LINEAR
    if is_matrix and optimizer.matrices >= 0:
        copies = optimizer.matrices
    if is_matrix and optimizer.rank and min(group.shape) > optimizer.rank:
        # States of the projected gradient, and the projection itself.
        kept = own * optimizer.rank // min(group.shape)
        more = min(group.shape) * optimizer.rank * element
    more += own * optimizer.fixed
    if optimizer.factored:
        more += (sum(group.shape[-2:]) if len(group.shape) >= 2 else own) * element
    return int(kept * element * copies + more)
