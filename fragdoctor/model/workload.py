"""What will run: the shape of a model, and how it is trained or served."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Role(StrEnum):
    """What a parameter is for; this decides about autocast, LoRA and 8-bit states."""

    LINEAR = "linear"
    EXPERT = "expert"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"


class Attention(StrEnum):
    """How attention is computed, which decides what is kept for the backward pass."""

    SDPA = "sdpa"  # F.scaled_dot_product_attention, which picks a fused kernel if it can
    FLASH = "flash"
    MATH = "math"  # SDPA's fallback
    EAGER = "eager"  # written out: matmul, softmax, dropout, matmul


class Loss(StrEnum):
    """The logits that the loss is computed from."""

    FP32 = "fp32"  # an fp32 copy of all logits: Transformers, torchtitan, autocast
    SHIFTED = "shifted"  # a copy of that copy, without the last token: Transformers 4.46 to 4.48
    WORKING = "16-bit"  # as the head returns them
    KERNEL = "kernel"  # the same, read by one kernel: cross_entropy of flash-attention and Apex
    CHUNKED = "chunked"  # an fp32 copy of an eighth at a time: torchtune
    FUSED = "fused"  # never all in memory at once: Liger, cut cross-entropy
    NONE = "none"  # there are none: a classifier's loss is over a few classes


class FsdpKind(StrEnum):
    """The version of PyTorch's FSDP, which decides what frozen weights cost."""

    SECOND = "2"  # fully_shard
    FIRST = "1"  # FullyShardedDataParallel with separate units for adapters: PEFT's wrapping policy
    MIXED = "1-mixed"  # the same with adapters and frozen weights in one unit: Lightning


class Norm(StrEnum):
    """How a normalization layer is computed."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"  # torch.nn.RMSNorm, one fused operation
    RMSNORM_WRITTEN_OUT = "rmsnorm-written-out"  # as in Hugging Face models


class ParameterGroup(Struct, frozen=True):
    """Parameters of one shape and role; there are ``count`` of them in all layers together.

    Attributes:
        name: name of the parameters, ``self_attn.q_proj.weight``.
        layered: whether they belong to the repeated layers (and not to embedding, head, ...).
        slot: their place in a layer: ``norm1``, ``qkv``, ``out``, ``norm2``, ``up``, ``down``,
            ``router``; "" means not known, or outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    role: Role
    layered: bool = True
    slot: str = ""

    @property
    def n_each(self) -> int:
        """Number of elements in one of these tensors."""
        return prod(self.shape)

    @property
    def n_total(self) -> int:
        """Number of elements in all of these tensors."""
        return self.n_each * self.count


class LayerBuild(Struct, frozen=True, kw_only=True):
    """How the code of a model builds its layers.

    Attributes:
        is_gated: whether the feed-forward has a gate (SwiGLU): three matrices instead of two.
        activation: ``gelu``, ``gelu_new``, ``silu``, ``relu``, ...
        tied_head: whether the head is the token embedding.
        own_attention: how the code computes attention if the choice is left to it; None means
            with the kernel that ``scaled_dot_product_attention`` picks.
        has_flash: whether a fused kernel that is requested by name works for the model.
        attention_softcap: whether attention scores go through a tanh (Gemma 2).
        logit_softcap: whether the logits go through a tanh.
        softmax_fp32: whether eager attention uses an fp32 softmax, as Hugging Face's does.
        returns_scores: whether a layer returns the probabilities of eager attention, so that they
            live until the next layer has made its own.
        prompt_logits: how generation makes the logits of the whole prompt; None means it makes
            those of the last token alone.
        is_encoder: whether there is neither a KV cache nor a next token.
    """

    norm: Norm = Norm.LAYERNORM
    is_gated: bool = False
    norms_per_layer: int = 2
    activation: str = "gelu"
    tied_head: bool = False
    own_attention: Attention | None = None
    has_flash: bool = True
    attention_softcap: bool = False
    logit_softcap: bool = False
    softmax_fp32: bool = False
    returns_scores: bool = False
    prompt_logits: Loss | None = None
    is_encoder: bool = False


class LayerSizes(LayerBuild, frozen=True, kw_only=True):
    """How large the layers of a model are, and how many.

    Attributes:
        ffn: width of the feed-forward layer (of one expert in a mixture).
        n_experts: number of experts; 0 means dense.
        shared_ffn: width of the layer that all tokens go through in addition to their experts.
    """

    n_layers: int = 0
    hidden: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    n_experts: int = 0
    shared_ffn: int = 0


def shared(of: Struct, kind: type[Struct]) -> dict[str, Any]:
    """Return the fields of a kind with an object's values for them."""
    return {name: getattr(of, name) for name in kind.__struct_fields__}


