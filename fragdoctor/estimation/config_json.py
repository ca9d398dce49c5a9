"""Reads the shape of a model from a Hugging Face ``config.json``.

A table says for each architecture under which keys its dimensions stand and how its layers are
built; parameter counts then equal the published ones. Values come from strangers: each is checked
for type and size before anything is computed from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import InputError, LimitExceeded
from fragdoctor.estimation.architectures import (
    ARCHITECTURES,
    EXPERT_KEYS,
    UNMEASURED,
    Architecture,
    generic,
    outside,
    parameters_of,
)
from fragdoctor.estimation.families import refuse_uncovered, refuse_unknown
from fragdoctor.model.workload import (
    LayerSizes,
    ModelShape,
    ParameterGroup,
    Role,
    shared,
)
from fragdoctor.opening import open_readable
from fragdoctor.units import MIB

MAX_CONFIG_BYTES: Final = 16 * MIB
MAX_DIMENSION: Final = 2**31
MAX_LAYERS: Final = 10_000

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
    "head_dim": ("head_dim", "d_kv"),
}
ONLY_LANGUAGE: Final = "Only the language model of this multimodal configuration is counted."
_ACTIVATION_KEYS: Final = (
    "hidden_act",
    "activation_function",
    "hidden_activation",
    "dense_act_fn",
    "activation",
)


def read_config(path: Path) -> Config:
    """Return the object in a configuration file.

    Raises:
        InputError: unreadable, not JSON, or not an object.
        LimitExceeded: larger than any genuine configuration.
    """
    return parse_config(read_bounded(path, MAX_CONFIG_BYTES), str(path))


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return what a configuration file holds; the limit is in whole MiB.

    Raises:
        InputError: unreadable.
        LimitExceeded: larger than any genuine configuration.
    """
    try:
        with BufferedReader(open_readable(path)) as file:
            data = file.read(limit_bytes + 1)
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}.") from e
    if len(data) > limit_bytes:
        raise LimitExceeded(
            f"{path} is larger than any genuine configuration ({limit_bytes // MIB} MiB)."
        )
    return data


def parse_config(data: bytes, name: str) -> Config:
    """Return the object that a configuration's text holds.

    Raises:
        InputError: not JSON, or not an object.
    """
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(
            f"{name} is not JSON.", hint="Give a Hugging Face config.json or a safetensors file."
        ) from e
    if not isinstance(config, dict):
        raise InputError(
            f"{name} is not a model configuration: it holds no object.",
            hint="Give a Hugging Face config.json.",
        )
    return config


def shape_of_config(config: Config, name: str) -> ModelShape:
    """Return the shape of the model that a configuration describes.

    Raises:
        InputError: keys are missing or have impossible values; the sentence names them.
    """
    refuse_uncovered(config, name)
    config, nested = _language_part(config)
    if not config.keys() & {"model_type", "_class_name"} and not any(
        k in config for keys in KEYS.values() for k in keys
    ):
        raise InputError(
            f"{name} is JSON, but no model configuration.", hint="Give a Hugging Face config.json."
        )
    kind = config.get("model_type")
    kind = kind.lower() if isinstance(kind, str) else ""
    architecture = ARCHITECTURES.get(kind)
    reader = ConfigReader(config, name, kind)
    notes = [nested] if nested else []
    if architecture is None:
        refuse_unknown(config, kind, name)
        architecture = generic(config)
        known = repr(kind)[:60] if kind else "none"
        notes.append(
            f"The architecture ({known}) is not known here: taken as "
            f"{'a Llama-like decoder' if architecture.is_gated else 'a GPT-like decoder'}"
            f"{' with a mixture of experts in each layer' if architecture.is_mixture else ''}."
        )
    is_checked = kind in ARCHITECTURES and kind not in UNMEASURED
    return replace(_shape(reader, architecture, tuple(notes)), is_checked=is_checked)


def _language_part(config: Config) -> tuple[Config, str]:
    inner = config.get("text_config")
    if isinstance(inner, dict) and not any(k in config for k in KEYS["hidden"]):
        return inner, ONLY_LANGUAGE
    if isinstance(config.get("vision_config"), dict) or isinstance(
        config.get("audio_config"), dict
    ):
        return config, ONLY_LANGUAGE
    return config, ""


