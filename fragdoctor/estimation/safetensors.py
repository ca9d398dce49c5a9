"""The header of safetensors files (never the data), and the model's shape that follows from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BufferedReader
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.errors import InputError, LimitExceeded, RefusedSnapshot, TruncatedSnapshot
from fragdoctor.frozen import frozen
from fragdoctor.inputs.classify import MAX_HEADER_BYTES
from fragdoctor.model.workload import ModelShape, Norm, ParameterGroup, Role
from fragdoctor.opening import open_readable
from fragdoctor.units import format_count

MAX_TENSORS: Final = 1_000_000
MAX_FILES: Final = 10_000
MAX_RANK: Final = 16
MAX_ELEMENTS: Final = 2**53

# Bits of an element.
DTYPE_BITS: Final = MappingProxyType(
    {
        "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
        "BF16": 16, "I16": 16, "U16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8,
        "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    }
)  # fmt: skip


@frozen
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def read_header(path: Path) -> list[TensorEntry]:
    """Return the tensors of one file.

    Raises:
        InputError: unreadable or not safetensors.
        TruncatedSnapshot: the file ends inside its header or data.
        RefusedSnapshot: an entry contradicts itself or the file.
        LimitExceeded: a header beyond the format's own limit.
    """
    try:
        size = path.stat().st_size
        with BufferedReader(open_readable(path)) as file:
            start = file.read(8)
            if len(start) < 8:
                raise _not(path)
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise LimitExceeded(
                    f"{path}: a header of {length} bytes is beyond the format's limit of 100 MB.",
                    hint="Check that the file is a safetensors file.",
                )
            if length > size - 8:
                raise TruncatedSnapshot(
                    f"{path} ends inside its header.", hint="Download the file again."
                )
            header = file.read(length)
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}.") from e
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as e:
        raise _not(path) from e
    if not isinstance(entries, dict):
        raise _not(path)
    if len(entries) > MAX_TENSORS:
        raise LimitExceeded(f"{path} lists {len(entries)} tensors; at most a million are read.")
    return [
        _entry(path, name, entry, size - 8 - length)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]


def _not(path: Path) -> InputError:
    return InputError(
        f"{path} is not a safetensors file.", hint="Download it again, or give its config.json."
    )


def _entry(path: Path, name: str, entry: Any, data_bytes: int) -> TensorEntry:
    if not isinstance(entry, dict):
        raise _refused(path, name, "is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _refused(path, name, "has no known dtype")
    dims, places = _whole_numbers(shape), _whole_numbers(offsets)
    if dims is None or len(dims) > MAX_RANK or prod(dims) > MAX_ELEMENTS:
        raise _refused(path, name, "has an impossible shape")
    if places is None or len(places) != 2:
        raise _refused(path, name, "has no offsets")
    begin, end = places
    if end - begin != (prod(dims) * DTYPE_BITS[dtype] + 7) // 8:
        raise _refused(path, name, "has a shape that contradicts its offsets")
    if end > data_bytes:
        raise TruncatedSnapshot(
            f"{path} ends before the data of its tensors.", hint="Download the file again."
        )
    return TensorEntry(name, dtype, dims)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
        return None
    return tuple(value)


def _refused(path: Path, name: str, why: str) -> RefusedSnapshot:
    return RefusedSnapshot(f"{path}: the entry {name[:80]!r} {why}; no genuine file has that.")


def read_index(path: Path) -> list[Path]:
    """Return the files that an index (``model.safetensors.index.json``) names, beside it.

    Raises:
        InputError: not an index, or it names files outside its directory.
    """
    from fragdoctor.estimation.config_json import read_config

    weights = read_config(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(
            f"{path} is no safetensors index: it lacks weight_map.",
            hint="Give the directory, or model.safetensors.index.json.",
        )
    names = {name for name in weights.values() if isinstance(name, str)}
    if len(names) > MAX_FILES:
        raise LimitExceeded(f"{path} names {len(names)} files.")
    wrong = [n for n in names if n in ("", ".", "..") or "/" in n or "\\" in n or "\0" in n]
    if wrong:
        raise RefusedSnapshot(f"{path} names a file outside its directory: {wrong[0][:80]!r}.")
    return [path.parent / name for name in sorted(names)]


def read_files(paths: Sequence[Path]) -> list[TensorEntry]:
    """Return the tensors of all files.

    Raises:
        InputError: as :func:`read_header`; a missing part of a sharded model is one too.
    """
    found: list[TensorEntry] = []
    for path in paths:
        if not path.is_file():
            raise InputError(
                f"{path} does not exist.", hint="A part of the sharded model is missing."
            )
        found += read_header(path)
    return found


_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|block)\.([0-9]{1,6})(?=\.)")
_EXPERT: Final = re.compile(r"\.experts\.([0-9]{1,6})(?=\.)")
# Words of a tensor's name -> where it works; the first that is found decides.
_SLOTS: Final = (
    ("norm1", ("input_layernorm", "ln_1", "ln1", "attention_norm", "self_attn_layer_norm")),
    ("norm2", ("post_attention_layernorm", "ln_2", "ln2", "ffn_norm", "final_layer_norm")),
    ("qkv", ("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query_key_value", "query", "key",
             "value", "wq", "wk", "wv", "Wqkv", "qkv_proj", "wqkv", "W_pack")),
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
    slot = slot_of_name(name) if layered else ""
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


def slot_of_name(name: str) -> str:
    """Return where in a layer a tensor of this name works, "" where the name does not say."""
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
    elif slot_of_name(entry.name) == "up":
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
        f"The names of the {format_count(len(entries))} tensors do not show which layer is which: "
        "activations are not estimated. Put config.json beside the file."
    )
