"""Models that are no plain decoder or encoder of text: ViT, CLIP, Whisper, Mamba.

And what is not covered at all, by name: its answer would be a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from fragdoctor.errors import InputError
from fragdoctor.estimation.architectures import Dimensions, parameters_of
from fragdoctor.model.workload import ModelShape, Norm, ParameterGroup, Role

TRACE_HINT: Final = "Trace it instead: fragdoctor estimate --model pkg.module:factory"
MAX_LAYERS: Final = 10_000

UNCOVERED: Final = MappingProxyType(
    {
        "UNet2DConditionModel": "a diffusion UNet",
        "UNet2DModel": "a diffusion UNet",
        "AutoencoderKL": "an image autoencoder",
        "ControlNetModel": "a ControlNet",
        "DiTTransformer2DModel": "a diffusion transformer",
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
        "swin": "a Swin transformer",
        "wav2vec2": "a wav2vec 2.0 model",
    }
)
"""Classes of Diffusers and model types of Transformers that the formulas do not cover."""


class Reader(Protocol):
    """Gets checked values out of a configuration."""

    name: str
    config: Mapping[str, Any]

    def whole(self, what: str, default: int | None = None, *, limit: int = ...) -> int:
        """Return a dimension; noted where it is missing."""

    def text(self, keys: tuple[str, ...], default: str) -> str:
        """Return a string."""

    def check(self) -> None:
        """Raise if a key was missing."""


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


def other_family(reader: Reader, kind: str) -> ModelShape | None:
    """Return the shape of a model of one of these families, None for any other."""
    if kind in ("vit", "deit"):
        return _vit_shape(reader, kind)
    if kind == "whisper":
        return _whisper_shape(reader)
    if kind == "mamba":
        return _mamba_shape(reader)
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
        ParameterGroup("embedding.patches", (hidden, channels * patch * patch), 1, Role.OTHER,
                       layered=False),
        ParameterGroup("embedding.class", (hidden,), 1, Role.OTHER, layered=False),
    ]  # fmt: skip
    if bias:
        groups.append(
            ParameterGroup("embedding.patches.bias", (hidden,), 1, Role.BIAS, layered=False)
        )
    return groups


def _vit_shape(reader: Reader, kind: str) -> ModelShape:
    """ViT: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929."""
    n_tokens = _patches(reader) + (2 if kind == "deit" else 1)
    d = _tower(reader, positions=n_tokens)
    n_labels = _labels(reader)
    groups = [
        *parameters_of(d),
        *_patch_embedding(reader, d.hidden, bias=True),
        ParameterGroup("classifier", (n_labels, d.hidden), 1, Role.OTHER, layered=False),
        ParameterGroup("classifier.bias", (n_labels,), 1, Role.BIAS, layered=False),
    ]
    if kind == "deit":
        groups.append(
            ParameterGroup("embedding.distilled", (d.hidden,), 1, Role.OTHER, layered=False)
        )
    return ModelShape(
        name=kind, source=reader.name, parameters=tuple(groups), n_layers=d.n_layers,
        hidden=d.hidden, n_heads=d.n_heads, n_kv_heads=d.n_heads, head_dim=d.head_dim, ffn=d.ffn,
        activation=reader.text(("hidden_act",), "gelu"), norm=Norm.LAYERNORM, has_lm_head=False,
        is_checked=False, fixed_seq=n_tokens, max_positions=n_tokens,
        input_elements=reader.whole("num_channels", 3) * reader.whole("image_size", 224) ** 2,
        assumptions=(f"Each picture is {n_tokens} tokens: its patches and a class token.",),
    )  # fmt: skip


def _labels(reader: Reader) -> int:
    names = reader.config.get("id2label")
    return len(names) if isinstance(names, dict) and names else reader.whole("num_labels", 1000)


def clip_shape(text: Reader, vision: Reader, whole: Reader) -> ModelShape:
    """CLIP: Radford et al. 2021, https://arxiv.org/abs/2103.00020: two towers."""
    positions = text.whole("positions", 77)
    words = _tower(text, vocab=text.whole("vocab", 49_408), positions=positions)
    pictures = _tower(vision, positions=_patches(vision) + 1)
    width = whole.whole("projection_dim", 512)
    groups = [
        *parameters_of(words),
        *parameters_of(pictures),
        ParameterGroup("vision.norm", (pictures.hidden,), 2, Role.NORM, layered=False),
        *_patch_embedding(vision, pictures.hidden, bias=False),
        ParameterGroup("text_projection", (width, words.hidden), 1, Role.OTHER, layered=False),
        ParameterGroup("visual_projection", (width, pictures.hidden), 1, Role.OTHER,
                       layered=False),
        ParameterGroup("logit_scale", (1,), 1, Role.OTHER, layered=False),
    ]  # fmt: skip
    return ModelShape(
        name="clip", source=whole.name, parameters=tuple(groups), is_checked=False,
        has_lm_head=False,
        assumptions=("Of CLIP's two towers only the parameters are counted.",),
    )  # fmt: skip


