"""What the formulas do not cover, by name: their answer would be a guess."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.errors import InputError

TRACE_HINT: Final = "Trace it instead: fragdoctor estimate --model pkg.module:factory"

UNCOVERED: Final = MappingProxyType(
    {
        "AutoencoderKL": "an image autoencoder",
        "ControlNetModel": "a ControlNet",
        "Transformer2DModel": "a diffusion transformer",
        "PixArtTransformer2DModel": "a diffusion transformer",
        "SD3Transformer2DModel": "a diffusion transformer",
        "FluxTransformer2DModel": "a diffusion transformer",
        "mamba2": "a Mamba-2 model",
        "jamba": "a hybrid of attention and Mamba layers",
        "falcon_h1": "a hybrid of attention and Mamba layers",
        "qwen3_next": "a hybrid of full and linear attention",
        "rwkv": "an RWKV model",
        "resnet": "a convolutional network",
        "convnext": "a convolutional network",
        "convnextv2": "a convolutional network",
        "swin": "a Swin transformer",
        "swinv2": "a Swin transformer",
        "wav2vec2": "a wav2vec 2.0 model",
        "hubert": "a wav2vec 2.0 model",
        "siglip": "a SigLIP model",
        "siglip_vision_model": "a SigLIP model",
        "dinov2": "a DINOv2 model",
        "beit": "a BEiT model",
        "albert": "a model whose layers share their parameters",
        "deberta": "a model with disentangled attention",
        "deberta-v2": "a model with disentangled attention",
        "electra": "an ELECTRA model",
        "mpnet": "an encoder with relative positions",
        "modernbert": "a ModernBERT model",
        "longformer": "a model with sparse attention",
        "big_bird": "a model with sparse attention",
        "pegasus": "a Pegasus model",
        "m2m_100": "an M2M100 model",
        "xglm": "an XGLM model",
        "falcon_mamba": "a Mamba model with further norms",
        "zamba": "a hybrid of attention and Mamba layers",
        "zamba2": "a hybrid of attention and Mamba layers",
        "bamba": "a hybrid of attention and Mamba layers",
        "nemotron_h": "a hybrid of attention and Mamba layers",
        "granitemoehybrid": "a hybrid of attention and Mamba layers",
        "lfm2": "a hybrid of attention and convolutions",
        "recurrent_gemma": "a hybrid of attention and recurrent layers",
        "minimax": "a hybrid of full and linear attention",
        "llama4": "a Llama 4 model",
        "llama4_text": "a Llama 4 model",
        "gemma3n": "a Gemma 3n model",
        "gemma3n_text": "a Gemma 3n model",
        "dbrx": "a DBRX model",
        "phimoe": "a Phi mixture of experts",
        "jetmoe": "a mixture of experts in attention too",
    }
)
"""Classes of Diffusers and model types of Transformers that the formulas do not cover."""


def refuse_uncovered(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that the formulas do not cover, by name.

    Raises:
        InputError: it is one of :data:`UNCOVERED`.
    """
    for key in ("_class_name", "model_type"):
        stated = config.get(key)
        if isinstance(stated, str) and stated in UNCOVERED:
            raise InputError(
                f"{name} is {UNCOVERED[stated]} ({stated}), which the formulas do not cover.",
                hint=TRACE_HINT,
            )


def refuse_unknown(config: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse a model of an unknown type unless it is built as most decoders of today are.

    Raises:
        InputError: it is no language model, or its feed-forward has no gate.
    """
    names = config.get("architectures")
    heads = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    decodes = all(n.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for n in heads)
    gated = config.get("hidden_act") in ("silu", "swish") or "rms_norm_eps" in config
    if kind and not (decodes and (gated or not heads)):
        raise InputError(
            f"{name} is a model of type {kind[:60]!r}, which the formulas do not cover.",
            hint=TRACE_HINT,
        )
