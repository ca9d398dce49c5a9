"""``fragdoctor estimate``: inputs that it must not misread, and errors that name their cause."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from command_line import Run

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 688, "vocab_size": 1000, "torch_dtype": "float16",
}  # fmt: skip


def config(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "fp8"}, "fp8-weights"),
        ({"quant_method": "aqlm"}, "fp16"),
        ("nonsense", "fp16"),
    ],
)
def test_quantised_checkpoint_is_counted_as_stored(
    run: Run, tmp_path: Path, quantised: object, dtype: str
) -> None:
    path = config(tmp_path, quantization_config=quantised)

    document = json.loads(run("estimate", path, "--inference", "--format", "json").out)

    assert document["workload"]["dtype"] == dtype


def test_training_of_a_quantised_checkpoint_says_what_is_counted(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})

    assert "fp32 weights are counted" in " ".join(run("estimate", path).out.split())
    assert "Counted: int4 base" in run("estimate", path, "--lora", "8").out


def test_experts_and_what_they_share_are_counted(run: Run, tmp_path: Path) -> None:
    experts = {"n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 128}
    path = config(tmp_path, model_type="deepseek_v3", **experts)

    document = json.loads(run("estimate", path, "--format", "json").out)

    per_layer = 17 * 3 * 256 * 128
    assert document["n_parameters"] == pytest.approx(
        4 * (per_layer + 4 * 256 * 256 + 16 * 256) + 2 * 1000 * 256, rel=0.01
    )


def test_unknown_architecture_says_how_the_engine_would_know_it(run: Run, tmp_path: Path) -> None:
    outcome = run("estimate", config(tmp_path, model_type="brand_new"))

    assert outcome.code == 2
    assert "'brand_new', which the formulas do not cover" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "within 7%"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "within 7%"),
    ],
)
def test_error_is_claimed_only_for_what_was_compared(
    run: Run, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    text = " ".join(run("estimate", config(tmp_path, **changes)).out.split())

    assert told in text


def test_weights_stand_for_the_configuration_beside_them(run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model-00001-of-00002.safetensors"
    weights.write_bytes(struct.pack("<Q", 2) + b"{}")

    alone = run("estimate", str(weights))
    config(tmp_path)

    assert alone.code == 2
    assert "config.json" in alone.err
    assert run("estimate", str(weights)).out == run("estimate", str(tmp_path)).out


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"[1, 2]"),
        ("config.json", b"[" * 100_000),
        ("model.safetensors", b"hello world, this is text"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]"),
    ],
)
def test_damaged_model_file_is_not_taken_for_a_message(
    run: Run, tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)

    outcome = run("estimate", str(tmp_path / name))

    assert outcome.code in {2, 3}
    assert "out-of-memory message" not in outcome.err
    assert "ends in .safetensors" not in outcome.err


def test_fallback_of_attention_in_fp32_is_told_and_can_be_denied(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, num_key_value_heads=2)

    words = ["estimate", path, "--seq", "1024", "--dtype", "fp32", "--format", "json"]
    said = run(*words)
    denied = run(*words, "--attention", "flash")

    assert "use --attention flash" in said.out
    assert "use --attention flash" not in denied.out
    peaks = [json.loads(outcome.out)["peak_allocated_bytes"] for outcome in (said, denied)]
    assert peaks[1] < peaks[0]


def test_fp8_checkpoint_is_counted_a_byte_a_weight(run: Run, tmp_path: Path) -> None:
    parameters = []
    for quantised in ({"quant_method": "fp8"}, None):
        path = config(tmp_path, quantization_config=quantised)
        words = ["estimate", path, "--inference", "--format", "json"]
        items = json.loads(run(*words).out)["items"]
        parameters.append({i["id"]: i["n_bytes"] for i in items}["parameters"])

    n_linear = 4 * (4 * 256 * 256 + 3 * 256 * 688)
    assert parameters[1] - parameters[0] == n_linear


@pytest.mark.parametrize(
    ("model", "targets", "adapted"),
    [("falcon-7b", "query_key_value", "qkv"), ("gpt2", "c_attn", "qkv"), ("gpt2", "q_proj", "qkv")],
)
def test_lora_targets_by_the_names_of_the_models_own_code(
    run: Run, model: str, targets: str, adapted: str
) -> None:
    def trained(names: str) -> int:
        out = run("estimate", model, "--lora", "8", "--lora-targets", names, "--format", "json").out
        return int(json.loads(out)["n_trainable"])

    assert trained(targets) == trained(adapted) > 0
