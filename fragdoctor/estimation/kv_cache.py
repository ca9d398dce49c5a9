"""The KV cache.

With grouped queries, a token adds the keys and values of the key-value heads (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245); with latent attention, one short vector and the rotated part of
the key (DeepSeek-V2, https://arxiv.org/abs/2405.04434). Layers with a sliding window keep only the
window (Mistral 7B, https://arxiv.org/abs/2310.06825).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.estimation.training_choices import dtype_bytes, precision_of
from fragdoctor.model.workload import Workload

# vLLM's default block size: https://docs.vllm.ai/en/stable/api/vllm/config/cache/
BLOCK_TOKENS = 16


class CachePart(Struct, frozen=True):
    """The cache of layers that all keep the same amount.

    Attributes:
        n_layers: how many layers.
        tokens: how many tokens of one sequence each layer keeps.
        elements: how many elements one token adds in one layer.
    """

    n_layers: int
    tokens: int
    elements: int


def cache_parts(workload: Workload) -> list[CachePart]:
    """Return what the cache holds for one sequence between two tokens, by kind of layer."""
    shape = workload.shape
    if shape.is_encoder:
        return []
    tokens = workload.seq + workload.new_tokens
    if workload.cache == "paged":
        tokens = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    n_sliding = shape.n_sliding_layers if shape.sliding_window else 0
    windowed = min(tokens, shape.sliding_window)
    parts = [
        CachePart(shape.n_layers - n_sliding, tokens, shape.kv_per_token),
        CachePart(n_sliding, windowed, shape.kv_per_token),
    ]
    return [part for part in parts if part.n_layers and part.elements and part.tokens]


def cache_bytes_per_sequence(workload: Workload) -> int:
    """Return the cache size of one sequence at its full length."""
    each = kv_element_bytes(workload)
    return int(sum(p.n_layers * p.tokens * p.elements * each for p in cache_parts(workload)))


def cache_bytes_of_prompt(workload: Workload) -> int:
    """Return the cache of one sequence during prefill: the full cache if it does not grow."""
    grows = workload.cache in ("dynamic", "tuple")
    return cache_bytes_per_sequence(replace(workload, new_tokens=0) if grows else workload)


def cache_copies(workload: Workload) -> float:
    """Return how many copies of the cache exist in a step that adds a token to it.

    A growing cache is concatenated again: ``DynamicCache`` of Transformers frees the old one layer
    by layer; the tuples used before version 4.36 live until the step has made all the new ones.
    """
    each_layer = 1 / max(1, workload.shape.n_layers)
    return 1 + {"dynamic": each_layer, "tuple": 1.0}.get(workload.cache, 0.0)


def kv_element_bytes(workload: Workload) -> float:
    """Return the size of one KV-cache element in bytes."""
    if workload.kv_dtype:
        return dtype_bytes(workload.kv_dtype)
    return precision_of(workload.dtype).compute
