"""How each known architecture builds its layers: what its ``config.json`` does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.model.workload import Norm


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts about an architecture's code.

    Attributes:
        ffn_factor: width of the feed-forward layer in hidden sizes where the file does not say;
            0 = the file must say.
        extra_positions: rows that the position table has beyond the stated length.
        n_outside_norms: normalisations outside the layers.
        tied: default of ``tie_word_embeddings``.
        dropout: default dropout.
        has_no_head: the base model ends before a head.
    """

    norm: Norm = Norm.RMSNORM_WRITTEN_OUT
    is_gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    packed_qkv: bool = False
    ffn_factor: int = 0
    learned_positions: bool = False
    extra_positions: int = 0
    has_rotary: bool = True
    tied: bool = False
    head_bias: bool = False
    n_outside_norms: int = 1
    norms_per_layer: int = 2
    activation: str = "silu"
    dropout: float = 0.0
    parallel_residual: bool = False
    multi_query: bool = False
    segments: bool = False
    pooler: bool = False
    qk_norm: bool = False
    is_mixture: bool = False
    has_no_head: bool = False
    is_decoder: bool = True


LLAMA: Final = Architecture()
GPT2: Final = Architecture(
    norm=Norm.LAYERNORM,
    is_gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    packed_qkv=True,
    ffn_factor=4,
    learned_positions=True,
    has_rotary=False,
    tied=True,
    activation="gelu",
    dropout=0.1,
)
BERT: Final = replace(
    GPT2,
    packed_qkv=False,
    segments=True,
    pooler=True,
    has_no_head=True,
    is_decoder=False,
)
NEOX: Final = replace(
    GPT2, learned_positions=False, has_rotary=True, tied=False, dropout=0.0, parallel_residual=True
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": LLAMA,
        "ministral": LLAMA,
        "yi": LLAMA,
        "smollm3": replace(LLAMA, tied=True),
        "qwen2": replace(LLAMA, qkv_bias=True),
        "qwen3": replace(LLAMA, qk_norm=True),
        "gemma": replace(LLAMA, tied=True, activation="gelu"),
        "gemma2": replace(LLAMA, tied=True, activation="gelu", norms_per_layer=4),
        "phi3": replace(LLAMA, packed_qkv=True),
        "mixtral": replace(LLAMA, is_mixture=True),
        "qwen2_moe": replace(LLAMA, qkv_bias=True, is_mixture=True),
        "qwen3_moe": replace(LLAMA, qk_norm=True, is_mixture=True),
        "gpt2": GPT2,
        "gpt_neox": NEOX,
        "gptj": replace(
            NEOX, qkv_bias=False, out_bias=False, packed_qkv=False, norms_per_layer=1,
            head_bias=True, activation="gelu_new",
        ),
        "phi": replace(NEOX, packed_qkv=False, norms_per_layer=1, head_bias=True,
                       activation="gelu_new"),
        "opt": replace(GPT2, packed_qkv=False, extra_positions=2, ffn_factor=0, activation="relu"),
        "bloom": replace(GPT2, learned_positions=False, n_outside_norms=2, dropout=0.0),
        "falcon": replace(
            NEOX, qkv_bias=False, out_bias=False, mlp_bias=False, tied=True, norms_per_layer=1,
            multi_query=True,
        ),
        "starcoder2": replace(GPT2, packed_qkv=False, learned_positions=False, has_rotary=True,
                              dropout=0.0, ffn_factor=0),
        "bert": BERT,
        "roberta": BERT,
        "xlm-roberta": BERT,
        "nomic_bert": BERT,
    }
)  # fmt: skip


EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def generic(config: Mapping[str, Any]) -> Architecture:
    """Return how to take an unknown architecture: by its activation, Llama-like or GPT-like."""
    gated = config.get("hidden_act") in ("silu", "swish") or "rms_norm_eps" in config
    mixture = any(isinstance(config.get(k), int) and config[k] > 0 for k in EXPERT_KEYS)
    if gated or mixture:
        return replace(LLAMA, is_mixture=mixture)
    return replace(GPT2, packed_qkv=False, tied=False)
