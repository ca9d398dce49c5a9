"""Well-known models: the counts that are published, names people write, and what is not covered."""

from __future__ import annotations

import pytest

from fragdoctor.errors import InputError
from fragdoctor.estimation.config_json import UncoveredModelError, shape_of_config
from fragdoctor.estimation.layer import adapted
from fragdoctor.estimation.model_shapes import Preset, known_models, model_of, preset_of, presets
from fragdoctor.estimation.request import workload_of


def is_covered(preset: Preset) -> bool:
    try:
        shape_of_config(preset.config, preset.name)
    except UncoveredModelError:
        return False
    return True


COVERED = [preset for preset in presets().values() if is_covered(preset)]


@pytest.mark.parametrize("preset", COVERED, ids=lambda preset: preset.name)
def test_parameters_are_those_that_are_published(preset: Preset) -> None:
    counted = shape_of_config(preset.config, preset.name).n_parameters

    assert abs(counted - preset.n_parameters) <= 0.005 * preset.n_parameters


def test_most_of_the_known_models_are_covered() -> None:
    assert len(COVERED) >= 65


def test_there_are_many_and_each_is_named_once() -> None:
    names = [model.name for model in known_models()]

    assert len(names) >= 50
    assert len({model.hub for model in known_models()}) == len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b"]
)
def test_model_is_found_by_name_and_by_repository(name: str) -> None:
    found = preset_of(name)

    assert found is not None
    assert found.name == "llama-3.1-8b"
    assert model_of([name]).dtype == "bf16"


def test_unknown_repository_prints_the_command_that_fetches_its_configuration() -> None:
    with pytest.raises(InputError) as caught:
        model_of(["somebody/some-model"])

    assert "hf download somebody/some-model config.json" in caught.value.hint


def test_near_miss_of_a_name_is_suggested() -> None:
    with pytest.raises(InputError) as caught:
        model_of(["lama-3-8b"])

    assert "llama-3-8b" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"_class_name": "ControlNetModel", "block_out_channels": [320]}, "ControlNetModel"),
        ({"model_type": "swin", "hidden_size": 768}, "swin"),
        ({"model_type": "siglip", "vision_config": {"hidden_size": 768}}, "siglip"),
        ({"model_type": "unheard", "architectures": ["UnheardForMaskedLM"]}, "unheard"),
        ({"_class_name": "FluxTransformer2DModel"}, "FluxTransformer2DModel"),
        ({"model_type": "jamba", "hidden_size": 4096}, "jamba"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"hidden_size": 64, "num_hidden_layers": 2}, "without a type"),
    ],
)
def test_what_is_not_covered_is_named(config: dict[str, object], word: str) -> None:
    with pytest.raises(InputError) as caught:
        shape_of_config(config, "config.json")

    assert word in caught.value.message
    assert "--model" in caught.value.hint


@pytest.mark.parametrize("target", ["qkv_proj", "W_pack", "wqkv", "query_key_value"])
def test_fused_matrices_are_targets_by_their_names(target: str) -> None:
    fused = workload_of(["phi-3-mini"], lora_rank=8, lora_targets=target)

    assert ["attention.qkv.weight"] == [group.name for group in adapted(fused)]
