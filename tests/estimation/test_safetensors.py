"""Headers of safetensors files: genuine, cut short, and hostile."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import (
    FragdoctorError,
    InputError,
    LimitExceeded,
    RefusedSnapshot,
    TruncatedSnapshot,
)
from fragdoctor.estimation.model_shapes import model_of
from fragdoctor.estimation.safetensors import read_header, read_index

LAYERS = 3
HIDDEN, HEADS, KV, FFN, VOCAB = 64, 4, 2, 160, 500
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "intermediate_size": FFN,
    "vocab_size": VOCAB,
}  # fmt: skip


def entries(dtype: str = "BF16") -> dict[str, dict[str, Any]]:
    """Return the header of a small Llama."""
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCAB, HIDDEN],
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.q_proj.weight"] = [HIDDEN, HIDDEN]
        shapes[f"{layer}.self_attn.k_proj.weight"] = [HIDDEN * KV // HEADS, HIDDEN]
        shapes[f"{layer}.self_attn.v_proj.weight"] = [HIDDEN * KV // HEADS, HIDDEN]
        shapes[f"{layer}.self_attn.o_proj.weight"] = [HIDDEN, HIDDEN]
        shapes[f"{layer}.mlp.gate_proj.weight"] = [FFN, HIDDEN]
        shapes[f"{layer}.mlp.up_proj.weight"] = [FFN, HIDDEN]
        shapes[f"{layer}.mlp.down_proj.weight"] = [HIDDEN, FFN]
        shapes[f"{layer}.input_layernorm.weight"] = [HIDDEN]
        shapes[f"{layer}.post_attention_layernorm.weight"] = [HIDDEN]
    size, at = 2 if dtype == "BF16" else 4, 0
    header: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        n = size
        for d in shape:
            n *= d
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    return header


def n_elements() -> int:
    return sum(e["data_offsets"][1] - e["data_offsets"][0] for e in entries().values()) // 2


def write(path: Path, header: dict[str, Any], *, data: int | None = None) -> Path:
    """Write a file with this header; its data is a hole in the file."""
    text = json.dumps(header).encode()
    if data is None:
        ends = [e["data_offsets"][1] for e in header.values() if "data_offsets" in e]
        data = max(ends, default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data)
    return path


def test_tensors_are_listed_without_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, **entries()})

    found = read_header(path)

    assert [e.name for e in found] == list(entries())
    assert sum(e.n_elements for e in found) == n_elements()


def test_tensors_alone_are_counted_without_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", entries())

    found = model_of([str(path)])

    shape = found.shape
    assert found.dtype == "bf16"
    assert not shape.has_layers
    assert shape.n_parameters == n_elements()
    assert "config.json beside" in shape.assumptions[0]


def test_sharded_directory_with_configuration_counts_what_the_files_hold(tmp_path: Path) -> None:
    header = entries("F32")
    names = list(header)
    halves = ({n: header[n] for n in names[:9]}, {n: header[n] for n in names[9:]})
    weight_map = {}
    for i, half in enumerate(halves):
        write(tmp_path / f"part-{i}.safetensors", half)
        weight_map |= dict.fromkeys(half, f"part-{i}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    by_directory = model_of([str(tmp_path)])
    by_index = model_of([str(tmp_path / "model.safetensors.index.json")])

    assert by_directory.dtype == by_index.dtype == "fp32"
    assert by_directory.shape.n_heads == by_index.shape.n_heads == HEADS
    assert by_directory.shape.n_parameters == n_elements()


def test_configuration_that_disagrees_with_the_files_is_said(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", entries())
    config = CONFIG | {"num_hidden_layers": LAYERS + 1}
    (tmp_path / "config.json").write_text(json.dumps(config))

    shape = model_of([str(tmp_path)]).shape

    assert shape.n_parameters > n_elements()
    assert any("the larger number is used" in note for note in shape.assumptions)


def test_what_the_files_hold_beyond_the_configuration_is_counted(tmp_path: Path) -> None:
    more = {"vision.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128000]}}
    write(tmp_path / "model.safetensors", {**entries(), **more})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    assert model_of([str(tmp_path)]).shape.n_parameters == n_elements() + 64_000


def test_missing_part_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "part-7.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(InputError, match=r"part-7\.safetensors does not exist"):
        model_of([str(tmp_path)])


def test_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    path.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))

    with pytest.raises(RefusedSnapshot):
        read_index(path)


def test_length_beyond_the_file_is_truncation(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((5000).to_bytes(8, "little") + b'{"a"')

    with pytest.raises(TruncatedSnapshot):
        read_header(path)


def test_length_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")

    with pytest.raises(LimitExceeded):
        read_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "abc", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 400, "data_offsets": [0, 4]},
    ],
)
def test_entry_that_contradicts_itself_is_refused(tmp_path: Path, entry: object) -> None:
    path = write(tmp_path / "m.safetensors", {"a": entry}, data=4)

    with pytest.raises(RefusedSnapshot, match="no genuine file"):
        read_header(path)


def test_data_beyond_the_file_is_truncation(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", entries(), data=100)

    with pytest.raises(TruncatedSnapshot):
        read_header(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_tensors_or_a_sentence(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    path.write_bytes(data)

    with contextlib.suppress(FragdoctorError):
        found = read_header(path)
        assert data[8:].lstrip().startswith(b"{")
        assert all(e.n_elements >= 0 for e in found)