class ConfigReader:
    """Gets checked values out of a configuration, and remembers which are missing."""

    def __init__(self, config: Config, name: str, kind: str) -> None:
        self.config, self.name, self.kind = config, name, kind
        self.missing: list[str] = []

    def whole(self, what: str, default: int | None = None, *, limit: int = MAX_DIMENSION) -> int:
        """Return a dimension by our name for it; 0 and noted where it is missing."""
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

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.config.get(key)
        return value if isinstance(value, bool) else default

    def text(self, keys: tuple[str, ...], default: str) -> str:
        """Return a string."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, str):
                return value
        return default

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
                hint="Formulas cover language models; trace any other with --model "
                "pkg.module:factory. Or add the key to the file.",
            )


def quantised_dtype(config: Config) -> tuple[str, str]:
    """Return our name for how the weights are quantised, and the method's; "" = they are not."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        stated = config.get("compression_config")
    if not isinstance(stated, dict):
        return "", ""
    method = stated.get("quant_method")
    method = method if isinstance(method, str) else "unknown method"
    bits = stated.get("bits", stated.get("w_bit"))
    if stated.get("load_in_4bit") is True or bits == 4 or "fp4" in method:
        return "mxfp4" if method == "mxfp4" else "int4", method
    if "fp8" in method or method == "fbgemm_fp8":
        return "fp8-weights", method
    if stated.get("load_in_8bit") is True or bits == 8:
        return "int8", method
    return "", method


