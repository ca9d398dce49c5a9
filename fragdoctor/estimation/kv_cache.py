"""The KV cache.

With grouped queries, a token adds the keys and values of the key-value heads (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245); with latent attention, one short vector and the rotated part of
the key (DeepSeek-V2, https://arxiv.org/abs/2405.04434). Layers with a sliding window keep only the
window (Mistral 7B, https://arxiv.org/abs/2310.06825).
"""

from __future__ import annotations

from msgspec.structs import replace

from fragdoctor.estimation.training_choices import dtype_bytes, precision_of
from fragdoctor.model.workload import Workload

# vLLM's default block size: https://docs.vllm.ai/en/stable/api/vllm/config/cache/
BLOCK_TOKENS = 16


def cached_tokens(workload: Workload) -> int:
    """Return how many tokens of one sequence all layers hold between two tokens, summed up."""
    shape, tokens = workload.shape, workload.seq + workload.new_tokens
    if shape.is_encoder:
        return 0
    if workload.cache == "paged":
        tokens = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    n_sliding = shape.n_sliding_layers if shape.sliding_window else 0
    return (shape.n_layers - n_sliding) * tokens + n_sliding * min(tokens, shape.sliding_window)


def cache_bytes_per_sequence(workload: Workload) -> int:
    """Return the cache size of one sequence at its full length."""
    kept = workload.kv_dtype
    each = dtype_bytes(kept) if kept else precision_of(workload.dtype).compute
    return int(cached_tokens(workload) * workload.shape.kv_per_token * each)


def cache_bytes_of_prompt(workload: Workload) -> int:
    """Return the cache of one sequence during prefill: the full cache if it does not grow.

    One that grows holds the whole prompt in every layer until the next token: what a layer with a
    window keeps of it is a view (``DynamicSlidingWindowLayer`` in ``transformers.cache_utils``).
    """
    if workload.cache not in ("dynamic", "tuple"):
        return cache_bytes_per_sequence(workload)
    whole = replace(workload.shape, sliding_window=0)
    return cache_bytes_per_sequence(replace(workload, shape=whole, new_tokens=0))


def cache_copies(workload: Workload) -> float:
    """Return how many copies of the cache exist in a step that adds a token to it.

    A growing cache is concatenated again: ``DynamicCache`` of Transformers frees the old one layer
    by layer; the tuples used before version 4.36 live until the step has made all the new ones.
    """
    each_layer = 1 / max(1, workload.shape.n_layers)
    return 1 + {"dynamic": each_layer, "tuple": 1.0}.get(workload.cache, 0.0)
