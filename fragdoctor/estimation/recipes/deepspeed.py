"""DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/): how a run shares its states."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import (
    AUTO,
    HARMLESS_IN_TRAINING,
    Convert,
    Fact,
    Format,
    Matters,
    Reading,
    Rule,
    UnsayableError,
    count,
    facts,
    harmless,
    is_off,
    matters,
    one_of,
    optimizer_class,
    when_on,
)

DEVICE: Final = one_of({"cpu": True, "nvme": True, "none": None, "null": None, "auto": None})


def stage(value: Any) -> int | None:
    """Return the ZeRO stage.

    Raises:
        UnsayableError: it is none.
    """
    if value == AUTO:
        return None
    if isinstance(value, bool) or str(value) not in ("0", "1", "2", "3"):
        raise UnsayableError("is no ZeRO stage")
    return int(value)


def _unless_auto(kind: str) -> Convert:
    return lambda value: None if value == AUTO or is_off(value) else kind


_BUCKETS: Final = Matters("buckets are not counted by their size: larger ones need more")
_RULES: Final[dict[str, Rule]] = facts(
    ("stage", stage, "zero_optimization.stage"),
    ("offload_optimizer", DEVICE, "zero_optimization.offload_optimizer.device"),
    ("offload_parameters", DEVICE, "zero_optimization.offload_param.device"),
    ("offload_optimizer", when_on(True), "zero_optimization.cpu_offload"),
    ("offload_parameters", when_on(True), "zero_optimization.cpu_offload_params"),
    ("mixed", _unless_auto("bf16"), "bf16.enabled bfloat16.enabled"),
    ("mixed", _unless_auto("fp16"), "fp16.enabled amp.enabled"),
    ("batch", count, "train_micro_batch_size_per_gpu"),
    ("grad_accumulation", count, "gradient_accumulation_steps"),
    ("optimizer", optimizer_class, "optimizer.type"),
    ("tensor_parallel", count, "tensor_parallel.autotp_size tensor_parallel.tp_size"),
    ("context_parallel", count, "sequence_parallel_size"),
    ("pipeline_parallel", count, "pipeline.stages"),
) | matters("""
        zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size \
            zero_optimization.stage3_prefetch_bucket_size: buckets are not counted by their size: \
            larger ones need more
        zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters: \
            weights that stay gathered are not counted: a large limit needs more
        zero_optimization.stage3_param_persistence_threshold: small weights that are never shared \
            are not counted
        zero_optimization.overlap_comm: buckets are counted once; those that are filled meanwhile \
            need more
        zero_optimization.sub_group_size: the optimizer's step is not counted in groups: smaller \
            ones need less
        zero_optimization.zero_hpz_partition_size: a second copy of the weights on each node \
            (ZeRO++) is not counted: it needs more
        zero_optimization.zero_quantized_weights: quantised gathering is not counted
        zero_optimization.zero_quantized_gradients: quantised gradients are not counted
        zero_optimization.mics_shard_size: sharing within groups (MiCS) is not counted
        zero_optimization.offload_optimizer.ratio: offloading a part is counted as all
        fp16.auto_cast: inputs are cast, which is not counted
        torch_autocast.enabled: autocast inside of DeepSpeed is not counted
        data_types.grad_accum_dtype: --grad-dtype says it
        activation_checkpointing.partition_activations: the model's code decides on \
            checkpointing; partitioned activations need less
        activation_checkpointing.cpu_checkpointing: checkpoints on the host are not counted: they \
            need less
        activation_checkpointing.number_checkpoints: --checkpointing says it
        compile.deepcompile: what a compiler saves is not counted
        compile.disable: whether a compiler is used is not counted
        quantize_training.enabled: quantised training is not counted
        compression_training: compression during training is not counted
        data_efficiency.data_routing.random_ltd.enabled: dropped tokens (random-LTD) are not \
            counted: they need less
        curriculum_learning.enabled: growing sequences are counted at --seq
        progressive_layer_drop.enabled: dropped layers are counted
        sparse_attention.mode: sparse attention is not counted
    """)

_BATCH: Final = "train_batch_size"


def _complete(reading: Reading, entries: Entries) -> None:
    """Say that DeepSpeed is used, and take the batch from the whole one where that is possible."""
    reading.default("engine", "deepspeed", "zero_optimization", "DeepSpeed")
    reading.default("stage", 0, "zero_optimization.stage")
    own = reading.facts.get("optimizer")
    is_own = is_off(entries.get("optimizer.params.torch_adam"))
    if own is not None and own.value in ("adam", "adamw") and is_own:
        reading.facts["optimizer"] = Fact("adamw-fused", own.key, own.text)
    whole = entries.get(_BATCH)
    if whole not in (None, AUTO) and reading.value("batch") is None:
        reading.notes.append(
            f"{reading.source}: {_BATCH} {whole} is of all GPUs; --batch says one GPU's."
        )


FORMAT: Final = Format(
    title="DeepSpeed configuration",
    signs=(
        frozenset({"zero_optimization"}),
        frozenset({"train_micro_batch_size_per_gpu"}),
        frozenset({_BATCH, "fp16"}),
        frozenset({_BATCH, "bf16"}),
        frozenset({_BATCH, "optimizer"}),
    ),
    rules=MappingProxyType(_RULES),
    harmless=harmless(
        HARMLESS_IN_TRAINING,
        r"""
        train_batch_size steps_per_print wall_clock dump_state optimizer.params scheduler
        (fp16|bf16|amp)\. zero_allow zero_force prescale communication flops elasticity
        autotuning aio monitor tensorboard csv_ disable_allgather zero_optimization\.
        seq_parallel_comm gradient_predivide sparse_gradients data_efficiency
        curriculum_learning compression comms memory_breakdown cuda_visible checkpoint nebula
        hybrid_engine activation_checkpointing compile tensor_parallel pipeline
        progressive_layer sparse_attention zero_optimization$ logging amp optimizer.legacy
        vocabulary
        """,
    ),
    complete=_complete,
    is_launch=True,
)  # fmt: skip