def _shape(reader: ConfigReader, a: Architecture, notes: tuple[str, ...]) -> ModelShape:
    hidden = reader.whole("hidden")
    n_layers = reader.whole("n_layers", limit=MAX_LAYERS)
    n_heads = reader.whole("n_heads")
    vocab = reader.whole("vocab")
    ffn = reader.whole("ffn", a.ffn_factor * hidden if a.ffn_factor else None)
    reader.check()
    n_kv_heads = _kv_heads(reader, a, n_heads)
    head_dim = reader.whole("head_dim", max(1, hidden // n_heads))
    if _latent(reader, a):
        head_dim = reader.whole("qk_nope_head_dim", 128) + reader.whole("qk_rope_head_dim", 64)
    positions = reader.whole("positions", 0)
    experts = _experts(reader, a)
    tied = reader.flag("tie_word_embeddings", a.tied_head)
    is_masked = a.pooler and _is_masked_lm(reader.config)
    has_head = not a.has_no_head or _is_masked_lm(reader.config)
    if not has_head:
        notes = (*notes, "No language-model head is counted: a loss over a few classes.")
    bias = reader.flag
    d = replace(
        a,
        norms_per_layer=_norms(reader, a),
        tied_head=tied or a.has_no_head,
        activation=reader.text(_ACTIVATION_KEYS, a.activation),
        attention_softcap=a.attention_softcap and _has_cap(reader, "attn_logit_softcapping"),
        logit_softcap=a.logit_softcap and _has_cap(reader, "final_logit_softcapping"),
        shares_heads=a.shares_heads and not _is_new_falcon(reader),
        repeats_keys=a.shares_heads and _is_new_falcon(reader),
        adds_slopes=a.multi_query and reader.flag("alibi", default=False),
        parallel_residual=reader.flag(
            "use_parallel_residual", reader.flag("parallel_attn", a.parallel_residual)
        ),
        vocab=vocab,
        hidden=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=experts["ffn"] or ffn,
        positions=(positions + a.extra_positions) if a.learned_positions else 0,
        qkv_bias=bias("attention_bias", bias("use_qkv_bias", bias("bias", a.qkv_bias))),
        out_bias=bias("attention_bias", bias("bias", a.out_bias)),
        mlp_bias=bias("mlp_bias", bias("bias", a.mlp_bias)),
        head_bias=a.head_bias or is_masked,
        embedding_width=reader.whole("word_embed_proj_dim", 0) or 0,
        n_segments=reader.whole("type_vocab_size", 0) if a.has_segments else 0,
        n_outside_norms=(
            a.n_outside_norms if reader.flag("do_layer_norm_before", default=True) else 0
        ),
        n_experts=experts["n"],
        qk_norm=reader.flag("use_qk_norm", reader.flag("qk_layernorm", a.qk_norm)),
        n_shared_experts=1 if experts["shared_ffn"] else 0,
        shared_ffn=experts["shared_ffn"],
        shared_gate=bool(experts["shared_ffn"]) and not a.latent_attention,
        n_dense_layers=min(n_layers, experts["n_dense"]),
        dense_ffn=ffn,
        router_bias=reader.kind == "deepseek_v3",
        **_latent(reader, a),
        pooler=a.pooler and not is_masked,
        head_transform=is_masked,
    )
    window, n_sliding = _windows(reader, a, n_layers)
    return ModelShape(
        **shared(d, LayerSizes),
        name=reader.kind or "model",
        source=reader.name,
        parameters=(*parameters_of(d), *_classifier(reader, a, hidden)),
        max_positions=positions,
        experts_per_token=experts["active"],
        softmax_fp32=reader.kind not in ("gpt2", "gpt_oss"),
        upcasts_logits=not _is_masked_lm(reader.config),
        has_lm_head=has_head,
        hidden_dropout=reader.share(
            ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout", "resid_dropout",
             "residual_dropout"), a.dropout
        ),
        kv_elements=d.kv_latent + d.rope_dim if d.kv_latent else 0,
        latent_width=d.kv_latent + d.q_latent,
        sliding_window=window,
        n_sliding_layers=n_sliding,
        attention_dropout=reader.share(
            ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout"), a.dropout
        ),
        assumptions=notes,
    )  # fmt: skip


def _latent(reader: ConfigReader, a: Architecture) -> dict[str, Any]:
    """Return the widths of latent attention, where the file has them."""
    if not a.latent_attention or not reader.config.get("kv_lora_rank"):
        return {}
    return {
        "kv_latent": reader.whole("kv_lora_rank"),
        "q_latent": reader.whole("q_lora_rank", 0),
        "rope_dim": reader.whole("qk_rope_head_dim", 64),
        "nope_dim": reader.whole("qk_nope_head_dim", 128),
        "value_dim": reader.whole("v_head_dim", 128),
    }


def _windows(reader: ConfigReader, a: Architecture, n_layers: int) -> tuple[int, int]:
    """Return the window of local attention, and how many layers have it."""
    window = reader.whole("sliding_window", 0)
    if not window or not reader.flag("use_sliding_window", default=True):
        return 0, 0
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return window, min(n_layers, sum(kind == "sliding_attention" for kind in kinds))
    every = reader.whole("sliding_window_pattern", a.global_every) or a.global_every
    return window, n_layers - n_layers // every if every else n_layers


def _classifier(reader: ConfigReader, a: Architecture, hidden: int) -> list[ParameterGroup]:
    """Return the matrix to a few classes, and a square one before it, where the file names them."""
    names = reader.config.get("architectures")
    if not isinstance(names, list) or not any(str(n).endswith("Classification") for n in names):
        return []
    labels = reader.config.get("id2label")
    n = len(labels) if isinstance(labels, dict) and labels else reader.whole("num_labels", 2)
    sizes = [("before_classifier", hidden)] if a.has_classifier_head else []
    return [
        group
        for name, rows in (*sizes, ("classifier", n))
        for group in (outside(name, rows, hidden), outside(f"{name}.bias", rows, role=Role.BIAS))
    ]


def _has_cap(reader: ConfigReader, key: str) -> bool:
    """Return whether a cap is set; the class sets one where the file is silent."""
    return key not in reader.config or bool(reader.config[key])


def _kv_heads(reader: ConfigReader, a: Architecture, n_heads: int) -> int:
    if a.multi_query and reader.flag("multi_query", True) and not _is_new_falcon(reader):
        return 1
    value = reader.whole("n_kv_heads", n_heads)
    if value > n_heads or n_heads % value:
        raise InputError(
            f"{reader.name}: {n_heads} heads cannot share {value} key-value heads.",
            hint="Check num_key_value_heads.",
        )
    return value


def _is_new_falcon(reader: ConfigReader) -> bool:
    return reader.flag("new_decoder_architecture", default=False)


def _norms(reader: ConfigReader, a: Architecture) -> int:
    if a.multi_query and _is_new_falcon(reader):
        return 2
    if a.parallel_residual and a.multi_query and not reader.flag("parallel_attn", default=True):
        return 2
    return a.norms_per_layer


def _experts(reader: ConfigReader, a: Architecture) -> dict[str, int]:
    none = {"n": 0, "active": 0, "ffn": 0, "shared_ffn": 0, "n_dense": 0}
    if not a.is_mixture:
        return none
    n = 0
    for key in EXPERT_KEYS:
        n = n or reader.whole(key, 0)
    if not n:
        reader.missing.append("num_local_experts or num_experts")
        reader.check()
    return {
        "n": n,
        "active": min(n, reader.whole("num_experts_per_tok", 2)),
        "ffn": (ffn := reader.whole("moe_intermediate_size", 0)),
        "shared_ffn": reader.whole("shared_expert_intermediate_size", 0)
        or reader.whole("n_shared_experts", 0) * ffn,
        "n_dense": reader.whole("first_k_dense_replace", 0, limit=MAX_LAYERS),
    }


def _is_masked_lm(config: Config) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(n, str) and n.endswith("ForMaskedLM") for n in names
    )
