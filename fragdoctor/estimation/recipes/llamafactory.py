"""LLaMA-Factory's YAML and JSON (https://llamafactory.readthedocs.io/en/latest/advanced/arguments.html).

It recomputes activations unless told otherwise, loads weights in the dtype of ``bf16`` or
``fp16``, and casts trained parameters up to fp32 unless ``pure_bf16`` is set (``hparams/``,
``model/adapter.py``).
"""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.recipes import trainer, values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts

_TUNING: Final = values.one_of({"lora": "lora", "full": None}, "trains what no estimate can count")
_BITS: Final = values.one_of({"4": "int4", "8": "int8"}, "bits are not a known quantization")
_OTHER_OPTIMIZER: Final = values.one_of({}, "is not a known optimizer")


_RULES: Final = {
    key: rule for key, rule in trainer.TRAINER_RULES.items() if key != "gradient_checkpointing"
} | facts(
    ("model", values.name, "model_name_or_path"),
    ("checkpointing", "none", "disable_gradient_checkpointing"),
    ("seq", values.count, "cutoff_len", 2048),
    ("adapter", _TUNING, "finetuning_type"),
    ("rank", values.count, "lora_rank", 8),
    ("targets", values.targets, "lora_target", "all"),
    ("dora", True, "use_dora"),
    ("quantised", _BITS, "quantization_bit"),
    ("attention", values.attention, "flash_attn"),
    ("pure", "bf16", "pure_bf16"),
    ("optimizer", "galore", "use_galore"),
    ("optimizer", "muon", "use_muon"),
    ("optimizer", _OTHER_OPTIMIZER, "use_apollo use_badam use_adam_mini"),
    ("task", values.text_of, "stage"),
    ("double", lambda value: "no" if values.is_off(value) else None, "double_quantization"),
    ("logits", "fused", "enable_liger_kernel"),
    ("n_gpus", values.count, "ray_num_workers"),
)


def _complete(reading: Reading, entries: Entries) -> None:
    found = reading.facts.pop("mixed", None)
    pure = reading.facts.pop("pure", None)
    if reading.facts.pop("double", None) is not None:
        trainer.scales_unquantised(reading)
    if "adapter" not in reading.facts and "finetuning_type" not in entries:
        reading.default("adapter", "lora", "finetuning_type")
    if pure is not None:
        reading.derive("weights", "bf16", pure)
        if reading.value("adapter") is None:
            reading.derive("dtype", "bf16", pure)
    elif found is not None:
        reading.derive("mixed", found.value, found)
        reading.derive("weights", found.value if reading.value("adapter") else "fp32", found)
    else:
        loaded = "auto" if reading.value("adapter") else "fp32"
        reading.default("weights", loaded, "bf16", "not set")
    reading.default("checkpointing", "full", "disable_gradient_checkpointing", "false")
    if reading.value("checkpointing") == "none":
        reading.drop("checkpointing")
    task = reading.drop("task")
    if task is not None:
        trainer.count_preferences(reading, task.value)
    trainer.complete(reading, entries)


FORMAT: Final = Format(
    title="LLaMA-Factory recipe",
    signs=(
        "model_name_or_path finetuning_type", "model_name_or_path cutoff_len",
        "model_name_or_path template stage", "model_name_or_path template dataset",
    ),
    rules=_RULES,
    references=("deepspeed",),
    complete=_complete,
)  # fmt: skip
