"""The parameters of T5: an encoder, a decoder with cross attention, one relative bias for each."""

from __future__ import annotations

from fragdoctor.model.workload import ParameterGroup, Role


def t5_parameters(  # noqa: PLR0913 - the dimensions, all by keyword
    *,
    vocab: int,
    hidden: int,
    ffn: int,
    inner: int,
    n_heads: int,
    n_encoder: int,
    n_decoder: int,
    n_buckets: int,
    is_gated: bool,
    tied: bool,
) -> list[ParameterGroup]:
    """Return every parameter; ``inner`` is heads x head size."""
    n_layers = n_encoder + n_decoder
    n_up = 2 if is_gated else 1
    groups = [
        ParameterGroup("embedding.tokens", (vocab, hidden), 1, Role.EMBEDDING, layered=False),
        ParameterGroup("attention.q", (inner, hidden), n_layers, Role.LINEAR, slot="qkv"),
        ParameterGroup("attention.k", (inner, hidden), n_layers, Role.LINEAR, slot="qkv"),
        ParameterGroup("attention.v", (inner, hidden), n_layers, Role.LINEAR, slot="qkv"),
        ParameterGroup("attention.o", (hidden, inner), n_layers, Role.LINEAR, slot="out"),
        ParameterGroup("cross.q", (inner, hidden), n_decoder, Role.LINEAR, slot="cross_q"),
        ParameterGroup("cross.k", (inner, hidden), n_decoder, Role.LINEAR, slot="cross_kv"),
        ParameterGroup("cross.v", (inner, hidden), n_decoder, Role.LINEAR, slot="cross_kv"),
        ParameterGroup("cross.o", (hidden, inner), n_decoder, Role.LINEAR, slot="cross_out"),
        ParameterGroup("mlp.up", (ffn, hidden), n_up * n_layers, Role.LINEAR, slot="up"),
        ParameterGroup("mlp.down", (hidden, ffn), n_layers, Role.LINEAR, slot="down"),
        ParameterGroup("norm1", (hidden,), n_layers, Role.NORM, slot="norm1"),
        ParameterGroup("norm_cross", (hidden,), n_decoder, Role.NORM, slot="norm_cross"),
        ParameterGroup("norm2", (hidden,), n_layers, Role.NORM, slot="norm2"),
        ParameterGroup("relative_bias", (n_buckets, n_heads), 2, Role.OTHER, layered=False),
        ParameterGroup("norm", (hidden,), 2, Role.NORM, layered=False),
    ]
    if not tied:
        groups.append(ParameterGroup("head", (vocab, hidden), 1, Role.HEAD, layered=False))
    return groups
