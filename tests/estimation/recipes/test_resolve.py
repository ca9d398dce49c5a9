"""What several entries, or several files, say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.estimation.recipes.entries import Format, flat, read
from fragdoctor.estimation.recipes.question import FORMATS, reading_of
from fragdoctor.estimation.recipes.resolve import resolve
from fragdoctor.model.recipe import Bearing, Recipe

SFT = {"model_name_or_path": "llama-3.1-8b", "per_device_train_batch_size": 2, "max_length": 512}
ANYTHING = frozenset(
    {"model", "dtype", "zero", "fsdp", "world_size", "offload", "lora", "lora_targets", "optimizer",
     "batch", "seq", "attention", "checkpointing", "grad_accumulation", "tensor_parallel",
     "context_parallel", "inference", "gpu_memory_utilization"}
)  # fmt: skip


class Resolved(NamedTuple):
    options: Mapping[str, Any]
    files: Sequence[Recipe]
    notes: Sequence[str]


def resolved(*files: dict[str, Any], given: dict[str, Any] | None = None) -> Resolved:
    readings = [reading_of(entries, f"file{i}") for i, entries in enumerate(files)]
    return Resolved(*resolve(readings, given or {}, ANYTHING))


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({"torch_dtype": "float32", "bf16": True}, "amp-bf16"),
        ({"torch_dtype": "bfloat16", "bf16": True}, "bf16"),
        ({"torch_dtype": "float32", "bf16": False, "fp16": False}, "fp32"),
        ({"torch_dtype": "float32", "fp16": True}, "amp-fp16"),
        ({"torch_dtype": "bfloat16", "use_peft": True}, "bf16"),
        ({"torch_dtype": "float32", "bf16": True, "use_peft": True}, "amp-bf16"),
        ({"torch_dtype": "auto", "bf16": True}, "bf16"),  # as the checkpoint of Llama 3.1 is
        ({"load_in_4bit": True, "use_peft": True, "bf16": True}, "nf4"),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True, "use_peft": True}, "int4"),
        ({"stage": "sft", "template": "x", "quantization_bit": 4}, "int4"),
        (
            {"stage": "sft", "template": "x", "quantization_bit": 4, "double_quantization": False},
            "nf4",
        ),
        ({"load_in_8bit": True, "use_peft": True, "bf16": True}, "int8"),
    ],
)
def test_precision_follows_from_weights_autocast_and_quantisation(
    entries: dict[str, Any], dtype: str
) -> None:
    assert dtype == resolved({**SFT, **entries}).options["dtype"]


@pytest.mark.parametrize(
    ("launch", "dtype", "sharing"),
    [
        (
            {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16",
             "deepspeed_config": {"zero_stage": 2}},
            "deepspeed-bf16",
            {"zero": 2, "world_size": 8},
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
             "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
            "fsdp-bf16",
            {"fsdp": True, "world_size": 8},
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
             "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            "amp-bf16",
            {"zero": 2, "world_size": 8},
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2,
             "mixed_precision": "bf16",
             "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
            "fsdp-bf16",
            {"fsdp": True, "world_size": 8},
        ),
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16",
             "fsdp_config": {}, "deepspeed_config": {}},
            "amp-bf16",
            {"world_size": 4},
        ),
        ({"distributed_type": "NO", "mixed_precision": "bf16"}, "amp-bf16", {}),
    ],
)  # fmt: skip
def test_launch_file_says_how_states_are_shared(
    launch: dict[str, Any], dtype: str, sharing: dict[str, Any]
) -> None:
    found = resolved({**SFT, "torch_dtype": "float32"}, launch)

    assert dtype == found.options["dtype"]
    assert sharing == {
        name: found.options[name]
        for name in ("zero", "fsdp", "world_size")
        if name in found.options
    }


def test_sharing_without_a_number_of_gpus_is_counted_on_one_and_said() -> None:
    found = resolved(SFT, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})

    assert not found.options.keys() & {"zero", "world_size"}
    assert "deepspeed-bf16" == found.options["dtype"]
    assert any("--world-size N" in note for note in found.notes)


def test_number_of_gpus_on_the_command_line_is_enough() -> None:
    deepspeed = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}

    found = resolved(SFT, deepspeed, given={"world_size": 8})

    assert 3 == found.options["zero"]
    assert not any("--world-size N" in note for note in found.notes)


def test_gpus_that_split_the_model_share_no_states() -> None:
    launch = {
        "distributed_type": "FSDP",
        "num_processes": 16,
        "parallelism_config": {"parallelism_config_tp_size": 4},
    }

    found = resolved(SFT, launch)

    assert (4, 4) == (found.options["tensor_parallel"], found.options["world_size"])


def test_weights_go_to_the_host_from_one_gpu_as_from_several() -> None:
    offload = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    }
    deepspeed = {"zero_optimization": offload}

    alone = resolved(SFT, deepspeed)
    shared = resolved(SFT, deepspeed, given={"world_size": 8})

    assert "optimizer,parameters" == alone.options["offload"] == shared.options["offload"]
    assert (3, 3) == (alone.options["zero"], shared.options["zero"])


def test_command_line_wins_and_the_entry_says_so() -> None:
    found = resolved(SFT, given={"batch": "8"})

    assert "batch" not in found.options
    (entry,) = [e for e in found.files[0].used if e.key == "per_device_train_batch_size"]
    assert ("", "--batch 8") == (entry.option, entry.overridden_by)


def test_trainer_wins_over_the_launch_file_and_the_loser_is_named() -> None:
    launch = {"compute_environment": "LOCAL_MACHINE", "gradient_accumulation_steps": 2}

    found = resolved({**SFT, "gradient_accumulation_steps": 4}, launch)

    assert 4 == found.options["grad_accumulation"]
    (loser,) = found.files[1].unused_that(Bearing.MATTERS)
    assert "gradient_accumulation_steps of file0 was used" == loser.reason


def test_two_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="describe two runs"):
        resolved(SFT, SFT)


def test_optimizer_that_is_not_known_is_refused_unless_named_on_the_command_line() -> None:
    entries = {**SFT, "optim": "apollo_adamw"}

    with pytest.raises(ConfigError, match="optim 'apollo_adamw' is not a known optimizer"):
        resolved(entries)
    found = resolved(entries, given={"optimizer": "adamw"})

    assert "optim" in [entry.key for entry in found.files[0].unused_that(Bearing.MATTERS)]


def test_option_that_the_way_taken_does_not_use_is_listed() -> None:
    readings = [reading_of(SFT, "file")]

    found = Resolved(*resolve(readings, {"inference": True}, frozenset({"model", "seq"})))

    assert {"model", "seq"} == found.options.keys()
    idle = [entry.key for entry in found.files[0].unused_that(Bearing.NONE)]
    assert "per_device_train_batch_size" in idle


def test_checkpoint_that_is_stored_quantised_stays_so_beside_adapters() -> None:
    recipe = {"base_model": "openai/gpt-oss-20b", "adapter": "lora", "bf16": True, "datasets": []}

    stored = resolved(recipe)
    dequantised = resolved(
        {**recipe, "model_quantization_config": "Mxfp4Config",
         "model_quantization_config_kwargs": {"dequantize": True}}
    )  # fmt: skip

    assert "dtype" not in stored.options
    assert "bf16" == dequantised.options["dtype"]


ODD: list[Any] = [
    None, True, False, "auto", "", "x", -1, 0, 1, 1.5, "1e9999", "nan", float("inf"), 10**30, [],
    [1, None], ["a"], {}, {"a": {"b": 1}}, "$X", "\x00", "99999999999999999999",
]  # fmt: skip


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("format_", FORMATS, ids=[format_.title for format_ in FORMATS])
def test_odd_values_are_used_listed_or_refused_in_a_sentence(
    format_: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fragdoctor.estimation.recipes.resolve._model", lambda _: None)  # slow
    for key in format_.rules:
        for value in ODD:
            entries = nested(key, value)
            try:
                readings = [read(format_, entries, "file")]
                found = Resolved(*resolve(readings, {"inputs": ["gpt2"]}, ANYTHING))
            except FragdoctorError:
                continue
            named = [e.key for file in found.files for e in (*file.used, *file.unused)]

            assert named or not flat(entries), (key, value)


def test_way_of_the_loss_is_an_option_of_training_alone() -> None:
    readings = [reading_of({**SFT, "use_liger_kernel": True}, "file")]

    training = Resolved(*resolve(readings, {}, ANYTHING | {"logits"}))
    server = Resolved(*resolve(readings, {}, ANYTHING - {"logits"}))

    assert "fused" == training.options["logits"]
    assert "logits" not in server.options
    assert [] == list(training.files[0].unused_that(Bearing.MATTERS))
