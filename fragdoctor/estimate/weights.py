"""From the tensors of safetensors files to a model's shape: exact counts, dimensions from names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fragdoctor.estimate.safetensors import TensorEntry
from fragdoctor.model.workload import ModelShape, Norm, ParameterGroup, Role
from fragdoctor.units import format_count

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|block)\.([0-9]{1,6})(?=\.)")
_EXPERT: Final = re.compile(r"\.experts\.([0-9]{1,6})(?=\.)")
# Words of a tensor's name -> where it works; the first that is found decides.
_SLOTS: Final = (
    ("norm1", ("input_layernorm", "ln_1", "ln1", "attention_norm", "self_attn_layer_norm")),
    ("norm2", ("post_attention_layernorm", "ln_2", "ln2", "ffn_norm", "final_layer_norm")),
    ("qkv", ("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query_key_value", "query", "key",
             "value", "wq", "wk", "wv", "Wqkv")),
    ("out", ("o_proj", "out_proj", "wo", "attn.c_proj", "attention.dense", "proj")),
    ("down", ("down_proj", "fc2", "w2", "mlp.c_proj", "dense_4h_to_h", "fc_out")),
    ("up", ("gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3", "c_fc", "dense_h_to_4h",
            "fc_in")),
    ("router", ("gate", "router")),
)  # fmt: skip
_EMBEDDINGS: Final = ("embed", "wte", "wpe", "tok", "pos", "position_embedding")
_HEADS: Final = ("lm_head", "embed_out", "output.weight", "head.weight")
_GATES: Final = ("gate_proj", "gate_up_proj", "w3", "w1")
_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F32": "fp32",
        "BF16": "bf16",
        "F16": "fp16",
        "F8_E4M3": "fp8-weights",
        "F8_E5M2": "fp8-weights",
    }
)


def shape_of_tensors(entries: Sequence[TensorEntry], source: str) -> ModelShape:
    """Return what the tensors alone say; dimensions that names do not give are left 0."""
    groups = groups_of(entries)
    facts = _dimensions(entries)
    n_layers = facts["layers"]
    shape = ModelShape(
        name="safetensors", source=source, parameters=tuple(groups),
        vocab=facts["vocab"], n_layers=n_layers,
    )  # fmt: skip
    known = n_layers and facts["hidden"] and facts["query"]
    if not known:
        return replace(shape, n_layers=0, assumptions=(_unknown_layers(entries),))
    head_dim = _head_dim(facts)
    return replace(
        shape,
        hidden=facts["hidden"],
        head_dim=head_dim,
        n_heads=max(1, facts["query"] // head_dim),
        n_kv_heads=max(1, (facts["key"] or facts["query"]) // head_dim),
        ffn=facts["ffn"] or 4 * facts["hidden"],
        is_gated=bool(facts["gated"]),
        activation="silu" if facts["gated"] else "gelu",
        norm=Norm.RMSNORM_WRITTEN_OUT if facts["gated"] else Norm.LAYERNORM,
        has_rotary=bool(facts["gated"]),
        n_experts=facts["experts"],
        experts_per_token=min(2, facts["experts"]),
        tied_head=not facts["head"],
        assumptions=(_named(head_dim),),
    )


def _named(head_dim: int) -> str:
    return (
        f"Dimensions come from tensor names and shapes; a head size of {head_dim} is assumed. "
        "Put config.json beside the file for the rest."
    )


def with_exact_counts(shape: ModelShape, entries: Sequence[TensorEntry], source: str) -> ModelShape:
    """Return a configuration's shape with the parameter groups that the files really hold."""
    counted = sum(e.n_elements for e in entries)
    stated = shape.n_parameters
    notes = list(shape.assumptions)
    if counted != stated:
        notes.append(
            f"The files hold {format_count(counted)} elements, the configuration makes "
            f"{format_count(stated)} parameters: the files count."
        )
        return replace(shape, parameters=tuple(groups_of(entries)), source=source,
                       assumptions=tuple(notes))  # fmt: skip
    return replace(shape, source=source)


