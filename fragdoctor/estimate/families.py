"""The parameters of known transformer families, matrix by matrix, from a few dimensions.

The sums equal the published parameter counts (see tests/estimate/test_shapes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fragdoctor.model.workload import Norm, ParameterGroup, Role


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What decides the parameters of a decoder or encoder.

    Attributes:
        positions: learned position embeddings; 0 = rotary or none.
        qkv_bias, out_bias, mlp_bias: which linear layers have biases.
        packed_qkv: one matrix for query, key and value.
        embedding_width: width of the token embedding where it differs from the hidden size.
        segments: token type embeddings (BERT).
        n_outside_norms: normalisations outside the layers.
    """

    vocab: int
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    positions: int = 0
    is_gated: bool = False
    norm: Norm = Norm.LAYERNORM
    norms_per_layer: int = 2
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    packed_qkv: bool = False
    tied_head: bool = True
    head_bias: bool = False
    embedding_width: int = 0
    segments: int = 0
    n_outside_norms: int = 1
    n_experts: int = 0
    qk_norm: bool = False
    n_shared_experts: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    pooler: bool = False
    head_transform: bool = False


def parameters_of(d: Dimensions) -> list[ParameterGroup]:
    """Return every parameter of a model with these dimensions."""
    groups = [
        *_embeddings(d),
        *_norms(d),
        *_attention(d),
        *(_experts(d) if d.n_experts else _feed_forward(d)),
        *_outside(d),
    ]
    return [g for g in groups if g.n_total > 0]


def _embeddings(d: Dimensions) -> list[ParameterGroup]:
    width = d.embedding_width or d.hidden
    groups = [
        ParameterGroup("embedding.tokens", (d.vocab, width), 1, Role.EMBEDDING, layered=False)
    ]
    for name, rows in (("positions", d.positions), ("segments", d.segments)):
        if rows:
            groups.append(
                ParameterGroup(
                    f"embedding.{name}", (rows, d.hidden), 1, Role.EMBEDDING, layered=False
                )
            )
    if width != d.hidden:
        groups += [
            ParameterGroup(name, (d.hidden, width), 1, Role.OTHER, layered=False)
            for name in ("project_in", "project_out")
        ]
    return groups


def _norms(d: Dimensions) -> list[ParameterGroup]:
    with_bias = 2 if d.norm is Norm.LAYERNORM else 1
    groups = [
        ParameterGroup(f"norm{i + 1}", (d.hidden,), d.n_layers * with_bias, Role.NORM,
                       slot="norm1" if i == 0 else "norm2")
        for i in range(d.norms_per_layer)
    ]  # fmt: skip
    if d.qk_norm:
        groups.append(
            ParameterGroup(
                "attention.qk_norm", (d.head_dim,), 2 * d.n_layers, Role.NORM, slot="qkv"
            )
        )
    groups.append(
        ParameterGroup("norm", (d.hidden,), d.n_outside_norms * with_bias, Role.NORM, layered=False)
    )
    return groups


def _linear(
    name: str, shape: tuple[int, int], count: int, slot: str, *, bias: bool
) -> list[ParameterGroup]:
    groups = [ParameterGroup(f"{name}.weight", shape, count, Role.LINEAR, slot=slot)]
    if bias:
        groups.append(ParameterGroup(f"{name}.bias", (shape[0],), count, Role.BIAS, slot=slot))
    return groups


def _attention(d: Dimensions) -> list[ParameterGroup]:
    q, kv = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    count = d.n_layers
    if d.packed_qkv:
        into = _linear("attention.qkv", (q + 2 * kv, d.hidden), count, "qkv", bias=d.qkv_bias)
    else:
        into = [
            group
            for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
            for group in _linear(
                f"attention.{name}", (width, d.hidden), count, "qkv", bias=d.qkv_bias
            )
        ]
    return [*into, *_linear("attention.o_proj", (d.hidden, q), count, "out", bias=d.out_bias)]


def _feed_forward(d: Dimensions) -> list[ParameterGroup]:
    names = ("gate_proj", "up_proj") if d.is_gated else ("up_proj",)
    up = [
        group
        for name in names
        for group in _linear(f"mlp.{name}", (d.ffn, d.hidden), d.n_layers, "up", bias=d.mlp_bias)
    ]
    return [*up, *_linear("mlp.down_proj", (d.hidden, d.ffn), d.n_layers, "down", bias=d.mlp_bias)]


def _experts(d: Dimensions) -> list[ParameterGroup]:
    count = d.n_layers * d.n_experts
    n_up = 2 if d.is_gated else 1
    groups = [
        ParameterGroup("router.weight", (d.n_experts, d.hidden), d.n_layers, Role.LINEAR,
                       slot="router"),
        ParameterGroup("experts.up.weight", (d.ffn, d.hidden), n_up * count, Role.EXPERT,
                       slot="up"),
        ParameterGroup("experts.down.weight", (d.hidden, d.ffn), count, Role.EXPERT, slot="down"),
    ]  # fmt: skip
    if d.n_shared_experts:
        width = d.shared_ffn * d.n_shared_experts
        groups += _linear("shared.gate_proj", (width, d.hidden), d.n_layers, "up", bias=False)
        groups += _linear("shared.up_proj", (width, d.hidden), d.n_layers, "up", bias=False)
        groups += _linear("shared.down_proj", (d.hidden, width), d.n_layers, "down", bias=False)
    if d.shared_gate:
        groups += _linear("shared.gate", (1, d.hidden), d.n_layers, "router", bias=False)
    return groups


def _outside(d: Dimensions) -> Sequence[ParameterGroup]:
    groups = []
    width = d.embedding_width or d.hidden
    if d.pooler:
        groups += [
            ParameterGroup("pooler.weight", (d.hidden, d.hidden), 1, Role.OTHER, layered=False),
            ParameterGroup("pooler.bias", (d.hidden,), 1, Role.OTHER, layered=False),
        ]
    if d.head_transform:
        groups += [
            ParameterGroup("transform.weight", (d.hidden, d.hidden), 1, Role.OTHER, layered=False),
            ParameterGroup("transform.bias", (d.hidden,), 3, Role.OTHER, layered=False),
        ]
    if not d.tied_head:
        groups.append(ParameterGroup("head.weight", (d.vocab, width), 1, Role.HEAD, layered=False))
    if d.head_bias:
        groups.append(ParameterGroup("head.bias", (d.vocab,), 1, Role.OTHER, layered=False))
    return groups
