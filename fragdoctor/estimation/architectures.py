"""How known architectures build their layers, and their parameters matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.workload import Attention, LayerSizes, Loss, Norm, ParameterGroup, Role


class Dimensions(LayerSizes, frozen=True):
    """The dimensions that determine the parameters of a decoder or encoder.

    Attributes:
        positions: learned position embeddings; 0 = rotary or none.
        embedding: width of the token embedding, with projections to the hidden size and back;
            0 = the hidden size (all but OPT 350M).
        qkv_bias, out_bias, mlp_bias: which linear layers have biases; ``expert_bias``,
            ``router_bias``: whether the experts and their router do.
        packed_qkv: whether one matrix makes query, key and value.
        n_segments: token type embeddings (BERT).
        n_outside_norms: number of norms outside the layers.
        qk_norm: whether queries and keys are normalized, head by head.
        has_wide_qk_norm: whether that norm has a weight for each feature of all heads, not of one.
        pooler: whether a square matrix precedes the classification head.
        head_transform: whether a square matrix precedes the head over the vocabulary.
        shared_gate: whether the expert that all tokens go through has a gate of its own.
        kv_latent, q_latent: width of the latent vectors that keys and values, and queries, are
            computed from (MLA; ``q_latent`` 0 = queries are computed directly).
        rope_dim, nope_dim, value_dim: width per head (MLA) of the rotated and the unrotated part
            of queries and keys, and of values.
        n_dense_layers, dense_ffn: number of first layers of a mixture that have a plain
            feed-forward part, and its width.
    """

    positions: int = 0
    embedding: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    packed_qkv: bool = False
    head_bias: bool = False
    n_segments: int = 0
    n_outside_norms: int = 1
    qk_norm: bool = False
    has_wide_qk_norm: bool = False
    shared_gate: bool = False
    pooler: bool = False
    head_transform: bool = False
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    n_dense_layers: int = 0
    dense_ffn: int = 0


class Architecture(Dimensions, frozen=True):
    """Facts about an architecture's code; the sizes come from a file.

    Attributes:
        dropout: default dropout; ``attention_dropout``: that of the probabilities, None = the same.
        extra_positions: rows of the position table beyond the stated length.
        global_every: one in this many layers attends to all tokens, the others to a window; 0 = as
            the file says, or every layer.
    """

    learned_positions: bool = False
    extra_positions: int = 0
    dropout: float = 0.0
    attention_dropout: float | None = None
    multi_query: bool = False
    is_mixture: bool = False
    global_every: int = 0


LLAMA: Final = Architecture(
    norm=Norm.RMSNORM_WRITTEN_OUT, is_gated=True, activation="silu", softmax_fp32=True
)
GPT2: Final = Architecture(
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    packed_qkv=True,
    learned_positions=True,
    tied_head=True,
    dropout=0.1,
)
BERT: Final = replace(GPT2, packed_qkv=False, pooler=True, is_encoder=True, returns_scores=True)
NEOX: Final = replace(
    GPT2, softmax_fp32=True, learned_positions=False, tied_head=False, dropout=0.0
)
GEMMA: Final = replace(LLAMA, tied_head=True, activation="gelu")
COHERE: Final = replace(LLAMA, tied_head=True, norms_per_layer=1, has_wide_qk_norm=True)
MIXTURE: Final = replace(LLAMA, is_mixture=True)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral"), LLAMA),
        **dict.fromkeys(("mixtral", "deepseek_v2"), MIXTURE),
        "deepseek_v3": replace(MIXTURE, router_bias=True),
        **dict.fromkeys(("qwen2", "seed_oss"), replace(LLAMA, qkv_bias=True)),
        **dict.fromkeys(("granite", "smollm3", "ernie4_5"), replace(LLAMA, tied_head=True)),
        **dict.fromkeys(("qwen3", "exaone4"), replace(LLAMA, qk_norm=True)),
        **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), BERT),
        "qwen2_moe": replace(MIXTURE, qkv_bias=True, shared_gate=True),
        "qwen3_moe": replace(MIXTURE, qk_norm=True),
        "granitemoe": replace(MIXTURE, tied_head=True),
        "gpt_oss": replace(MIXTURE, qkv_bias=True, out_bias=True,
                           expert_bias=True, global_every=2, own_attention=Attention.EAGER,
                           has_flash=False, softmax_fp32=False),
        "phi3": replace(LLAMA, packed_qkv=True),
        "olmo2": replace(LLAMA, qk_norm=True, has_wide_qk_norm=True),
        "cohere": COHERE,
        "cohere2": replace(COHERE, global_every=4),
        "glm4": replace(LLAMA, norms_per_layer=4),
        "glm4_moe": MIXTURE,
        "nemotron": replace(LLAMA, norm=Norm.LAYERNORM, is_gated=False, activation="relu2"),
        "stablelm": replace(LLAMA, norm=Norm.LAYERNORM),
        "gemma": GEMMA,
        "gemma2": replace(GEMMA, norms_per_layer=4, global_every=2, attention_softcap=True,
                          logit_softcap=True, own_attention=Attention.EAGER),
        "gemma3_text": replace(GEMMA, norms_per_layer=4, qk_norm=True, global_every=6),
        "gpt2": replace(GPT2, activation="gelu_new"),
        "gpt_neox": NEOX,
        "gptj": replace(NEOX, qkv_bias=False, out_bias=False, packed_qkv=False, norms_per_layer=1,
                        head_bias=True, activation="gelu_new", own_attention=Attention.EAGER,
                        returns_scores=True, prompt_logits=Loss.FP32),
        "phi": replace(NEOX, packed_qkv=False, norms_per_layer=1, head_bias=True,
                       activation="gelu_new"),
        "opt": replace(GPT2, packed_qkv=False, extra_positions=2, activation="relu",
                       attention_dropout=0.0, softmax_fp32=True, returns_scores=True,
                       prompt_logits=Loss.WORKING),
        "bloom": replace(GPT2, learned_positions=False, n_outside_norms=2, dropout=0.0,
                         own_attention=Attention.EAGER, has_flash=False, softmax_fp32=True,
                         returns_scores=True, prompt_logits=Loss.WORKING),
        "falcon": replace(NEOX, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=True,
                          norms_per_layer=1, multi_query=True, own_attention=Attention.MATH),
        "starcoder2": replace(GPT2, packed_qkv=False, learned_positions=False, dropout=0.0,
                              softmax_fp32=True),
    }
)  # fmt: skip


def outside(name: str, *shape: int, role: Role = Role.OTHER, count: int = 1) -> ParameterGroup:
    """Return parameters outside the repeated layers: an embedding, a head, the last norm."""
    return ParameterGroup(name, shape, count, role, layered=False)


def parameters_of(d: Dimensions) -> list[ParameterGroup]:
    """Return every parameter of a model with these dimensions."""
    groups = [
        *_norms_and_outside(d),
        *_attention(d),
        *(_experts(d) if d.n_experts else _feed_forward(d, "mlp", d.n_layers, d.ffn)),
    ]
    return [g for g in groups if g.n_total > 0]


def _norms_and_outside(d: Dimensions) -> list[ParameterGroup]:
    """Return tables, heads and the square matrices before them, and all norms."""
    h, embedding = d.hidden, Role.EMBEDDING
    width = d.embedding or h
    n_tensors = 2 if d.norm is Norm.LAYERNORM else 1
    return [
        outside("embedding.tokens", d.vocab, width, role=embedding),
        outside("embedding.in", h, width, count=width != h),
        outside("embedding.out", width, h, count=width != h),
        outside("embedding.positions", d.positions, h, role=embedding),
        outside("embedding.segments", d.n_segments, h, role=embedding),
        outside("norm", h, role=Role.NORM, count=d.n_outside_norms * n_tensors),
        outside("pooler.weight", h, h, count=d.pooler),
        outside("pooler.bias", h, count=d.pooler),
        outside("transform.weight", h, h, count=d.head_transform),
        outside("transform.bias", h, count=3 * d.head_transform),
        outside("head.weight", d.vocab, width, role=Role.HEAD, count=not d.tied_head),
        outside("head.bias", d.vocab, count=d.head_bias),
        *(ParameterGroup(f"norm{i}", (h,), d.n_layers * n_tensors, Role.NORM,
                         slot=f"norm{min(i, 2)}")
          for i in range(1, d.norms_per_layer + 1)),
    ]  # fmt: skip


def _linears(
    part: str, count: int, slot: str, shapes: Mapping[str, tuple[int, int]], *, bias: bool
) -> list[ParameterGroup]:
    """Return matrices that each of ``count`` layers has in a slot, and their biases."""
    groups = []
    for name, shape in shapes.items():
        full = f"{part}.{name}"
        groups.append(ParameterGroup(f"{full}.weight", shape, count, Role.LINEAR, slot=slot))
        if bias:
            groups.append(ParameterGroup(f"{full}.bias", shape[:1], count, Role.BIAS, slot=slot))
    return groups


def _attention(d: Dimensions) -> list[ParameterGroup]:
    """Return attention, or multi-head latent attention (https://arxiv.org/abs/2405.04434)."""
    h, q, kv, out = d.hidden, d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim, 0
    norms: dict[str, Sequence[int]] = {}
    if d.kv_latent:
        q, out = d.n_heads * (d.nope_dim + d.rope_dim), d.n_heads * d.value_dim
        into = {
            "kv_a_proj": (d.kv_latent + d.rope_dim, h),
            "kv_b_proj": (d.n_heads * (d.nope_dim + d.value_dim), d.kv_latent),
        }
        if d.q_latent:
            into |= {"q_a_proj": (d.q_latent, h), "q_b_proj": (q, d.q_latent)}
        else:
            into["q_proj"] = (q, h)
        norms["latent_norm"] = (d.kv_latent, d.q_latent)
    elif d.packed_qkv:
        into = {"qkv": (q + 2 * kv, h)}
    else:
        into = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h)}
    if d.qk_norm:
        norms["qk_norm"] = (q, kv) if d.has_wide_qk_norm else (d.head_dim, d.head_dim)
    return [
        *_linears("attention", d.n_layers, "qkv", into, bias=d.qkv_bias),
        *(ParameterGroup(f"attention.{name}", (width,), d.n_layers, Role.NORM, slot="qkv")
          for name, widths in norms.items() for width in widths),
        *_linears("attention", d.n_layers, "out", {"o_proj": (h, out or q)}, bias=d.out_bias),
    ]  # fmt: skip


