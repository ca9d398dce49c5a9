"""How known architectures build their layers, and their parameters matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.frozen import frozen
from fragdoctor.model.workload import LayerSizes, Norm, ParameterGroup, Role


@frozen
class Dimensions(LayerSizes):
    """What decides the parameters of a decoder or encoder.

    Attributes:
        positions: learned position embeddings; 0 = rotary or none.
        qkv_bias, out_bias, mlp_bias: which linear layers have biases.
        packed_qkv: one matrix for query, key and value.
        embedding_width: width of the token embedding where it differs from the hidden size.
        n_segments: token type embeddings (BERT).
        n_outside_norms: normalisations outside the layers.
        has_plain_norms: norms have neither weight nor bias.
        wide_qk_norm: queries and keys are normalised over all heads at once.
        router_bias: one figure an expert that only balances the load.
        biased_experts: experts and router have biases.
        sinks: one learned score a head that attention may go to.
        kv_latent, q_latent: width of the vectors that keys and values, and queries, are made of
            (MLA; ``q_latent`` 0 = queries are made directly).
        rope_dim, nope_dim, value_dim: per head (MLA): rotated and other part of queries and keys,
            and values.
    """

    positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    packed_qkv: bool = False
    head_bias: bool = False
    embedding_width: int = 0
    n_segments: int = 0
    n_outside_norms: int = 1
    has_plain_norms: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    shared_gate: bool = False
    pooler: bool = False
    head_transform: bool = False
    router_bias: bool = False
    biased_experts: bool = False
    sinks: bool = False
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0


@frozen
class Architecture(Dimensions):
    """Facts about an architecture's code; a file has the sizes.

    Attributes:
        ffn_factor: width of the feed-forward layer in hidden sizes where the file does not say;
            0 = the file must say.
        extra_positions: rows that the position table has beyond the stated length.
        dropout: default dropout.
        has_no_head: the base model ends before a head.
        latent_attention: keys and values are made of one short vector a token (MLA).
        has_classifier_head: a square matrix comes before the one to the classes.
        global_every: of so many layers one attends to all tokens, the others to a window; 0 = as
            the file says, or all of them.
    """

    ffn_factor: int = 0
    learned_positions: bool = False
    extra_positions: int = 0
    dropout: float = 0.0
    multi_query: bool = False
    has_segments: bool = False
    is_mixture: bool = False
    has_classifier_head: bool = False
    has_no_head: bool = False
    latent_attention: bool = False
    global_every: int = 0


LLAMA: Final = Architecture(
    norm=Norm.RMSNORM_WRITTEN_OUT, is_gated=True, has_rotary=True, activation="silu"
)
GPT2: Final = Architecture(
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    packed_qkv=True,
    ffn_factor=4,
    learned_positions=True,
    tied_head=True,
    dropout=0.1,
)
BERT: Final = replace(
    GPT2,
    packed_qkv=False,
    has_segments=True,
    pooler=True,
    has_no_head=True,
)
NEOX: Final = replace(
    GPT2,
    learned_positions=False,
    has_rotary=True,
    tied_head=False,
    dropout=0.0,
    parallel_residual=True,
)

COHERE: Final = replace(
    LLAMA, norm=Norm.RMSNORM_WIDE, tied_head=True, norms_per_layer=1, parallel_residual=True
)
GEMMA: Final = replace(LLAMA, norm=Norm.RMSNORM_WIDE, tied_head=True, activation="gelu")
GPTJ: Final = replace(
    NEOX,
    qkv_bias=False,
    out_bias=False,
    packed_qkv=False,
    norms_per_layer=1,
    head_bias=True,
    activation="gelu_new",
    writes_attention=True,
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": LLAMA,
        "ministral": LLAMA,
        "yi": LLAMA,
        "smollm3": replace(LLAMA, tied_head=True),
        "qwen2": replace(LLAMA, qkv_bias=True),
        "qwen3": replace(LLAMA, qk_norm=True),
        "gemma": GEMMA,
        "gemma2": replace(GEMMA, norms_per_layer=4,
                          global_every=2, writes_attention=True, attention_softcap=True,
                          logit_softcap=True),
        "gemma3_text": replace(GEMMA, norms_per_layer=4,
                               qk_norm=True, global_every=6),
        "granite": replace(LLAMA, tied_head=True),
        "granitemoe": replace(LLAMA, tied_head=True, is_mixture=True),
        "olmo": replace(LLAMA, norm=Norm.LAYERNORM, has_plain_norms=True),
        "olmo2": replace(LLAMA, norm=Norm.RMSNORM_WIDE, qk_norm=True, wide_qk_norm=True),
        "olmoe": replace(LLAMA, qk_norm=True, wide_qk_norm=True, is_mixture=True),
        "stablelm": replace(LLAMA, norm=Norm.LAYERNORM),
        "cohere": COHERE,
        "cohere2": replace(COHERE, global_every=4),
        "glm4": replace(LLAMA, norms_per_layer=4),
        "glm4_moe": replace(LLAMA, is_mixture=True, latent_attention=True),
        "seed_oss": replace(LLAMA, qkv_bias=True),
        "ernie4_5": replace(LLAMA, tied_head=True),
        "exaone4": replace(LLAMA, norm=Norm.RMSNORM_WRITTEN_OUT, qk_norm=True),
        "deepseek_v2": replace(LLAMA, is_mixture=True, latent_attention=True),
        "deepseek_v3": replace(LLAMA, is_mixture=True, latent_attention=True),
        "gpt_oss": replace(LLAMA, norm=Norm.RMSNORM_WIDE, is_mixture=True, qkv_bias=True,
                           out_bias=True,
                           biased_experts=True, sinks=True, global_every=2,
                           writes_attention=True, clamps_gate=True),
        "phi3": replace(LLAMA, packed_qkv=True),
        "mixtral": replace(LLAMA, is_mixture=True),
        "qwen2_moe": replace(LLAMA, qkv_bias=True, is_mixture=True),
        "qwen3_moe": replace(LLAMA, qk_norm=True, is_mixture=True),
        "gpt2": GPT2,
        "gpt_neox": NEOX,
        "gptj": GPTJ,
        "codegen": replace(GPTJ, packed_qkv=True),
        "mpt": replace(GPT2, qkv_bias=False, out_bias=False, mlp_bias=False, dropout=0.0,
                       learned_positions=False, writes_attention=True),
        "gpt_neo": replace(GPT2, qkv_bias=False, packed_qkv=False, activation="gelu_new",
                           dropout=0.0, writes_attention=True),
        "gpt_bigcode": replace(GPT2, multi_query=True,
                               activation="gelu_pytorch_tanh"),
        "nemotron": replace(LLAMA, norm=Norm.LAYERNORM, is_gated=False, activation="relu2"),
        "persimmon": replace(NEOX, parallel_residual=False, activation="relu2", qk_norm=True),
        "phi": replace(NEOX, packed_qkv=False, norms_per_layer=1, head_bias=True,
                       activation="gelu_new"),
        "opt": replace(GPT2, packed_qkv=False, extra_positions=2, ffn_factor=0, activation="relu"),
        "bloom": replace(GPT2, learned_positions=False, n_outside_norms=2, dropout=0.0,
                         writes_attention=True),
        "falcon": replace(
            NEOX, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=True, norms_per_layer=1,
            multi_query=True, shares_heads=True,
        ),
        "starcoder2": replace(GPT2, packed_qkv=False, learned_positions=False, has_rotary=True,
                              dropout=0.0, ffn_factor=0),
        "bert": BERT,
        "camembert": BERT,
        "distilbert": replace(BERT, has_segments=False, pooler=False, has_classifier_head=True),
        "roberta": BERT,
        "xlm-roberta": BERT,
        "nomic_bert": BERT,
    }
)  # fmt: skip


UNMEASURED: Final = ("nomic_bert",)
"""Of them those whose steps were never compared with what the formulas say."""
EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def generic(config: Mapping[str, Any]) -> Architecture:
    """Return how to take an unknown architecture: by its activation, Llama-like or GPT-like."""
    gated = config.get("hidden_act") in ("silu", "swish") or "rms_norm_eps" in config
    mixture = any(isinstance(config.get(k), int) and config[k] > 0 for k in EXPERT_KEYS)
    if gated or mixture:
        return replace(LLAMA, is_mixture=mixture)
    return replace(GPT2, packed_qkv=False, tied_head=False)


def outside(name: str, *shape: int, role: Role = Role.OTHER, count: int = 1) -> ParameterGroup:
    """Return parameters that belong to no repeated layer: of an embedding, a head, a last norm."""
    return ParameterGroup(name, shape, count, role, layered=False)


def parameters_of(d: Dimensions) -> list[ParameterGroup]:
    """Return every parameter of a model with these dimensions."""
    groups = [
        *_embeddings(d),
        *_norms(d),
        *(_latent_attention(d) if d.kv_latent else _attention(d)),
        *(_experts(d) if d.n_experts else _feed_forward(d)),
        *_outside(d),
    ]
    return [g for g in groups if g.n_total > 0]


def _embeddings(d: Dimensions) -> list[ParameterGroup]:
    width = d.embedding_width or d.hidden
    groups = [outside("embedding.tokens", d.vocab, width, role=Role.EMBEDDING)]
    for name, rows in (("positions", d.positions), ("segments", d.n_segments)):
        if rows:
            groups.append(outside(f"embedding.{name}", rows, d.hidden, role=Role.EMBEDDING))
    if width != d.hidden:
        groups += [outside(name, d.hidden, width) for name in ("project_in", "project_out")]
    return groups


def _norms(d: Dimensions) -> list[ParameterGroup]:
    with_bias = 0 if d.has_plain_norms else 2 if d.norm is Norm.LAYERNORM else 1
    groups = [
        ParameterGroup(f"norm{i + 1}", (d.hidden,), d.n_layers * with_bias, Role.NORM,
                       slot="norm1" if i == 0 else "norm2")
        for i in range(d.norms_per_layer)
    ]  # fmt: skip
    if d.qk_norm:
        widths = (d.head_dim, d.head_dim)
        if d.wide_qk_norm:
            widths = (d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim)
        groups += [
            ParameterGroup("attention.qk_norm", (width,), d.n_layers, Role.NORM, slot="qkv")
            for width in widths
        ]
    groups.append(outside("norm", d.hidden, role=Role.NORM, count=d.n_outside_norms * with_bias))
    return groups


def linear(
    name: str, shape: tuple[int, int], count: int, slot: str, *, bias: bool
) -> list[ParameterGroup]:
    """Return a matrix of each of ``count`` layers, and its bias."""
    groups = [ParameterGroup(f"{name}.weight", shape, count, Role.LINEAR, slot=slot)]
    if bias:
        groups.append(ParameterGroup(f"{name}.bias", (shape[0],), count, Role.BIAS, slot=slot))
    return groups


def _attention(d: Dimensions) -> list[ParameterGroup]:
    q, kv = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    count = d.n_layers
    if d.packed_qkv:
        into = linear("attention.qkv", (q + 2 * kv, d.hidden), count, "qkv", bias=d.qkv_bias)
    else:
        into = [
            group
            for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
            for group in linear(
                f"attention.{name}", (width, d.hidden), count, "qkv", bias=d.qkv_bias
            )
        ]
    if d.sinks:
        into.append(ParameterGroup("attention.sinks", (d.n_heads,), count, Role.OTHER, slot="qkv"))
    return [*into, *linear("attention.o_proj", (d.hidden, q), count, "out", bias=d.out_bias)]


def _latent_attention(d: Dimensions) -> list[ParameterGroup]:
    """Return multi-head latent attention: DeepSeek-V2, https://arxiv.org/abs/2405.04434."""
    query, count = d.n_heads * (d.nope_dim + d.rope_dim), d.n_layers
    shapes = [
        ("kv_a_proj", (d.kv_latent + d.rope_dim, d.hidden)),
        ("kv_b_proj", (d.n_heads * (d.nope_dim + d.value_dim), d.kv_latent)),
    ]
    norms = [d.kv_latent]
    if d.q_latent:
        shapes += [("q_a_proj", (d.q_latent, d.hidden)), ("q_b_proj", (query, d.q_latent))]
        norms.append(d.q_latent)
    else:
        shapes.append(("q_proj", (query, d.hidden)))
    groups = [
        group
        for name, shape in shapes
        for group in linear(f"attention.{name}", shape, count, "qkv", bias=False)
    ]
    groups += [
        ParameterGroup("attention.latent_norm", (width,), count, Role.NORM, slot="qkv")
        for width in norms
    ]
    out = (d.hidden, d.n_heads * d.value_dim)
    return [*groups, *linear("attention.o_proj", out, count, "out", bias=False)]


