"""What is to be run: the shape of a model, and how it is trained or served."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import prod
from typing import Any

from msgspec import Struct


class Role(StrEnum):
    """What a parameter is for: it decides autocast, LoRA, and 8-bit states."""

    LINEAR = "linear"
    EXPERT = "expert"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"


class Attention(StrEnum):
    """How attention is computed: what of it is kept for the backward pass."""

    SDPA = "sdpa"  # F.scaled_dot_product_attention, which picks a fused kernel where it can
    FLASH = "flash"
    MATH = "math"  # SDPA's fallback
    EAGER = "eager"  # written out: matmul, softmax, dropout, matmul


class Loss(StrEnum):
    """The logits that the loss is computed from."""

    FP32 = "fp32"  # of an fp32 copy of all of them: Transformers, torchtitan, autocast
    SHIFTED = "shifted"  # of a copy of that copy, without the last token: Transformers before 4.50
    WORKING = "16-bit"  # as the head gives them
    CHUNKED = "chunked"  # an fp32 copy of an eighth at a time: torchtune
    FUSED = "fused"  # never there as a whole: Liger, cut cross-entropy


class FsdpKind(StrEnum):
    """Which of PyTorch's fully sharded data parallels it is: what frozen weights cost there."""

    SECOND = "2"  # fully_shard
    FIRST = "1"  # FullyShardedDataParallel, adapters in units of their own: PEFT's wrapping policy
    MIXED = "1-mixed"  # the same, one unit for adapters and frozen weights: Lightning's


class Norm(StrEnum):
    """How a normalisation layer is computed."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"  # torch.nn.RMSNorm, one fused operation
    RMSNORM_WRITTEN_OUT = "rmsnorm-written-out"  # as in Hugging Face models


class ParameterGroup(Struct, frozen=True):
    """Parameters of one shape and role; ``count`` of them over all layers.

    Attributes:
        name: what they are called, ``self_attn.q_proj.weight``.
        layered: whether they belong to the repeated layers (and not to embedding, head, ...).
        slot: where in a layer it works: ``norm1``, ``qkv``, ``out``, ``norm2``, ``up``, ``down``,
            ``router``; "" = not known, or outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    role: Role
    layered: bool = True
    slot: str = ""

    @property
    def n_each(self) -> int:
        """Elements of one of these tensors."""
        return prod(self.shape)

    @property
    def n_total(self) -> int:
        """Elements of all of them."""
        return self.n_each * self.count


class LayerBuild(Struct, frozen=True, kw_only=True):
    """How the code of a model builds its layers.

    Attributes:
        is_gated: the feed-forward has a gate (SwiGLU): three matrices, not two.
        activation: ``gelu``, ``gelu_new``, ``silu``, ``relu``, ...
        tied_head: the head is the token embedding.
        own_attention: what the code computes attention by where the kernel is left to it; None =
            by ``scaled_dot_product_attention`` as it picks.
        has_flash: a fused kernel that is asked for by name serves it.
        attention_softcap: scores go through a tanh (Gemma 2).
        logit_softcap: so do the logits.
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


class LayerSizes(LayerBuild, frozen=True, kw_only=True):
    """How large the layers of a model are, and how many.

    Attributes:
        ffn: width of the feed-forward layer (of one expert in a mixture).
        n_experts: 0 = dense.
        shared_ffn: width of what all tokens go through beside their experts.
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


def shared(of: LayerBuild, kind: type[LayerBuild]) -> dict[str, Any]:
    """Return the fields of a kind with the values that an object has of them."""
    return {name: getattr(of, name) for name in kind.__struct_fields__}


class ModelShape(LayerSizes, frozen=True):
    """The shape of a transformer, or of as much as is known of another model.

    Attributes:
        name: for people, such as ``llama`` or a file's name.
        source: where the shape comes from, one phrase.
        parameters: all parameters; their sum is the parameter count.
        hidden_dropout: dropout after the sub-layers; 0 = none.
        attention_dropout: dropout of the attention probabilities.
        has_layers: False where only the parameter count is known: activations are unknown.
        softmax_fp32: attention that is written out asks for an fp32 softmax, as Hugging Face's.
        upcasts_logits: the model's code takes the loss of fp32 logits where it is not said
            otherwise.
        has_lm_head: the model ends in logits over the vocabulary.
        is_guess: the shape was derived from a parameter count.
        kv_elements: what a token leaves in one layer's cache; 0 = keys and values of all
            key-value heads. Latent attention (MLA) keeps one short vector.
        sliding_window: tokens that the ``n_sliding_layers`` look back to, and keep.
        assumptions: what was derived or assumed, one sentence each.
    """

    name: str
    source: str
    parameters: Sequence[ParameterGroup]
    max_positions: int = 0
    experts_per_token: int = 0
    softmax_fp32: bool = False
    upcasts_logits: bool = True
    is_guess: bool = False
    has_lm_head: bool = True
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

    @property
    def kv_per_token(self) -> int:
        """Elements that one token leaves in the cache of one layer that attends."""
        return self.kv_elements or 2 * self.n_kv_heads * self.head_dim

    @property
    def has_layers(self) -> bool:
        """Whether the shape of the layers is known, so that activations can be derived."""
        return self.n_layers > 0 and self.hidden > 0


class Workload(Struct, frozen=True):
    """A model shape and everything chosen about the run.

    Attributes:
        dtype: ``fp32``, ``bf16``, ``fp16``, ``amp-bf16``, ``amp-fp16``, ...
        optimizer: key of ``estimation.training_choices.OPTIMIZERS``.
        master_weights: fp32 copies of 16-bit weights, with fp32 optimizer states.
        grad_dtype: dtype of gradients; "" = that of the parameters.
        batch: sequences in one forward pass on one GPU (micro batch).
        seq: tokens a sequence.
        checkpointing: ``none``, ``sqrt``, ``full``, or the number of layers in a segment.
        lora_rank: 0 = all parameters are trained.
        lora_targets: ``attention``, ``all-linear`` or names of matrices.
        zero_stage: 0 = plain data parallel (or one GPU).
        is_fsdp: stage 3 is PyTorch's FSDP, not DeepSpeed's ZeRO.
        fsdp_kind: which one; None = not known.
        stage: of a pipeline, ``first``, ``middle`` or ``last``; "" = not chosen.
        world_size: GPUs that share the states.
        grad_accumulation: micro batches a step.
        inference: weights and KV cache only.
        new_tokens: tokens generated beyond ``seq`` (inference).
        cache: ``dynamic`` grows with the tokens, ``paged`` in blocks, ``static`` is allocated for
            all of them at once, ``tuple`` is there twice in a step that it grows in (inference).
        tensor_parallel, context_parallel, pipeline_parallel, expert_parallel: GPUs that share the
            layers' matrices, the sequence, the layers, the experts; beside ``world_size``.
        sequence_parallel: tensor parallelism splits the residual stream too.
        offload: what is kept in the host's memory: ``optimizer``, ``parameters``, ``activations``.
        stream_shards: GPUs among which the residual stream of this one's part is split.
        dora: LoRA with a magnitude for each output (DoRA).
        loss: which logits it is computed from; None = as the model's own code does.
        keeps_logits: the training loop holds the logits in a variable through the backward pass; a
            prefill makes those of the whole prompt, and not of its last token alone.
        varying_lengths: batches differ in length, ``seq`` being the longest.
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
    compute: str = ""

    @property
    def attention_in_code(self) -> Attention:
        """What the code asks for: its own where the choice is left to it."""
        is_open = self.attention is Attention.SDPA
        return (is_open and self.shape.own_attention) or self.attention
