"""The documents' formulas: weights 1x, gradients 1x, Adam 2x, and what ZeRO divides."""

from __future__ import annotations

import pytest
from estimated_workloads import workload_of
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.formula import formula_footprint
from fragdoctor.estimation.training_choices import (
    OPTIMIZERS,
    PRECISIONS,
    dtype_bytes,
    optimizer_of,
    precision_of,
)
from fragdoctor.model.workload import Workload

BASE = workload_of(
    {"family": "gpt", "hidden": 1024, "layers": 4, "heads": 16, "vocab": 8192, "dtype": "fp32",
     "batch": 1, "seq": 64}
)  # fmt: skip
N = BASE.shape.n_parameters


def items(workload: Workload) -> dict[str, int]:
    return {item.id: item.n_bytes for item in formula_footprint(workload).items}


def near(value: int, expected: float) -> bool:
    return abs(value - expected) <= 0.001 * expected


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("amp-bf16", 4)])
def test_weights_once_gradients_once_adam_twice(dtype: str, size: int) -> None:
    found = items(replace(BASE, dtype=dtype))

    assert near(found["parameters"], N * size)
    assert near(found["gradients"], N * size)
    assert near(found["optimizer_states"], 2 * N * size)
    assert near(found["optimizer_temporaries"], N * size)


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [("sgd", 0), ("sgd-momentum", 4), ("adam", 8), ("rmsprop", 4), ("lion", 4), ("adamw-8bit", 2)],
)
def test_optimizer_states_per_parameter(optimizer: str, per_parameter: float) -> None:
    states = items(replace(BASE, optimizer=optimizer)).get("optimizer_states", 0)

    assert abs(states - N * per_parameter) <= 0.02 * N * max(per_parameter, 0.1)


def test_adafactor_keeps_a_row_and_a_column_a_matrix() -> None:
    states = items(replace(BASE, optimizer="adafactor"))["optimizer_states"]

    assert states < 0.01 * N * 4


def test_master_weights_add_four_bytes_and_fp32_states() -> None:
    found = items(replace(BASE, dtype="bf16", master_weights=True))

    assert near(found["parameters"], 2 * N)
    assert near(found["master_weights"], 4 * N)
    assert near(found["optimizer_states"], 8 * N)


def test_gradient_precision_is_its_own_choice() -> None:
    assert near(items(replace(BASE, dtype="bf16", grad_dtype="fp32"))["gradients"], 4 * N)


@pytest.mark.parametrize(
    ("stage", "states", "gradients", "weights"),
    [(0, 1, 1, 1), (1, 4, 1, 1), (2, 4, 4, 1), (3, 4, 4, 4)],
)
def test_each_zero_stage_divides_more(
    stage: int, states: int, gradients: int, weights: int
) -> None:
    found = items(replace(BASE, zero_stage=stage, world_size=4))

    assert near(found["optimizer_states"], 8 * N / states)
    assert near(found["gradients"], 4 * N / gradients)
    assert near(found["parameters"], 4 * N / weights)
    assert ("gathered_parameters" in found) == (stage == 3)
    assert ("buckets" in found) == (stage == 0)


def test_lora_trains_adapters_only() -> None:
    rank, hidden, layers = 8, 1024, 4
    footprint = formula_footprint(replace(BASE, dtype="bf16", lora_rank=rank))

    # Packed query, key and value, and the output projection.
    adapters = layers * (rank * (hidden + 3 * hidden) + rank * 2 * hidden)
    assert footprint.n_trainable == adapters
    assert near({i.id: i.n_bytes for i in footprint.items}["gradients"], 4 * adapters)


def test_accumulation_keeps_gradients_through_the_forward_pass() -> None:
    once = formula_footprint(BASE).phases[0].n_bytes
    twice = formula_footprint(replace(BASE, grad_accumulation=2)).phases[0].n_bytes

    assert near(twice - once, 4 * N)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_has_a_source(name: str) -> None:
    assert optimizer_of(name.upper()).source


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_is_found_by_its_name(name: str) -> None:
    assert precision_of(name.replace("-", "_")).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("adamw_torch_fused", "adamw-fused"),
        ("adamw_bnb_8bit", "adamw-8bit"),
        ("paged_adamw_32bit", "paged-adamw"),
        ("bitsandbytes.optim.PagedAdamW8bit", "paged-adamw-8bit"),
        ("torchao.optim.AdamW4bit", "adamw-4bit"),
        ("torch.optim.SGD", "sgd"),
        ("FusedAdam", "adamw-fused"),
    ],
)
def test_optimizer_is_known_by_the_spellings_of_libraries(written: str, name: str) -> None:
    assert optimizer_of(written).name == name


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="optimizer") as optimizer:
        optimizer_of("magic")
    with pytest.raises(ConfigError, match="precision") as precision:
        precision_of("fp7")
    with pytest.raises(ConfigError, match="dtype"):
        dtype_bytes("amp-bf16")

    assert "adamw-8bit" in optimizer.value.hint
    assert "amp-bf16" in precision.value.hint


LORA = replace(
    workload_of(
        {"family": "llama", "hidden": 1024, "layers": 4, "heads": 16, "ffn": 4096, "vocab": 8192,
         "dtype": "bf16", "batch": 1, "seq": 512}
    ), lora_rank=8,
)  # fmt: skip


def test_nf4_without_double_quantisation_stores_a_wider_scale_for_each_block() -> None:
    double, plain = (items(replace(LORA, dtype=d))["parameters"] for d in ("int4", "nf4"))
    n_linear = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)

    saved = n_linear * (32 - 8 - 32 / 256) / 64 / 8
    assert plain - double == pytest.approx(saved, rel=0.01)


def test_bitsandbytes_before_0_43_2_kept_the_inputs_of_frozen_layers() -> None:
    now, then = (items(replace(LORA, dtype=d))["activations"] for d in ("int4", "int4-0.42"))

    # Of both norms, of attention, and of the feed-forward's way out, in 16 bits.
    assert then - now == 4 * 512 * 2 * (1024 + 1024 + 1024 + 4096)


def test_preparation_for_kbit_training_widens_what_is_not_quantised() -> None:
    plain, prepared = (items(replace(LORA, dtype=d))["parameters"] for d in ("int4", "int4-peft"))
    rest = 2 * 8192 * 1024 + 4 * 2 * 1024 + 1024

    assert prepared - plain == pytest.approx(2 * rest, rel=0.001)