def _feed_forward(d: Dimensions) -> list[ParameterGroup]:
    names = ("gate_proj", "up_proj") if d.is_gated else ("up_proj",)
    up = [
        group
        for name in names
        for group in linear(f"mlp.{name}", (d.ffn, d.hidden), d.n_layers, "up", bias=d.mlp_bias)
    ]
    return [*up, *linear("mlp.down_proj", (d.hidden, d.ffn), d.n_layers, "down", bias=d.mlp_bias)]


def _experts(d: Dimensions) -> list[ParameterGroup]:
    n_sparse = d.n_layers - d.n_dense_layers
    count = n_sparse * d.n_experts
    n_up = 2 if d.is_gated else 1
    groups = [
        ParameterGroup("router.weight", (d.n_experts, d.hidden), n_sparse, Role.LINEAR,
                       slot="router"),
        ParameterGroup("experts.up.weight", (d.ffn, d.hidden), n_up * count, Role.EXPERT,
                       slot="up"),
        ParameterGroup("experts.down.weight", (d.hidden, d.ffn), count, Role.EXPERT, slot="down"),
    ]  # fmt: skip
    if d.router_bias or d.biased_experts:
        groups.append(
            ParameterGroup("router.bias", (d.n_experts,), n_sparse, Role.BIAS, slot="router")
        )
    if d.biased_experts:
        groups += [
            ParameterGroup("experts.up.bias", (d.ffn,), n_up * count, Role.BIAS, slot="up"),
            ParameterGroup("experts.down.bias", (d.hidden,), count, Role.BIAS, slot="down"),
        ]
    if d.n_dense_layers:
        groups += _feed_forward(replace(d, n_layers=d.n_dense_layers, ffn=d.dense_ffn))
    if d.n_shared_experts:
        width = d.shared_ffn * d.n_shared_experts
        groups += linear("shared.gate_proj", (width, d.hidden), n_sparse, "up", bias=False)
        groups += linear("shared.up_proj", (width, d.hidden), n_sparse, "up", bias=False)
        groups += linear("shared.down_proj", (d.hidden, width), n_sparse, "down", bias=False)
    if d.shared_gate:
        groups += linear("shared.gate", (1, d.hidden), n_sparse, "router", bias=False)
    return groups


def _outside(d: Dimensions) -> Sequence[ParameterGroup]:
    groups = []
    width = d.embedding_width or d.hidden
    if d.pooler:
        groups += [
            outside("pooler.weight", d.hidden, d.hidden),
            outside("pooler.bias", d.hidden),
        ]
    if d.head_transform:
        groups += [
            outside("transform.weight", d.hidden, d.hidden),
            outside("transform.bias", d.hidden, count=3),
        ]
    if not d.tied_head:
        groups.append(outside("head.weight", d.vocab, width, role=Role.HEAD))
    if d.head_bias:
        groups.append(outside("head.bias", d.vocab))
    return groups
