"""Models that are no plain decoder or encoder: T5, BART, Whisper, ViT.

And what the formulas do not cover, by name: their answer would be a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from fragdoctor.errors import InputError
from fragdoctor.estimation.architectures import (
    Dimensions,
    linear,
    outside,
    parameters_of,
    t5_parameters,
)
from fragdoctor.model.workload import LayerSizes, ModelShape, Norm, ParameterGroup, Role, shared

TRACE_HINT: Final = (
    "Its own class can be rehearsed: install transformers or diffusers beside torch and add "
    "--rehearse; or build it yourself: fragdoctor estimate --model pkg.module:factory"
)


class UncoveredModelError(InputError):
    """A model that no formula covers."""


_UNCOVERED: Final = {
    "a UNet": "UNet2DConditionModel UNet2DModel",
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


MAX_LAYERS: Final = 10_000


class Reader(Protocol):
    """Gets checked values out of a configuration."""

    name: str
    config: Mapping[str, Any]

    def whole(self, what: str, default: int | None = None, *, limit: int = ...) -> int:
        """Return a dimension; noted where it is missing."""

    def text(self, keys: tuple[str, ...], default: str) -> str:
        """Return a string."""

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""

    def share(self, keys: tuple[str, ...], default: float) -> float:
        """Return a number from 0 to 1."""

    def check(self) -> None:
        """Raise if a key was missing."""


def other_family(reader: Reader, kind: str) -> ModelShape | None:
    """Return the shape of a model of one of these families, None for any other."""
    if kind in ("t5", "mt5", "umt5"):
        return _t5_shape(reader, kind)
    if kind in ("vit", "deit"):
        return _vit_shape(reader, kind)
    if kind in ("whisper", "bart", "mbart"):
        return _encoder_decoder_shape(reader, kind)
    return None


def _tower(reader: Reader, *, vocab: int = 0, positions: int = 0) -> Dimensions:
    """Return an encoder with biases everywhere and a norm before each branch."""
    hidden, n_heads = reader.whole("hidden"), reader.whole("n_heads")
    ffn, n_layers = reader.whole("ffn"), reader.whole("n_layers", limit=MAX_LAYERS)
    reader.check()
    return Dimensions(
        vocab=vocab, hidden=hidden, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads,
        head_dim=max(1, hidden // n_heads), ffn=ffn, positions=positions, tied_head=True,
    )  # fmt: skip


def _patches(reader: Reader) -> int:
    side = reader.whole("image_size", 224) // reader.whole("patch_size", 16)
    return max(1, side * side)


def _patch_embedding(reader: Reader, hidden: int, *, bias: bool) -> list[ParameterGroup]:
    patch, channels = reader.whole("patch_size", 16), reader.whole("num_channels", 3)
    groups = [
        outside("embedding.patches", hidden, channels * patch * patch),
        outside("embedding.class", hidden),
    ]  # fmt: skip
    if bias:
        groups.append(outside("embedding.patches.bias", hidden, role=Role.BIAS))
    return groups


def _vit_shape(reader: Reader, kind: str) -> ModelShape:
    """ViT: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929."""
    n_tokens = _patches(reader) + (2 if kind == "deit" else 1)
    d = _tower(reader, positions=n_tokens)
    groups = [
        *parameters_of(d),
        *_patch_embedding(reader, d.hidden, bias=True),
        *classifier_parameters(n_labels(reader), d.hidden),
    ]
    if kind == "deit":
        groups.append(outside("embedding.distilled", d.hidden))
    return ModelShape(
        **shared(replace(d, activation=reader.text(("hidden_act",), "gelu")), LayerSizes),
        name=kind, source=reader.name, parameters=tuple(groups), has_lm_head=False,
        fixed_seq=n_tokens, max_positions=n_tokens,
        input_elements=reader.whole("num_channels", 3) * reader.whole("image_size", 224) ** 2,
        assumptions=(f"Each picture is {n_tokens} tokens: its patches and a class token.",),
    )  # fmt: skip


def classifier_parameters(n: int, hidden: int, *, has_two: bool = False) -> list[ParameterGroup]:
    """Return the matrix from the hidden size to ``n`` classes, a square one before it, biases."""
    before = [
        outside("before_classifier", hidden, hidden),
        outside("before_classifier.bias", hidden, role=Role.BIAS),
    ]
    return [
        *(before if has_two else ()),
        outside("classifier", n, hidden),
        outside("classifier.bias", n, role=Role.BIAS),
    ]


def n_labels(reader: Reader) -> int:
    """Return how many classes a configuration names; 2 are the library's default."""
    names = reader.config.get("id2label")
    return len(names) if isinstance(names, dict) and names else reader.whole("num_labels", 2)


