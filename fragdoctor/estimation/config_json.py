"""Reads the shape of a model from a Hugging Face ``config.json``.

A table says how each architecture builds its layers, so parameter counts equal the published ones.
Values come from strangers: each is checked for type and size before anything is computed from it.
A model type that is not in the table is refused; only its own class knows its layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from fragdoctor.errors import InputError
from fragdoctor.estimation.architectures import ARCHITECTURES, Architecture, parameters_of
from fragdoctor.model.workload import LayerSizes, Loss, ModelShape, shared
from fragdoctor.opening import read_bounded
from fragdoctor.units import MIB

MAX_CONFIG_BYTES: Final = 16 * MIB
MAX_DIMENSION: Final = 2**31
MAX_LAYERS: Final = 2000
REHEARSE_HINT: Final = (
    "Run its own code without a GPU: pip install torch transformers (or diffusers), then add "
    "--rehearse; or build it yourself: fragdoctor estimate --model pkg.module:factory. For a "
    "decoder like Llama, you can also give its sizes: --layers, --hidden, --heads, --ffn, --vocab."
)

Config = Mapping[str, Any]

# Our name -> the names that configurations use for it, in order of preference.
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"),
    "n_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
ONLY_LANGUAGE: Final = "Only the language model of this multimodal configuration is counted."
_ACTIVATIONS: Final = ("hidden_act", "activation_function", "hidden_activation", "activation")
_DROPOUTS: Final = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout",
                    "resid_dropout", "residual_dropout")  # fmt: skip
_ATTENTION_DROPOUTS: Final = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")


class UncoveredModelError(InputError):
    """A model that the formulas do not cover, although its own class can be rehearsed."""


def read_config(path: Path) -> Config:
    """Return the object in a configuration file.

    Raises:
        InputError: unreadable, not JSON, or not an object.
        LimitExceeded: larger than any genuine configuration.
    """
    hint = "Give a Hugging Face config.json."
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not JSON.", hint=hint) from e
    if not isinstance(config, dict):
        said = f"{path} is not a model configuration: it is not a JSON object."
        raise InputError(said, hint=hint)
    return config


def shape_of_config(config: Config, name: str) -> ModelShape:
    """Return the shape of the model that a configuration describes.

    Raises:
        InputError: keys are missing or have impossible values; the sentence names them.
        UncoveredModelError: the formulas do not cover its type.
    """
    config, notes = _language_part(config)
    stated = config.get("_class_name") or config.get("model_type")
    kind = stated if isinstance(stated, str) else ""
    if not kind and not any(k in config for keys in KEYS.values() for k in keys):
        raise InputError(
            f"{name} is JSON but no model's configuration.", hint="Give a Hugging Face config.json."
        )
    architecture = ARCHITECTURES.get(kind)
    # Only the first Falcons, of one key-value head and rotated positions, are covered.
    is_other = kind == "falcon" and (config.get("new_decoder_architecture") or config.get("alibi"))
    other = " with grouped heads or ALiBi" if is_other else ""
    if architecture is None or other:
        what = f"of type {kind[:60]!r}{other}" if kind else "without a type (model_type)"
        raise UncoveredModelError(
            f"{name} is a model {what}, which the formulas do not cover.", hint=REHEARSE_HINT
        )
    return _shape(ConfigReader(config, name), architecture, kind, notes)


def _language_part(config: Config) -> tuple[Config, tuple[str, ...]]:
    inner = config.get("text_config")
    if isinstance(inner, dict) and not any(k in config for k in KEYS["hidden"]):
        return inner, (ONLY_LANGUAGE,)
    is_more = any(isinstance(config.get(k), dict) for k in ("vision_config", "audio_config"))
    return config, (ONLY_LANGUAGE,) if is_more else ()


class ConfigReader:
    """Reads checked values from a configuration, and remembers which keys are missing."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.missing: list[str] = []

    def whole(self, what: str, default: int | None = None, *, limit: int = MAX_DIMENSION) -> int:
        """Return a dimension by our name for it; if it is missing, note that and return 0."""
        for key in KEYS.get(what, (what,)):
            value = self.config.get(key)
            if value is None or (default == 0 and value == 0 and not isinstance(value, bool)):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
                raise InputError(
                    f"{self.name}: {key} is {str(value)[:40]!r}, not a whole number "
                    f"from 1 to {limit}.",
                    hint="Check the configuration.",
                )
            return value
        if default is None:
            self.missing.append(" or ".join(KEYS.get(what, (what,))[:2]))
            return 0
        return default

    def first(self, *keys: str, default: bool | str) -> Any:
        """Return the first value that has the default's type."""
        found = (self.config.get(key) for key in keys)
        return next((value for value in found if isinstance(value, type(default))), default)

    def share(self, keys: tuple[str, ...], default: float) -> float:
        """Return a number from 0 to 1."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
                return float(value)
        return default

    def check(self) -> None:
        """Raise if a key was missing."""
        if self.missing:
            which = ", ".join(self.missing)
            plural = "s" if len(self.missing) > 1 else ""
            raise InputError(
                f"{self.name} lacks the key{plural} {which}.",
                hint="The formulas cover language models; trace other models with --model "
                "pkg.module:factory, or add the key to the file.",
            )


def quantised_dtype(config: Config) -> str:
    """Return our name for how the weights are quantized, or "" if they are not."""
    both = (config.get(key) for key in ("quantization_config", "compression_config"))
    stated = next((one for one in both if isinstance(one, dict)), None)
    if stated is None:
        return ""
    method = stated.get("quant_method")
    method = method if isinstance(method, str) else "unknown method"
    bits = stated.get("bits", stated.get("w_bit"))
    if stated.get("load_in_4bit") is True or bits == 4 or "fp4" in method:
        return "mxfp4" if method == "mxfp4" else "int4"
    if "fp8" in method:
        return "fp8-weights"
    return "int8" if stated.get("load_in_8bit") is True or bits == 8 else ""


def _shape(reader: ConfigReader, a: Architecture, kind: str, notes: tuple[str, ...]) -> ModelShape:
    whole, flag, config = reader.whole, reader.first, reader.config
    hidden, n_layers = whole("hidden"), whole("n_layers", limit=MAX_LAYERS)
    n_heads, vocab = whole("n_heads"), whole("vocab")
    ffn = whole("ffn", None if a.is_gated else 4 * hidden)
    n_experts = whole("n_experts") if a.is_mixture else 0
    reader.check()
    expert_ffn = whole("moe_intermediate_size", 0) if a.is_mixture else 0
    shared_ffn = whole("shared_expert_intermediate_size", 0) or (
        whole("n_shared_experts", 0) * expert_ffn
    )
    latent = _latent(reader)
    head_dim = whole("head_dim", max(1, hidden // n_heads))
    if latent:
        head_dim = latent["nope_dim"] + latent["rope_dim"]
    classes = config.get("architectures")
    names = map(str, classes if isinstance(classes, list) else ())
    is_masked = a.is_encoder and any(name.endswith("ForMaskedLM") for name in names)
    has_head = not a.is_encoder or is_masked
    positions = whole("positions", 0)
    d = replace(
        a,
        prompt_logits=Loss.WORKING if is_masked else a.prompt_logits,
        tied_head=a.is_encoder or flag("tie_word_embeddings", default=a.tied_head),
        activation=reader.first(*_ACTIVATIONS, default=a.activation),
        attention_softcap=a.attention_softcap and _has_cap(config, "attn_logit_softcapping"),
        logit_softcap=a.logit_softcap and _has_cap(config, "final_logit_softcapping"),
        vocab=vocab,
        embedding=whole("word_embed_proj_dim", 0),
        n_outside_norms=a.n_outside_norms * flag("do_layer_norm_before", default=True),
        hidden=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(reader, a, n_heads),
        head_dim=head_dim,
        ffn=expert_ffn or ffn,
        positions=positions + a.extra_positions if a.learned_positions and positions else 0,
        qkv_bias=flag("attention_bias", "use_qkv_bias", "bias", default=a.qkv_bias),
        out_bias=flag("attention_bias", "bias", default=a.out_bias),
        mlp_bias=flag("mlp_bias", "bias", default=a.mlp_bias),
        head_bias=a.head_bias or is_masked,
        n_segments=whole("type_vocab_size", 0) if a.is_encoder else 0,
        n_experts=n_experts,
        qk_norm=flag("use_qk_norm", "qk_layernorm", default=a.qk_norm),
        shared_ffn=shared_ffn if a.is_mixture else 0,
        n_dense_layers=min(n_layers, whole("first_k_dense_replace", 0)) if a.is_mixture else 0,
        dense_ffn=ffn,
        pooler=a.pooler and not is_masked,
        head_transform=is_masked,
        **latent,
    )
    window, n_sliding = _windows(reader, a, n_layers)
    return ModelShape(
        **shared(d, LayerSizes),
        name=kind,
        source=reader.name,
        parameters=tuple(parameters_of(d)),
        max_positions=positions,
        experts_per_token=min(n_experts, whole("num_experts_per_tok", 2)),
        upcasts_logits=not is_masked,
        has_lm_head=has_head,
        may_have_head=not (has_head or classes),
        hidden_dropout=reader.share(_DROPOUTS, a.dropout),
        attention_dropout=reader.share(
            _ATTENTION_DROPOUTS, a.dropout if a.attention_dropout is None else a.attention_dropout
        ),
        kv_elements=d.kv_latent + d.rope_dim if latent else 0,
        sliding_window=window,
        n_sliding_layers=n_sliding,
        assumptions=notes,
    )


def _latent(reader: ConfigReader) -> dict[str, Any]:
    """Return the widths of latent attention if the file has them."""
    if not reader.config.get("kv_lora_rank"):
        return {}
    return {
        "kv_latent": reader.whole("kv_lora_rank"),
        "q_latent": reader.whole("q_lora_rank", 0),
        "rope_dim": reader.whole("qk_rope_head_dim", 64),
        "nope_dim": reader.whole("qk_nope_head_dim", 128),
        "value_dim": reader.whole("v_head_dim", 128),
    }


def _windows(reader: ConfigReader, a: Architecture, n_layers: int) -> tuple[int, int]:
    """Return the window of local attention and the number of layers that use it."""
    window = reader.whole("sliding_window", 0)
    if not window or not reader.first("use_sliding_window", default=True):
        return 0, 0
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return window, min(n_layers, sum(kind == "sliding_attention" for kind in kinds))
    every = reader.whole("sliding_window_pattern", a.global_every) or a.global_every
    return window, n_layers - n_layers // every if every else n_layers


def _has_cap(config: Config, key: str) -> bool:
    """Return whether a cap is set; the class sets one unless the file says otherwise."""
    return key not in config or bool(config[key])


def _kv_heads(reader: ConfigReader, a: Architecture, n_heads: int) -> int:
    if a.multi_query and reader.first("multi_query", default=True):
        return 1
    value = reader.whole("n_kv_heads", n_heads)
    if value > n_heads or n_heads % value:
        raise InputError(
            f"{reader.name}: {n_heads} heads cannot share {value} key-value heads.",
            hint="Check num_key_value_heads.",
        )
    return value
