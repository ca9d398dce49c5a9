"""Accelerate's YAML, and the options of programs that start processes.

Names are those of ``accelerate/commands/config`` and ``accelerate launch --help``
(https://huggingface.co/docs/accelerate/package_reference/cli); ``torchrun`` and ``deepspeed`` use
other names for the number of processes.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.deepspeed import DEVICE, stage
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts

ENGINE: Final = values.one_of(
    {"fsdp": "fsdp", "deepspeed": "deepspeed", "multi_gpu": "ddp", "tp": "ddp"},
    "is not a known way to share a run among GPUs",
)  # fmt: skip
SHARDING: Final = values.one_of(
    {"full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0,
     "hybrid_shard": 3, "4": 3, "hybrid_shard_zero2": 2, "5": 2, "true": 3, "false": 3},
)  # fmt: skip
_WHOLE: Final = "weights stay gathered between forward and backward, which needs more"

FSDP_RULES: Final = facts(
    ("stage", SHARDING, "fsdp_sharding_strategy"),
    ("offload_parameters offload_optimizer", True, "fsdp_offload_params"),
    ("fsdp_kind", values.one_of({"1": "1", "2": "2"}, "is not a version of FSDP"), "fsdp_version"),
    ("checkpointing", "full", "fsdp_activation_checkpointing"),
)
"""FSDP's entries that several programs share; ``complete_fsdp`` reads the rest."""

_RULES: Final = FSDP_RULES | facts(
    ("engine", ENGINE, "distributed_type"),
    ("engine", "fsdp", "use_fsdp"),
    ("engine", "deepspeed", "use_deepspeed"),
    ("engine", "ddp", "multi_gpu"),
    ("mixed", values.mixed_dtype, "mixed_precision"),
    ("n_gpus", values.count, "num_processes"),
    ("n_nodes", values.count, "num_machines nnodes num_nodes"),
    ("gpus_per_node", values.count, "nproc_per_node nproc-per-node num_gpus"),
    ("stage", stage, "zero_stage"),
    ("offload_optimizer", DEVICE, "offload_optimizer_device"),
    ("offload_parameters", DEVICE, "offload_param_device"),
    ("grad_accumulation", values.count, "gradient_accumulation_steps"),
    ("tensor_parallel", values.count, "parallelism_config_tp_size megatron_lm_tp_degree"),
    ("context_parallel", values.count, "parallelism_config_cp_size parallelism_config_sp_size"),
    ("replicas", values.count, "parallelism_config_dp_replicate_size"),
    ("shard", values.count, "parallelism_config_dp_shard_size"),
    ("pipeline_parallel", values.count, "megatron_lm_pp_degree"),
    ("sequence_parallel", True, "megatron_lm_sequence_parallelism"),
    ("stage", 1, "megatron_lm_use_distributed_optimizer"),
)


def complete_fsdp(reading: Reading, entries: Entries) -> None:
    """Combine FSDP's entries: version 2 writes a flag where version 1 has a strategy."""
    for key, value in entries.items():
        last = key.rpartition(".")[2].removeprefix("fsdp_")
        if last == "reshard_after_forward" and "stage" not in reading.facts:
            stays = value is not None and values.is_off(value)
            code = values.text_of(value)
            if code in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
                reading.take("stage", SHARDING(value), key, value)
            elif stays:
                reading.notes.append(f"{reading.source}: {key} is off: {_WHOLE}; not counted.")
        if "hybrid" in values.text_of(value) and last == "sharding_strategy":
            reading.take("hybrid", True, key, value)
    if reading.value("engine") == "fsdp" and reading.value("stage") == 2:
        reading.notes.append(
            f"{reading.source}: with {reading.facts['stage'].text}, the estimate keeps whole "
            "weights on each GPU, as ZeRO-2 does."
        )


def _complete(reading: Reading, entries: Entries) -> None:
    if reading.value("engine") == "deepspeed" and not reading.references:
        reading.default("stage", 2, "zero_stage")
    elif reading.value("engine") not in ("deepspeed", "fsdp"):
        for fact in ("offload_optimizer", "offload_parameters", "hybrid"):
            reading.drop(fact, "neither FSDP nor DeepSpeed is used")
    complete_fsdp(reading, entries)
    reading.drop("shard", "follows from the other degrees")
    if reading.value("engine") == "ddp":
        reading.drop("stage", "neither FSDP nor DeepSpeed is used")


FORMAT: Final = Format(
    title="Accelerate configuration",
    signs=(
        frozenset({"distributed_type"}),
        frozenset({"compute_environment"}),
        frozenset({"mixed_precision", "num_processes"}),
        frozenset({"num_processes", "num_machines"}),
    ),
    rules=_RULES,
    sections=(
        "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
        "fp8_config", "dynamo_config",
    ),
    references=("deepspeed_config.deepspeed_config_file", "deepspeed_config_file"),
    complete=_complete,
    is_launch=True,
)  # fmt: skip
