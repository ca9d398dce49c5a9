"""Axolotl's YAML (https://docs.axolotl.ai/docs/config-reference.html).

Weights are loaded in the dtype of ``bf16`` or ``fp16``, so autocast makes no copies of them. With
``lora_target_linear``, LoRA's targets are all linear layers of the decoder.
"""

from __future__ import annotations

from typing import Any, Final

from fragdoctor.estimation.recipes import trainer, values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts

_ADAPTER: Final = values.one_of({"lora": "lora", "qlora": "lora"}, "is not a known adapter")


def _plugins(value: Any) -> str | None:
    """Return what a plugin means: all but one need entries of their own to save memory."""
    return "fused" if "CutCrossEntropy" in str(value) else None


_RULES: Final = trainer.TRAINER_RULES | facts(
    ("model", values.name, "base_model"),
    ("batch", values.count, "micro_batch_size", 1),
    ("seq", values.count, "sequence_len", 512),
    ("optimizer", values.optimizer, "optimizer", "adamw_torch_fused"),
    ("checkpointing", "full", "gradient_checkpointing"),
    ("checkpointing", "full", "fsdp_config.activation_checkpointing"),
    ("offload_parameters offload_optimizer", True, "fsdp_config.offload_params"),
    ("mixed weights", "bf16", "bf16 bfloat16"),
    ("mixed weights", "fp16", "fp16 float16"),
    ("adapter", _ADAPTER, "adapter"),
    ("rank", values.count, "lora_r", 8),
    ("targets", values.targets, "lora_target_modules", "q_proj,v_proj"),
    ("dora", True, "peft_use_dora"),
    ("quantised", "int4", "load_in_4bit"),
    ("quantised", "int8", "load_in_8bit"),
    ("attention", "flash", "flash_attention flex_attention sage_attention"),
    ("attention", "sdpa", "sdp_attention xformers_attention"),
    ("attention", "eager", "eager_attention"),
    ("offload_activations", True, "activation_offloading"),
    ("n_gpus", values.count, "world_size"),
    ("shard_degree", values.count, "dp_shard_size"),
    ("context_parallel", values.count, "context_parallel_size sequence_parallel_degree"),
    ("tensor_parallel", values.count, "tensor_parallel_size"),
    ("logits", _plugins, "plugins"),
    ("logits", "fused", "cut_cross_entropy liger_fused_linear_cross_entropy"),
    ("dequantised", True, "model_quantization_config_kwargs.dequantize"),
    ("rl", values.text_of, "rl"),
)


def _complete(reading: Reading, entries: Entries) -> None:
    _complete_adapter(reading, entries)
    preferred = reading.drop("rl")
    if preferred is not None:
        trainer.count_preferences(reading, preferred.value)
    activation = values.text_of(entries.get("gradient_checkpointing"))
    if "offload" in activation:
        reading.take("offload_activations", True, "gradient_checkpointing", activation)
    for key in ("fsdp_config", "fsdp_version", "dp_shard_size"):
        if any(not values.is_off(entries[k]) for k in entries if k.partition(".")[0] == key):
            reading.default("engine", "fsdp", key, "FSDP")
    trainer.complete(reading, entries)


def _complete_adapter(reading: Reading, entries: Entries) -> None:
    if reading.value("adapter") is None:
        if reading.facts.get("quantised") and "adapter" not in reading.unsayable:
            reading.drop("quantised")
        return
    if not values.is_off(entries.get("lora_target_linear")):
        if reading.value("targets") != "all-linear":
            reading.drop("targets")
        reading.facts.pop("targets", None)
        reading.take("targets", "all-linear", "lora_target_linear", "true")


FORMAT: Final = Format(
    title="Axolotl recipe",
    signs=(
        "base_model micro_batch_size", "base_model sequence_len", "base_model adapter",
        "base_model datasets", "base_model pretraining_dataset",
    ),
    rules=_RULES,
    sections=("fsdp_config",),
    references=("deepspeed",),
    complete=_complete,
)  # fmt: skip