def _t5_shape(reader: Reader, kind: str) -> ModelShape:
    hidden, ffn = reader.whole("hidden"), reader.whole("ffn")
    n_layers = reader.whole("n_layers", limit=MAX_LAYERS)
    n_heads, vocab = reader.whole("n_heads"), reader.whole("vocab")
    reader.check()
    head_dim = reader.whole("head_dim", 64)
    n_decoder = reader.whole("num_decoder_layers", n_layers, limit=MAX_LAYERS)
    usual = "relu" if kind == "t5" else "gated-gelu"
    gated = "gated" in reader.text(("feed_forward_proj",), usual)
    tied = reader.flag("tie_word_embeddings", default=True)
    groups = t5_parameters(
        vocab=vocab, hidden=hidden, ffn=ffn, inner=n_heads * head_dim, n_heads=n_heads,
        n_encoder=n_layers, n_decoder=n_decoder, is_gated=gated, tied=tied,
        n_buckets=reader.whole("relative_attention_num_buckets", 32),
    )  # fmt: skip
    dropout = reader.share(("dropout_rate",), 0.1)
    return ModelShape(
        name=kind, source=reader.name, parameters=tuple(groups),
        n_layers=n_layers + n_decoder, hidden=hidden, n_heads=n_heads, n_kv_heads=n_heads,
        head_dim=head_dim, ffn=ffn, vocab=vocab, max_positions=reader.whole("positions", 512),
        is_gated=gated, activation="relu" if not gated else "gelu_new",
        norm=Norm.RMSNORM_T5, tied_head=tied, embedding_dropout=dropout, encoder_norm=True,
        position_bias=True,
        hidden_dropout=dropout, attention_dropout=dropout, ffn_dropout=dropout,
        softmax_fp32=True, upcasts_logits=False, n_cross_layers=n_decoder,
        assumptions=("Encoder and decoder are given the same length.",),
    )  # fmt: skip


def _encoder_decoder_shape(reader: Reader, kind: str) -> ModelShape:
    """BART (https://arxiv.org/abs/1910.13461), mBART and Whisper (https://arxiv.org/abs/2212.04356).

    Whisper hears a fixed number of frames through two convolutions; its keys have no biases.
    """
    hidden, vocab = reader.whole("hidden"), reader.whole("vocab")
    n_encoder = reader.whole("encoder_layers", limit=MAX_LAYERS)
    n_decoder = reader.whole("decoder_layers", limit=MAX_LAYERS)
    n_heads, ffn = reader.whole("encoder_attention_heads"), reader.whole("encoder_ffn_dim")
    reader.check()
    hears, n_layers = kind == "whisper", n_encoder + n_decoder
    sources = reader.whole("max_source_positions", 1500) if hears else 0
    targets = reader.whole("max_target_positions", 448) if hears else reader.whole("positions")
    positions = targets if hears else 2 * (targets + 2)
    frames = outside("embedding.frames", sources, hidden, role=Role.EMBEDDING, is_frozen=True)
    mels = reader.whole("num_mel_bins", 80)
    before = outside("norm_embedding", hidden, role=Role.NORM, count=4)
    convolutions = [
        outside("conv1", hidden, mels * 3),
        outside("conv2", hidden, hidden * 3),
        outside("conv.bias", hidden, role=Role.BIAS, count=2),
    ]
    n_norms = {"bart": 0, "mbart": 4, "whisper": 4}[kind]
    groups = [
        outside("embedding.tokens", vocab, hidden, role=Role.EMBEDDING),
        outside("embedding.positions", positions, hidden, role=Role.EMBEDDING),
        *([frames, *convolutions] if hears else [before]),
        *_square("attention", "qkv", hidden, n_layers, "qkv", biased_keys=not hears),
        *_square("attention", "o", hidden, n_layers, "out"),
        *_square("cross", "q", hidden, n_decoder, "cross_q"),
        *_square("cross", "kv", hidden, n_decoder, "cross_kv", biased_keys=not hears),
        *_square("cross", "o", hidden, n_decoder, "cross_out"),
        *linear("mlp.up", (ffn, hidden), n_layers, "up", bias=True),
        *linear("mlp.down", (hidden, ffn), n_layers, "down", bias=True),
        ParameterGroup("norm1", (hidden,), 2 * n_layers, Role.NORM, slot="norm1"),
        ParameterGroup("norm_cross", (hidden,), 2 * n_decoder, Role.NORM, slot="norm_cross"),
        ParameterGroup("norm2", (hidden,), 2 * n_layers, Role.NORM, slot="norm2"),
        outside("norm", hidden, role=Role.NORM, count=n_norms),
    ]  # fmt: skip
    length = (
        f"The encoder reads {sources} frames; the length is that of the decoder's text."
        if hears
        else "Encoder and decoder are given the same length."
    )
    dropout = reader.share(("dropout",), 0.0 if hears else 0.1)
    return ModelShape(
        name=kind, source=reader.name, parameters=tuple(g for g in groups if g.n_total),
        n_layers=n_layers, hidden=hidden, n_heads=n_heads, n_kv_heads=n_heads,
        head_dim=max(1, hidden // n_heads), ffn=ffn, vocab=vocab, max_positions=targets,
        activation=reader.text(("activation_function",), "gelu"), norm=Norm.LAYERNORM,
        tied_head=True, n_cross_layers=n_decoder, encoder_seq=sources,
        adds_to_logits=not hears, encoder_norm=n_norms > 0, copies_attention=hears,
        embedding_dropout=dropout, hidden_dropout=dropout,
        ffn_dropout=reader.share(("activation_dropout",), 0.0),
        attention_dropout=reader.share(("attention_dropout",), 0.0),
        # Of both convolutions the result, and what its GELU gives.
        front_elements=(2 * 2 * sources + 2 * sources) * hidden if hears else 0,
        input_elements=2 * sources * mels, assumptions=(length,),
    )  # fmt: skip


def _square(  # noqa: PLR0913 - one matrix after the other
    part: str, names: str, hidden: int, count: int, slot: str, *, biased_keys: bool = True
) -> list[ParameterGroup]:
    """Return square matrices with biases, each named by a letter."""
    return [
        group
        for name in names
        for group in linear(
            f"{part}.{name}", (hidden, hidden), count, slot, bias=name != "k" or biased_keys
        )
    ]