def stored_dtype(entries: Sequence[TensorEntry]) -> str:
    """Return the dtype that most of the elements have, by our name for it; "" = none of ours."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.n_elements
    if not sizes:
        return ""
    return _DTYPES.get(sizes.most_common(1)[0][0], "")


def groups_of(entries: Sequence[TensorEntry]) -> list[ParameterGroup]:
    """Return equal tensors of all layers as groups."""
    counts: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for entry in entries:
        name = _EXPERT.sub(".experts.*", _LAYER.sub(".*", entry.name))
        counts[(name, entry.shape, entry.dtype)] += 1
    return [
        _group(name, shape, dtype, count)
        for (name, shape, dtype), count in counts.items()
        if count and all(shape)
    ]


def _group(name: str, shape: tuple[int, ...], dtype: str, count: int) -> ParameterGroup:
    layered = ".*" in name or name.startswith("*")
    slot = _slot(name) if layered else ""
    role = _role(name, shape, layered=layered)
    if role is Role.EMBEDDING and any(w in name for w in ("wte", "tok", "word_emb", "embed_in")):
        name = "embedding.tokens"
    return ParameterGroup(name, shape, count, role, layered, dtype=dtype, slot=slot)


def _role(name: str, shape: tuple[int, ...], *, layered: bool) -> Role:
    if not layered:
        if any(word in name for word in _HEADS) and len(shape) == 2:
            return Role.HEAD
        if any(word in name for word in _EMBEDDINGS):
            return Role.EMBEDDING
    if "norm" in name or "ln_" in name or re.search(r"\bln[0-9]?\b", name):
        return Role.NORM
    if ".experts.*" in name and len(shape) >= 2:
        return Role.EXPERT
    if len(shape) == 2 and layered:
        return Role.LINEAR
    return Role.BIAS if name.endswith("bias") else Role.OTHER


def _slot(name: str) -> str:
    words = set(name.split("."))
    for slot, options in _SLOTS:
        if any((o in name) if "." in o else (o in words) for o in options):
            return slot
    return "norm1" if "norm" in name else ""


def _dimensions(entries: Sequence[TensorEntry]) -> dict[str, int]:
    facts = dict.fromkeys(
        ("layers", "vocab", "hidden", "query", "key", "ffn", "gated", "experts", "head"), 0
    )
    layers: set[int] = set()
    experts: set[int] = set()
    for entry in entries:
        layer = _LAYER.search(entry.name)
        if layer:
            layers.add(int(layer.group(1)))
            expert = _EXPERT.search(entry.name)
            if expert:
                experts.add(int(expert.group(1)))
            if len(entry.shape) == 2:
                _look_at_matrix(entry, facts)
        elif len(entry.shape) == 2:
            _look_outside(entry, facts)
    facts["layers"], facts["experts"] = len(layers), len(experts)
    return facts


def _look_at_matrix(entry: TensorEntry, facts: dict[str, int]) -> None:
    rows, columns = entry.shape
    words = set(entry.name.split("."))
    if words & {"q_proj", "wq", "query"}:
        facts["query"], facts["hidden"] = rows, columns
    elif words & {"k_proj", "wk", "key"}:
        facts["key"] = rows
    elif words & {"c_attn"}:  # Conv1D: inputs first
        facts["hidden"], facts["query"] = rows, rows
    elif words & {"qkv", "query_key_value", "Wqkv", "qkv_proj"}:
        facts["hidden"], facts["query"] = columns, columns
    elif _slot(entry.name) == "up":
        conv = "c_fc" in words
        facts["ffn"] = columns if conv else rows
        if words & set(_GATES):
            facts["gated"] = 1


def _look_outside(entry: TensorEntry, facts: dict[str, int]) -> None:
    if any(word in entry.name for word in _HEADS):
        facts["head"] = 1
        facts["vocab"] = max(facts["vocab"], entry.shape[0])
        return
    is_position = "pos" in entry.name or "wpe" in entry.name
    if not is_position and any(word in entry.name for word in _EMBEDDINGS):
        facts["vocab"] = max(facts["vocab"], entry.shape[0])


def _head_dim(facts: Mapping[str, int]) -> int:
    for guess in (128, 64, 80, 96, 256, 32) if facts["hidden"] >= 2048 else (64, 128, 80, 96, 32):
        if facts["query"] % guess == 0 and (facts["key"] or guess) % guess == 0:
            return guess
    return facts["query"]


def _unknown_layers(entries: Sequence[TensorEntry]) -> str:
    return (
        f"The names of the {format_count(len(entries))} tensors do not tell the layers apart: "
        "activations are not estimated. Put config.json beside the file."
    )
