"""What the formulas do not cover, by name: their answer would be a guess."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.errors import InputError

TRACE_HINT: Final = (
    "Its own class can be rehearsed: install transformers or diffusers beside torch and add "
    "--rehearse; or build it yourself: fragdoctor estimate --model pkg.module:factory"
)


class UncoveredModelError(InputError):
    """A model that no formula covers."""


_UNCOVERED: Final = {
    "a UNet": "UNet2DConditionModel UNet2DModel",
    "an encoder and a decoder": "t5 mt5 umt5 bart mbart whisper",
    "a vision transformer": "vit deit",
    "an image autoencoder": "AutoencoderKL",
    "a ControlNet": "ControlNetModel",
    "a diffusion transformer": (
        "DiTTransformer2DModel Transformer2DModel PixArtTransformer2DModel SD3Transformer2DModel "
        "FluxTransformer2DModel"
    ),
    "a CLIP model": "clip",
    "a Mamba model": "mamba mamba2",
    "a hybrid of attention and Mamba layers": (
        "jamba falcon_h1 zamba zamba2 bamba nemotron_h granitemoehybrid"
    ),
    "a hybrid of full and linear attention": "qwen3_next minimax",
    "an RWKV model": "rwkv",
    "a convolutional network": "resnet convnext convnextv2",
    "a Swin transformer": "swin swinv2",
    "a wav2vec 2.0 model": "wav2vec2 hubert",
    "a SigLIP model": "siglip siglip_vision_model",
    "a DINOv2 model": "dinov2",
    "a BEiT model": "beit",
    "a model whose layers share their parameters": "albert",
    "a model with disentangled attention": "deberta deberta-v2",
    "an ELECTRA model": "electra",
    "an encoder with relative positions": "mpnet",
    "a ModernBERT model": "modernbert",
    "a model with sparse attention": "longformer big_bird",
    "a Pegasus model": "pegasus",
    "an M2M100 model": "m2m_100",
    "an XGLM model": "xglm",
    "a Mamba model with further norms": "falcon_mamba",
    "a hybrid of attention and convolutions": "lfm2",
    "a hybrid of attention and recurrent layers": "recurrent_gemma",
    "a Llama 4 model": "llama4 llama4_text",
    "a Gemma 3n model": "gemma3n gemma3n_text",
    "a DBRX model": "dbrx",
    "a Phi mixture of experts": "phimoe",
    "a mixture of experts in attention too": "jetmoe",
}
UNCOVERED: Final = MappingProxyType(
    {kind: what for what, kinds in _UNCOVERED.items() for kind in kinds.split()}
)
"""Classes of Diffusers and model types of Transformers that the formulas do not cover."""


def refuse_uncovered(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that the formulas do not cover, by name.

    Raises:
        UncoveredModelError: it is one of :data:`UNCOVERED`.
    """
    for key in ("_class_name", "model_type"):
        stated = config.get(key)
        if isinstance(stated, str) and stated in UNCOVERED:
            raise UncoveredModelError(
                f"{name} is {UNCOVERED[stated]} ({stated}), which the formulas do not cover.",
                hint=TRACE_HINT,
            )


def refuse_unknown(config: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse a model of an unknown type unless it is built as most decoders of today are.

    Raises:
        UncoveredModelError: it is no language model, or its feed-forward has no gate.
    """
    names = config.get("architectures")
    heads = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    decodes = all(n.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for n in heads)
    gated = config.get("hidden_act") in ("silu", "swish") or "rms_norm_eps" in config
    if kind and not (decodes and (gated or not heads)):
        raise UncoveredModelError(
            f"{name} is a model of type {kind[:60]!r}, which the formulas do not cover.",
            hint=TRACE_HINT,
        )
