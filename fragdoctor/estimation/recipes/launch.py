"""How a run is started and shares its states: Accelerate's YAML, launchers, DeepSpeed's JSON.

Names are those of ``accelerate/commands/config`` and ``accelerate launch --help``
(https://huggingface.co/docs/accelerate/package_reference/cli); ``torchrun`` and ``deepspeed`` use
other names for the number of processes. DeepSpeed's are those of
https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Fact, Format, Reading, facts

DEVICE: Final = values.one_of({"cpu": True, "nvme": True, "auto": None})
stage: Final = values.one_of({"auto": None, "0": 0, "1": 1, "2": 2, "3": 3}, "is not a ZeRO stage")
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

_ACCELERATE: Final = FSDP_RULES | facts(
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


def _complete_accelerate(reading: Reading, entries: Entries) -> None:
    if reading.value("engine") == "deepspeed" and not reading.references:
        reading.default("stage", 2, "zero_stage")
    elif reading.value("engine") not in ("deepspeed", "fsdp"):
        for fact in ("offload_optimizer", "offload_parameters", "hybrid"):
            reading.drop(fact)
    complete_fsdp(reading, entries)
    reading.drop("shard")
    if reading.value("engine") == "ddp":
        reading.drop("stage")


ACCELERATE: Final = Format(
    title="Accelerate configuration",
    signs=(
        "distributed_type", "compute_environment", "mixed_precision num_processes",
        "num_processes num_machines",
    ),
    rules=_ACCELERATE,
    sections=(
        "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
        "fp8_config", "dynamo_config",
    ),
    references=("deepspeed_config.deepspeed_config_file", "deepspeed_config_file"),
    complete=_complete_accelerate,
    is_launch=True,
)  # fmt: skip


def _unless_auto(kind: str) -> values.Convert:
    return lambda value: None if value == values.AUTO or values.is_off(value) else kind


_DEEPSPEED: Final = facts(
    ("stage", stage, "zero_optimization.stage", 0),
    ("offload_optimizer", DEVICE, "zero_optimization.offload_optimizer.device"),
    ("offload_parameters", DEVICE, "zero_optimization.offload_param.device"),
    ("offload_optimizer", True, "zero_optimization.cpu_offload"),
    ("offload_parameters", True, "zero_optimization.cpu_offload_params"),
    ("mixed", _unless_auto("bf16"), "bf16.enabled bfloat16.enabled"),
    ("mixed", _unless_auto("fp16"), "fp16.enabled amp.enabled"),
    ("batch", values.count, "train_micro_batch_size_per_gpu"),
    ("grad_accumulation", values.count, "gradient_accumulation_steps"),
    ("optimizer", values.optimizer, "optimizer.type"),
    ("tensor_parallel", values.count, "tensor_parallel.autotp_size tensor_parallel.tp_size"),
    ("context_parallel", values.count, "sequence_parallel_size"),
    ("pipeline_parallel", values.count, "pipeline.stages"),
)

_BATCH: Final = "train_batch_size"


def _complete_deepspeed(reading: Reading, entries: Entries) -> None:
    """Note that DeepSpeed is used, which optimizer it has, and a batch given only for all GPUs."""
    reading.default("engine", "deepspeed", "zero_optimization", "DeepSpeed")
    own = reading.facts.get("optimizer")
    is_own = values.is_off(entries.get("optimizer.params.torch_adam"))
    if own is not None and own.value in ("adam", "adamw") and is_own:
        reading.facts["optimizer"] = Fact("adamw-fused", own.key, own.text)
    whole = entries.get(_BATCH)
    if whole not in (None, values.AUTO) and reading.value("batch") is None:
        reading.notes.append(
            f"{reading.source}: {_BATCH} {whole} is for all GPUs; --batch sets one GPU's."
        )


DEEPSPEED: Final = Format(
    title="DeepSpeed configuration",
    signs=(
        "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size fp16",
        "train_batch_size bf16", "train_batch_size optimizer",
    ),
    rules=_DEEPSPEED,
    complete=_complete_deepspeed,
    is_launch=True,
)  # fmt: skip
