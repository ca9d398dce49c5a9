"""The KV cache.

What a token leaves in the cache: with grouped queries the keys and values of the key-value heads
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245); with latent attention one short vector and
the rotated part of the key (DeepSeek-V2, https://arxiv.org/abs/2405.04434). Layers with a sliding
window keep the window only (Mistral 7B, https://arxiv.org/abs/2310.06825).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.estimation.training_choices import dtype_bytes, precision_of
from fragdoctor.model.workload import Workload

# vLLM's default block: https://docs.vllm.ai/en/stable/api/vllm/config/cache/
BLOCK_TOKENS = 16


class CachePart(Struct, frozen=True):
    """The cache of layers that keep the same.

    Attributes:
        n_layers: how many layers.
        tokens: of one sequence that each keeps.
        elements: that one token leaves in one layer.
    """

    n_layers: int
    tokens: int
    elements: int


def cache_parts(workload: Workload) -> list[CachePart]:
    """Return what one sequence keeps between two of its tokens, by kind of layer."""
    shape = workload.shape
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
    """Return the cache of one sequence at its full length."""
    each = kv_element_bytes(workload)
    return int(sum(p.n_layers * p.tokens * p.elements * each for p in cache_parts(workload)))


def cache_bytes_of_prompt(workload: Workload) -> int:
    """Return what a sequence holds while its prompt is read: all, where it is allocated at once."""
    grows = workload.cache in ("dynamic", "tuple")
    return cache_bytes_per_sequence(replace(workload, new_tokens=0) if grows else workload)


def cache_copies(workload: Workload) -> float:
    """Return how often the cache is there in a step that adds a token to it.

    A growing cache is concatenated anew: ``DynamicCache`` of Transformers lets go of the old one
    layer by layer; tuples, as before its version 4.36, live until the step has made all new ones.
    """
    each_layer = 1 / max(1, workload.shape.n_layers)
    return 1 + {"dynamic": each_layer, "tuple": 1.0}.get(workload.cache, 0.0)


def kv_element_bytes(workload: Workload) -> float:
    """Return the bytes of one element of the KV cache."""
    if workload.kv_dtype:
        return dtype_bytes(workload.kv_dtype)
    return precision_of(workload.dtype).compute
