"""Plays inference: weights, KV cache, and the widest operation of a prefill.

What a token leaves in the cache: with grouped queries the keys and values of the key-value heads
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245); with latent attention one short vector and
the rotated part of the key (DeepSeek-V2, https://arxiv.org/abs/2405.04434). Layers with a sliding
window keep the window only (Mistral 7B, https://arxiv.org/abs/2310.06825).
"""

from __future__ import annotations

from fragdoctor.estimation.layer_operations import layer_ops
from fragdoctor.estimation.operation_memory import FP32, term_bytes, units
from fragdoctor.estimation.states import states_of
from fragdoctor.estimation.tape import Tape
from fragdoctor.estimation.training_choices import dtype_bytes, precision_of
from fragdoctor.frozen import frozen
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import Role, Workload

# vLLM's default block: https://docs.vllm.ai/en/stable/api/vllm/config/cache/
BLOCK_TOKENS = 16


@frozen
class CachePart:
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
    if workload.cache == "static":
        tokens = max(tokens, shape.max_positions)
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


def kv_element_bytes(workload: Workload) -> float:
    """Return the bytes of one element of the KV cache."""
    if workload.kv_dtype:
        return dtype_bytes(workload.kv_dtype)
    return precision_of(workload.dtype).compute


def play_inference(workload: Workload, workspace_bytes: int, buffer_bytes: float = 0) -> Tape:
    """Return the allocations of a prefill of ``seq`` tokens with room for ``new_tokens`` more."""
    tape, precision, shape = Tape(), precision_of(workload.dtype), workload.shape
    tape.phase(PhaseName.INFERENCE)
    tape.moment("prefill")
    states = states_of(workload)
    for group in states.groups:
        tape.alloc("parameters", group.stored_bytes, group.count)
    tape.alloc("workspaces", workspace_bytes)
    tape.alloc("communication", buffer_bytes)
    for part in cache_parts(workload):
        halves = 1 if shape.kv_elements else 2  # keys and values are two tensors
        row = part.elements * kv_element_bytes(workload) / halves
        tape.alloc("kv_cache", workload.batch * part.tokens * row, halves * part.n_layers)
    if not shape.has_layers or workload.seq <= 0:
        return tape
    tape.alloc("inputs", workload.batch * workload.seq * 8)
    if precision.is_autocast:
        copied = (Role.LINEAR, Role.HEAD)
        for group in states.groups:
            if group.role in copied:
                tape.alloc("weight_copies", group.n_each * precision.copies, group.count)
    sizes = units(workload)
    stream = tape.alloc("activations", sizes["B*S*H"] * precision.residual)
    # One layer is like the next: each operation's result lives until the next one has read it.
    passing: list[int] = []
    for op in layer_ops(workload, precision):
        scratch = [tape.alloc("temporaries", term_bytes(t, sizes)) for t in op.scratch]
        after = [tape.alloc("activations", term_bytes(t, sizes)) for t in op.passing]
        tape.free(*scratch, *passing)
        passing = after
    tape.free(*passing, stream)
    if workload.keeps_logits:
        # Transformers before 4.45 (its pull request 31292) made logits of the whole prompt, and an
        # fp32 copy of them by logits.float() while the first ones were alive.
        tape.moment("logits of the whole prompt")
        tape.alloc("logits", sizes["B*S*V"] * precision.compute)
        if precision.compute != FP32:
            tape.alloc("logits", sizes["B*S*V"] * FP32)
        return tape
    tape.moment("logits of the last token")
    tape.alloc("logits", workload.batch * shape.vocab * FP32)
    return tape
