"""The part of a run that one of several GPUs holds: tensor, context, pipeline, expert parallelism.

* Tensor parallelism splits the matrices of each layer by heads and by feed-forward width, and
  embedding and head by the vocabulary; norms and the residual stream stay whole, unless sequence
  parallelism splits the latter too (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
* Context parallelism splits the sequence; keys and values of the other parts pass by in two
  buffers (Liu et al. 2023, https://arxiv.org/abs/2310.01889).
* Pipeline parallelism splits the layers; with one forward, one backward (Narayanan et al. 2021,
  https://arxiv.org/abs/2104.04473) the first stage holds as many micro batches as there are stages.
* Expert parallelism splits the experts; tokens travel there and back (GShard,
  https://arxiv.org/abs/2006.16668).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.workload import ParameterGroup, Role, Workload

_BY_ROWS: Final = ("qkv", "up", "cross_q", "cross_kv")
_BY_COLUMNS: Final = ("out", "down", "cross_out")
_WHOLE: Final = ("attention.kv_a_proj.weight", "attention.q_a_proj.weight")


def n_gpus(workload: Workload) -> int:
    """Return the GPUs of the whole run."""
    return (
        workload.world_size * workload.tensor_parallel * workload.context_parallel
        * workload.pipeline_parallel
    )  # fmt: skip


def check_parallel(workload: Workload) -> None:
    """Refuse degrees that the model cannot be split by.

    Raises:
        ConfigError: heads, layers or experts are fewer, or do not divide.
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
    """Return what one GPU holds as a workload of its own; the same where nothing is split."""
    tensor, pipeline = workload.tensor_parallel, workload.pipeline_parallel
    if max(tensor, pipeline, workload.context_parallel, workload.expert_parallel) == 1:
        return workload
    shape = workload.shape
    in_flight = min(pipeline, max(1, workload.grad_accumulation))
    local = replace(
        shape,
        parameters=tuple(_part(group, workload) for group in shape.parameters),
        n_layers=ceil(shape.n_layers / pipeline),
        n_heads=max(1, shape.n_heads // tensor),
        n_kv_heads=max(1, shape.n_kv_heads // tensor) if shape.n_kv_heads else 0,
        ffn=ceil(shape.ffn / tensor),
        shared_ffn=ceil(shape.shared_ffn / tensor),
        n_dense_layers=ceil(shape.n_dense_layers / pipeline),
        dense_ffn=ceil(shape.dense_ffn / tensor),
        vocab=ceil(shape.vocab / tensor),
        n_sliding_layers=ceil(shape.n_sliding_layers / pipeline),
        n_recurrent_layers=ceil(shape.n_recurrent_layers / pipeline),
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
        expert_parallel=1,
    )


def _part(group: ParameterGroup, workload: Workload) -> ParameterGroup:
    count, shape, tensor = group.count, list(group.shape), workload.tensor_parallel
    if group.layered:
        count = ceil(count / workload.pipeline_parallel)
    if group.role is Role.EXPERT:
        count = ceil(count / workload.expert_parallel)
    is_table = group.role is Role.HEAD or group.name == "embedding.tokens"
    if is_table or (group.slot in _BY_ROWS and group.role is not Role.NORM):
        if group.name not in _WHOLE:
            shape[0] = ceil(shape[0] / tensor)
    elif group.slot in _BY_COLUMNS and len(shape) > 1:
        shape[-1] = ceil(shape[-1] / tensor)
    return replace(group, shape=tuple(shape), count=count)


def communication_elements(workload: Workload) -> int:
    """Return the elements of the buffers through which one layer's tensors travel."""
    shape, tokens = workload.shape, workload.batch * workload.seq
    local = ceil(tokens / workload.context_parallel)
    elements = 0
    if workload.tensor_parallel > 1:  # the whole residual stream, reduced or gathered
        elements += local * shape.hidden
    if workload.context_parallel > 1:  # keys and values of the next part, and of the one after
        width = max(1, shape.n_kv_heads // workload.tensor_parallel) * shape.head_dim
        elements += 2 * 2 * local * width
    if workload.expert_parallel > 1:  # to the experts and back
        elements += 2 * local * max(1, shape.experts_per_token) * shape.hidden
    if workload.pipeline_parallel > 1:  # received and sent
        elements += 2 * local * shape.hidden
    return elements