def _whisper_shape(reader: Reader) -> ModelShape:
    """Whisper: Radford et al. 2022, https://arxiv.org/abs/2212.04356."""
    hidden, vocab = reader.whole("hidden"), reader.whole("vocab")
    n_encoder = reader.whole("encoder_layers", limit=MAX_LAYERS)
    n_decoder = reader.whole("decoder_layers", limit=MAX_LAYERS)
    n_heads, ffn = reader.whole("encoder_attention_heads"), reader.whole("encoder_ffn_dim")
    reader.check()
    sources, targets = (
        reader.whole("max_source_positions", 1500),
        reader.whole("max_target_positions", 448),
    )
    mels = reader.whole("num_mel_bins", 80)
    n_layers = n_encoder + n_decoder
    groups = [
        ParameterGroup("embedding.tokens", (vocab, hidden), 1, Role.EMBEDDING, layered=False),
        ParameterGroup("embedding.positions", (sources + targets, hidden), 1, Role.EMBEDDING,
                       layered=False),
        ParameterGroup("conv1", (hidden, mels * 3), 1, Role.OTHER, layered=False),
        ParameterGroup("conv2", (hidden, hidden * 3), 1, Role.OTHER, layered=False),
        ParameterGroup("conv.bias", (hidden,), 2, Role.BIAS, layered=False),
        *_biased("attention", ("q", "k", "v"), hidden, n_layers, "qkv"),
        *_biased("attention", ("o",), hidden, n_layers, "out"),
        *_biased("cross", ("q",), hidden, n_decoder, "cross_q"),
        *_biased("cross", ("k", "v"), hidden, n_decoder, "cross_kv"),
        *_biased("cross", ("o",), hidden, n_decoder, "cross_out"),
        ParameterGroup("mlp.up.weight", (ffn, hidden), n_layers, Role.LINEAR, slot="up"),
        ParameterGroup("mlp.up.bias", (ffn,), n_layers, Role.BIAS, slot="up"),
        ParameterGroup("mlp.down.weight", (hidden, ffn), n_layers, Role.LINEAR, slot="down"),
        ParameterGroup("mlp.down.bias", (hidden,), n_layers, Role.BIAS, slot="down"),
        ParameterGroup("norm1", (hidden,), 2 * n_layers, Role.NORM, slot="norm1"),
        ParameterGroup("norm_cross", (hidden,), 2 * n_decoder, Role.NORM, slot="norm_cross"),
        ParameterGroup("norm2", (hidden,), 2 * n_layers, Role.NORM, slot="norm2"),
        ParameterGroup("norm", (hidden,), 4, Role.NORM, layered=False),
    ]  # fmt: skip
    return ModelShape(
        name="whisper", source=reader.name, parameters=tuple(groups), n_layers=n_layers,
        hidden=hidden, n_heads=n_heads, n_kv_heads=n_heads, head_dim=max(1, hidden // n_heads),
        ffn=ffn, vocab=vocab, max_positions=targets, norm=Norm.LAYERNORM, tied_head=True,
        n_cross_layers=n_decoder, encoder_seq=sources, is_checked=False,
        assumptions=(
            f"The encoder reads {sources} frames; the length is that of the decoder's text.",
        ),
    )  # fmt: skip


def _biased(
    part: str, names: tuple[str, ...], hidden: int, count: int, slot: str
) -> list[ParameterGroup]:
    """Return square matrices with biases; keys have none in Whisper."""
    groups = []
    for name in names:
        groups.append(
            ParameterGroup(f"{part}.{name}.weight", (hidden, hidden), count, Role.LINEAR, slot=slot)
        )
        if name != "k":
            groups.append(
                ParameterGroup(f"{part}.{name}.bias", (hidden,), count, Role.BIAS, slot=slot)
            )
    return groups


def _mamba_shape(reader: Reader) -> ModelShape:
    """Mamba: Gu and Dao 2023, https://arxiv.org/abs/2312.00752."""
    hidden, vocab = reader.whole("hidden"), reader.whole("vocab")
    n_layers = reader.whole("n_layers", limit=MAX_LAYERS)
    reader.check()
    state, kernel = reader.whole("state_size", 16), reader.whole("conv_kernel", 4)
    inner = reader.whole("intermediate_size", reader.whole("expand", 2) * hidden)
    rank = reader.whole("time_step_rank", -(-hidden // 16))
    shapes: list[tuple[str, tuple[int, ...], Role]] = [
        ("in_proj", (2 * inner, hidden), Role.LINEAR),
        ("conv1d", (inner, kernel), Role.OTHER),
        ("conv1d.bias", (inner,), Role.BIAS),
        ("x_proj", (rank + 2 * state, inner), Role.LINEAR),
        ("dt_proj", (inner, rank), Role.LINEAR),
        ("dt_proj.bias", (inner,), Role.BIAS),
        ("A_log", (inner, state), Role.OTHER),
        ("D", (inner,), Role.OTHER),
        ("out_proj", (hidden, inner), Role.LINEAR),
        ("norm", (hidden,), Role.NORM),
    ]
    groups = [
        ParameterGroup("embedding.tokens", (vocab, hidden), 1, Role.EMBEDDING, layered=False),
        *(ParameterGroup(name, shape, n_layers, role) for name, shape, role in shapes),
        ParameterGroup("norm_f", (hidden,), 1, Role.NORM, layered=False),
    ]
    return ModelShape(
        name="mamba", source=reader.name, parameters=tuple(groups), is_checked=False,
        vocab=vocab, tied_head=True, n_recurrent_layers=n_layers,
        recurrent_elements=inner * (state + kernel),
        assumptions=(
            "What the scan of a Mamba layer keeps depends on its kernel: activations are left out.",
        ),
    )  # fmt: skip