def _feed_forward(d: Dimensions, part: str, count: int, width: int) -> list[ParameterGroup]:
    names = ("gate_proj", "up_proj") if d.is_gated else ("up_proj",)
    up, down = dict.fromkeys(names, (width, d.hidden)), {"down_proj": (d.hidden, width)}
    return [
        *_linears(part, count, "up", up, bias=d.mlp_bias),
        *_linears(part, count, "down", down, bias=d.mlp_bias),
    ]


def _experts(d: Dimensions) -> list[ParameterGroup]:
    h, n, n_sparse = d.hidden, d.n_experts, d.n_layers - d.n_dense_layers
    n_up, n_down = n_sparse * n * (2 if d.is_gated else 1), n_sparse * n
    rows = (
        ("router.weight", (n, h), n_sparse, Role.LINEAR, "router"),
        ("experts.up.weight", (d.ffn, h), n_up, Role.EXPERT, "up"),
        ("experts.down.weight", (h, d.ffn), n_down, Role.EXPERT, "down"),
        ("router.bias", (n,), n_sparse * (d.expert_bias or d.router_bias), Role.BIAS, "router"),
        ("experts.up.bias", (d.ffn,), n_up * d.expert_bias, Role.BIAS, "up"),
        ("experts.down.bias", (h,), n_down * d.expert_bias, Role.BIAS, "down"),
        ("shared.gate.weight", (1, h), n_sparse * (d.shared_gate and d.shared_ffn > 0),
         Role.LINEAR, "router"),
    )  # fmt: skip
    return [
        *(ParameterGroup(name, shape, count, role, slot=slot)
          for name, shape, count, role, slot in rows),
        *_feed_forward(d, "mlp", d.n_dense_layers, d.dense_ffn),
        *_feed_forward(d, "shared", n_sparse, d.shared_ffn),
    ]  # fmt: skip
