"""UNets from their configuration; their steps are among those of ``trained_steps.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.estimation.config_json import shape_of_config
from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.model_shapes import presets
from fragdoctor.estimation.states import check_parallel
from fragdoctor.model.workload import ModelShape, Workload

SMALL: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel", "sample_size": 32, "block_out_channels": [64, 128],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 64,
}  # fmt: skip


def shape(**changes: object) -> ModelShape:
    return shape_of_config({**SMALL, **changes}, "config.json")


def of(**options: Any) -> Workload:
    return Workload(shape(), **{"batch": 4, "seq": 77, **options})


@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [
        ("stable-diffusion-1.5", 859_520_964),
        ("stable-diffusion-2.1", 865_910_724),
        ("stable-diffusion-xl", 2_567_463_684),
    ],
)
def test_parameters_are_those_that_the_library_builds(name: str, n_parameters: int) -> None:
    assert shape_of_config(presets()[name].config, name).n_parameters == n_parameters


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resnet_time_scale_shift", "scale_shift"),
        ("down_block_types", ["SimpleCrossAttnDownBlock2D", "DownBlock2D"]),
        ("up_block_types", ["UpBlock2D"]),
        ("layers_per_block", [1, 2, 3]),
        ("layers_per_block", -1),
        ("block_out_channels", [64, 100]),
        ("sample_size", None),
        ("sample_size", True),
        ("mid_block_type", ["x"]),
        ("class_embed_type", "timestep"),
    ],
)
def test_what_is_not_covered_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        shape(**{key: value})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp-bf16"])
def test_needs_grow_with_the_batch(dtype: str) -> None:
    bounds = [formula_needs(of(dtype=dtype, batch=n)) for n in (1, 2, 3, 8, 64)]

    assert [b.low_bytes for b in bounds] == sorted(b.low_bytes for b in bounds)
    assert [b.high_bytes or 0 for b in bounds] == sorted(b.high_bytes or 0 for b in bounds)


def test_each_measure_needs_less() -> None:
    whole = of(batch=32)
    less = [
        replace(whole, checkpointing="full"),
        replace(whole, dtype="amp-bf16"),
        replace(whole, lora_rank=8),
        replace(whole, inference=True),
    ]

    peak = formula_footprint(whole).peak_allocated_bytes
    assert all(formula_footprint(w).peak_allocated_bytes < peak for w in less)


def test_layers_cannot_be_checkpointed_in_groups() -> None:
    with pytest.raises(ConfigError, match="UNet"):
        formula_footprint(of(checkpointing="2"))


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel"):
        check_parallel(of(tensor_parallel=2))
