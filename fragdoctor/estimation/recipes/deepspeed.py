"""DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/): how a run shares its states."""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Fact, Format, Reading, facts

DEVICE: Final = values.one_of({"cpu": True, "nvme": True, "auto": None})
stage: Final = values.one_of({"auto": None, "0": 0, "1": 1, "2": 2, "3": 3}, "is not a ZeRO stage")


def _unless_auto(kind: str) -> values.Convert:
    return lambda value: None if value == values.AUTO or values.is_off(value) else kind


_RULES: Final = facts(
    ("stage", stage, "zero_optimization.stage"),
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


def _complete(reading: Reading, entries: Entries) -> None:
    """Note that DeepSpeed is used, which optimizer it has, and a batch given only for all GPUs."""
    reading.default("engine", "deepspeed", "zero_optimization", "DeepSpeed")
    reading.default("stage", 0, "zero_optimization.stage")
    own = reading.facts.get("optimizer")
    is_own = values.is_off(entries.get("optimizer.params.torch_adam"))
    if own is not None and own.value in ("adam", "adamw") and is_own:
        reading.facts["optimizer"] = Fact("adamw-fused", own.key, own.text)
    whole = entries.get(_BATCH)
    if whole not in (None, values.AUTO) and reading.value("batch") is None:
        reading.notes.append(
            f"{reading.source}: {_BATCH} {whole} is for all GPUs; --batch sets one GPU's."
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
    rules=_RULES,
    complete=_complete,
    is_launch=True,
)  # fmt: skip
