"""Estimates how many sequences a server like vLLM holds at once.

Such a server takes a share of the GPU, loads the weights, runs its widest step once to measure
activations, and turns the rest into a pool of cache blocks of 16 tokens each
(https://docs.vllm.ai/en/stable/api/vllm/config/cache/). Sequences are served from the pool; with
chunked prefill, a step never reads more than ``max_batched_tokens``. Its kernels never write out
scores. The memory for sampling was fitted to published logs, see :data:`_SAMPLER_BYTES`.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.formula import formula_footprint
from fragdoctor.estimation.kv_cache import BLOCK_TOKENS, cache_bytes_per_sequence
from fragdoctor.estimation.states import local_part
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.gpu_table import SPEEDS
from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.memory_estimate import Serving
from fragdoctor.model.workload import Attention, Workload
from fragdoctor.units import GIB, MIB

# Bytes per logit of all sequences: vLLM 0.19 reports activations of 1.89 GiB for Llama 3.1 8B and
# of 2.21 GiB for Qwen2.5 7B with 1,024 sequences on an H100 (https://github.com/llm-d-incubation/
# llm-d-planner/tree/main/accuracy). Up to version 0.16, it was 39.
_SAMPLER_BYTES: Final = 15
# What it reports outside PyTorch on one GPU there. The CUDA context exists before it measures.
OUTSIDE_BYTES: Final = 256 * MIB
# What vLLM 0.19 reports outside PyTorch on 2 or 4 H100s of one NVLink switch, 2.06 to 2.21 GiB,
# beyond the 0.25 GiB on one (logs of 13 servers, https://github.com/llm-d-incubation/
# llm-d-planner/pull/205); GPUs without such a switch report 0.25 GiB with two as well.
SWITCHED_BYTES: Final = 1900 * MIB
_SWITCH_BYTES_PER_SECOND: Final = 900e9
UTILIZATION: Final = 0.9
"""Share of a GPU that vLLM takes by default, https://docs.vllm.ai/en/stable/cli/serve/."""


def defaults_on(gpu: GpuModel) -> tuple[int, int]:
    """Return how many sequences ``vllm serve`` takes at once, and how many tokens a step reads.

    ``EngineArgs.get_batch_defaults`` in vLLM's ``vllm/engine/arg_utils.py``, since version 0.8.
    """
    is_large = gpu.total_bytes >= 70 * GIB and "a100" not in gpu.name
    return (1024, 8192) if is_large else (256, 2048)


def serving_of(
    workload: Workload,
    gpu: GpuModel,
    *,
    utilization: float,
    max_seqs: int = 0,
    max_batched_tokens: int = 0,
) -> Serving:
    """Return the memory that a server has left for its cache on one GPU, and its sequences.

    Args:
        workload: inference; its length plus new tokens is the longest that a sequence can get.
        gpu: one of the GPUs that share the model.
        utilization: share of the GPU's memory that the server takes.
        max_seqs: sequences that it serves at once; 0 = vLLM's default.
        max_batched_tokens: tokens that one step reads; 0 = vLLM's default.

    Raises:
        ConfigError: the share is out of range, or the model's layers are not known.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g} is not a share.", hint="Use for example 0.9."
        )
    length = workload.seq + workload.new_tokens
    usual_seqs, usual_tokens = defaults_on(gpu)
    limit, tokens = max_seqs or usual_seqs, max_batched_tokens or usual_tokens
    step = replace(
        workload, batch=1, seq=tokens, new_tokens=0, cache="paged", attention=Attention.FLASH
    )
    footprint = formula_footprint(step)
    most = {item.id: item.n_bytes for item in footprint.items}
    local = local_part(replace(workload, cache="paged", batch=1))
    weights = most.get("parameters", 0)
    in_layers = footprint.peak_allocated_bytes - weights - most.get("kv_cache", 0)
    stream = tokens * workload.shape.hidden * precision_of(workload.dtype).residual
    sampling = min(limit, tokens) * workload.shape.vocab * _SAMPLER_BYTES + int(stream)
    activations = max(0, in_layers, sampling)
    budget = int(gpu.total_bytes * utilization) - OUTSIDE_BYTES
    speeds = SPEEDS.get(gpu.name)
    if workload.tensor_parallel > 1 and speeds and speeds.link_bytes >= _SWITCH_BYTES_PER_SECOND:
        budget -= SWITCHED_BYTES
    pool = max(0, budget - weights - activations)
    each = cache_bytes_per_sequence(local)
    whole_tokens = -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
    held = pool // each if each else limit
    sequences = whole = int(min(limit, held))
    if sequences and not max_batched_tokens and length > tokens:
        whole = serving_of(
            workload, gpu, utilization=utilization, max_seqs=limit, max_batched_tokens=length
        ).sequences
    return Serving(
        gpu=gpu.name,
        utilization=utilization,
        budget_bytes=budget,
        weights_bytes=weights,
        activations_bytes=activations,
        cache_bytes=pool,
        bytes_per_sequence=each,
        length=length,
        cached_tokens=int(held * whole_tokens),
        sequences=sequences,
        max_sequences=limit,
        max_batched_tokens=tokens,
        sequences_read_whole=whole,
    )