class ModelShape(LayerSizes, frozen=True):
    """The shape of a transformer.

    Attributes:
        name: name for people, such as ``llama`` or a file's name.
        source: where the shape comes from, one phrase.
        parameters: all parameters; their sum is the parameter count.
        hidden_dropout: dropout after the sub-layers; 0 means none.
        attention_dropout: dropout of the attention probabilities.
        upcasts_logits: whether the model's code computes the loss from fp32 logits by default.
        has_lm_head: whether the model ends in logits over the vocabulary; ``may_have_head``:
            whether it may do so although nothing says it.
        is_guess: whether the shape was derived from a parameter count.
        kv_elements: elements that a token leaves in one layer's cache; 0 means keys and values of
            all key-value heads. Latent attention (MLA) keeps one short vector.
        sliding_window: how many tokens the ``n_sliding_layers`` look back to and keep.
        assumptions: what was derived or assumed, one sentence each.
    """

    name: str
    source: str
    parameters: Sequence[ParameterGroup]
    max_positions: int = 0
    experts_per_token: int = 0
    upcasts_logits: bool = True
    is_guess: bool = False
    has_lm_head: bool = True
    may_have_head: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    kv_elements: int = 0
    sliding_window: int = 0
    n_sliding_layers: int = 0
    assumptions: Sequence[str] = ()

    @property
    def n_parameters(self) -> int:
        """The parameter count."""
        return sum(group.n_total for group in self.parameters)

    def with_head(self) -> ModelShape:
        """Return the shape with logits over the vocabulary, computed with the token embedding."""
        return replace(
            self, has_lm_head=True, may_have_head=False, upcasts_logits=False,
            prompt_logits=Loss.WORKING,
        )  # fmt: skip

    @property
    def kv_per_token(self) -> int:
        """Elements that one token leaves in the cache of one attention layer."""
        return self.kv_elements or 2 * self.n_kv_heads * self.head_dim


class Workload(Struct, frozen=True):
    """A model shape and everything chosen about the run.

    Attributes:
        dtype: ``fp32``, ``bf16``, ``fp16``, ``amp-bf16``, ``amp-fp16``, ...
        optimizer: key of ``estimation.training_choices.OPTIMIZERS``.
        master_weights: whether 16-bit weights have fp32 copies, with fp32 optimizer states.
        grad_dtype: dtype of gradients; "" means the parameters' dtype.
        batch: sequences in one forward pass on one GPU (micro batch).
        seq: tokens per sequence.
        checkpointing: ``none``, ``sqrt``, ``full``, or the number of layers in a segment.
        lora_rank: rank of LoRA; 0 means all parameters are trained.
        lora_targets: ``attention``, ``all-linear`` or names of matrices.
        zero_stage: stage of ZeRO; 0 means plain data parallel (or one GPU).
        is_fsdp: whether stage 3 is PyTorch's FSDP instead of DeepSpeed's ZeRO.
        fsdp_kind: kind of FSDP; None means not known.
        stage: stage of a pipeline, ``first``, ``middle`` or ``last``; "" means not chosen.
        world_size: number of GPUs that share the states.
        grad_accumulation: micro batches per step.
        inference: whether there are only weights and a KV cache.
        new_tokens: tokens generated beyond ``seq`` (inference).
        cache: ``dynamic`` grows with the tokens, ``paged`` grows in blocks, ``static`` is allocated
            for all tokens at once, ``tuple`` exists twice in a step in which it grows (inference).
        tensor_parallel, context_parallel, pipeline_parallel, expert_parallel: number of GPUs that
            share the matrices, the sequence, the layers, the experts; on top of ``world_size``.
        sequence_parallel: whether tensor parallelism splits the residual stream too.
        offload: what is kept in the host's memory: ``optimizer``, ``parameters``, ``activations``.
        stream_shards: number of GPUs that share the residual stream of this GPU's part.
        dora: whether LoRA has a magnitude for each output (DoRA).
        loss: which logits the loss is computed from; None means as the model's own code does.
        keeps_logits: whether a variable of the training loop holds the logits through the backward
            pass; in inference, whether a prefill makes the logits of more than the last token.
        varying_lengths: whether batches differ in length; ``seq`` is the longest.
        expandable_segments: whether the allocator is set to grow its segments page by page.
    """

    shape: ModelShape
    dtype: str = "fp32"
    optimizer: str = "adamw"
    master_weights: bool = False
    grad_dtype: str = ""
    batch: int = 1
    seq: int = 0
    attention: Attention = Attention.SDPA
    checkpointing: str = "none"
    lora_rank: int = 0
    lora_targets: Sequence[str] = ("attention",)
    zero_stage: int = 0
    is_fsdp: bool = False
    fsdp_kind: FsdpKind | None = None
    stage: str = ""
    world_size: int = 1
    grad_accumulation: int = 1
    inference: bool = False
    kv_dtype: str = ""
    new_tokens: int = 0
    cache: str = "dynamic"
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    offload: Sequence[str] = ()
    stream_shards: int = 1
    dora: bool = False
    loss: Loss | None = None
    keeps_logits: bool = False
    varying_lengths: bool = False
    expandable_segments: bool = False
    compute: str = ""

    @property
    def degrees(self) -> dict[str, int]:
        """The kinds of parallelism that split the model, and into how many parts each does."""
        kinds = {
            "tensor": self.tensor_parallel, "pipeline": self.pipeline_parallel,
            "context": self.context_parallel, "expert": self.expert_parallel,
        }  # fmt: skip
        return {kind: degree for kind, degree in kinds.items() if degree > 1}

    @property
    def attention_in_code(self) -> Attention:
        """The attention that the code uses: the model's own if the choice is left to it."""
        is_open = self.attention is Attention.SDPA
        return (is_open and self.shape.own_attention) or self.attention
