"""torchtitan's job TOML (``torchtitan/config/job_config.py`` until it became Python).

A model is a name and a flavor. Weights are fp32; FSDP computes in bf16, and on one GPU autocast
does. ``data_parallel_shard_degree = -1`` takes all GPUs that are left, which the file does not say.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.estimation.recipes.accelerate import offload_to_host
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import (
    Becomes,
    Format,
    Matters,
    Reading,
    Rule,
    count,
    dtype,
    harmless,
    is_off,
    name,
    optimizer_class,
    text_of,
    when_on,
)
from fragdoctor.model.recipe import Bearing

_FLAVORS: Final = {
    "llama3 8b": "llama-3.1-8b", "llama3 70b": "llama-3.1-70b", "llama3 405b": "llama-3.1-405b",
    "llama2 7b": "llama-2-7b", "llama2 13b": "llama-2-13b", "llama2 70b": "llama-2-70b",
    "qwen3 0.6b": "qwen3-0.6b", "qwen3 1.7b": "Qwen/Qwen3-1.7B", "qwen3 4b": "qwen3-4b",
    "qwen3 8b": "qwen3-8b", "qwen3 14b": "qwen3-14b", "qwen3 32b": "qwen3-32b",
    "qwen3 30b-a3b": "qwen3-30b-a3b", "qwen3 235b-a22b": "qwen3-235b-a22b",
    "deepseek_v3 16b": "deepseek-v2-lite", "deepseek_v3 236b": "deepseek-v2",
    "deepseek_v3 671b": "deepseek-v3", "gpt_oss 20b": "gpt-oss-20b", "gpt_oss 120b": "gpt-oss-120b",
    "llama4 17bx16e": "meta-llama/Llama-4-Scout-17B-16E",
    "llama4 17bx128e": "meta-llama/Llama-4-Maverick-17B-128E",
}  # fmt: skip
_SMALL: Final = {
    "llama3 debugmodel": {"vocab": 2048, "layers": 6, "hidden": 256, "heads": 16, "ffn": 768},
}
"""Flavors that are no published model: the dimensions of ``torchtitan/models``."""

_NO_FLOAT8: Final = "8-bit floating point is counted as bf16"
_PARALLEL: Final[dict[str, Rule]] = {
    "data_parallel_shard_degree": Becomes("shard_degree", count),
    "data_parallel_degree": Becomes("shard_degree", count),
    "data_parallel_replicate_degree": Becomes("replicas", count),
    "tensor_parallel_degree": Becomes("tensor_parallel", count),
    "pipeline_parallel_degree": Becomes("pipeline_parallel", count),
    "context_parallel_degree": Becomes("context_parallel", count),
    "expert_parallel_degree": Becomes("expert_parallel", count),
    "expert_tensor_parallel_degree": Becomes("expert_tensor", count),
    "pipeline_parallel_microbatch_size": Becomes("microbatch", count),
    "pipeline_parallel_schedule": Becomes("schedule", text_of),
    "enable_async_tensor_parallel": Matters("its buffers are not counted"),
    "disable_loss_parallel": Matters("logits are counted in parts: whole ones need more"),
    "fsdp_reshard_after_forward": Becomes("reshard", text_of),
}
_RULES: Final[dict[str, Rule]] = {
    "model.flavor": Becomes("flavor", text_of),
    "model.name": Becomes("family", text_of),
    "hf_transformers.model": Becomes("model", name),
    "model.converters": Matters(_NO_FLOAT8),
    "float8.enable_float8_linear": Matters(_NO_FLOAT8),
    "optimizer.name": Becomes("optimizer", optimizer_class),
    "optimizer.implementation": Becomes("implementation", text_of),
    "optimizer.fused": Becomes("implementation", when_on("fused")),
    "optimizer.early_step_in_backward": Matters(
        "gradients are counted until the step; freed in the backward pass, they need less"
    ),
    "training.local_batch_size": Becomes("batch", count),
    "training.batch_size": Becomes("batch", count),
    "training.seq_len": Becomes("seq", count),
    "training.dtype": Becomes("weights", dtype),
    "training.mixed_precision_param": Becomes("mixed", dtype),
    "training.enable_cpu_offload": Becomes("offload_fsdp", when_on(True)),
    "training.compile": Matters("what a compiler saves is not counted"),
    "training.img_size": Matters("pictures are not counted"),
    "compile.enable": Matters("what a compiler saves is not counted"),
    "activation_checkpoint.mode": Becomes("ac", text_of),
    "activation_checkpoint.selective_ac_option": Becomes("ac_option", text_of),
    "activation_checkpoint.memory_budget": Matters("a memory budget is not counted"),
    "lora.rank": Becomes("rank", count),
    "data.max_patches_per_image": Matters("pictures are not counted: they need more"),
    "data.max_images_per_batch": Matters("pictures are not counted: they need more"),
    "encoder.t5_encoder": Matters("encoders of texts are not counted: they need more"),
    "encoder.clip_encoder": Matters("encoders of texts are not counted: they need more"),
    "encoder.autoencoder_path": Matters("the autoencoder is not counted: it needs more"),
    "validation.enable": Matters("a validation pass is not counted; it keeps no activations"),
    "fault_tolerance.enable": Matters("copies for fault tolerance are not counted"),
}


def _complete(reading: Reading, entries: Entries) -> None:
    _complete_model(reading)
    reshard = reading.facts.pop("reshard", None)
    if reshard is not None:
        stays = reshard.value == "never"
        reason = "weights stay gathered between the passes, which is not counted: it needs more"
        bearing = Bearing.MATTERS if stays else Bearing.NONE
        reading.leave(reshard.key, reshard.text, bearing, reason if stays else "")
    if not any(key.endswith("data_parallel_shard_degree") and entries[key] == 1 for key in entries):
        degree = entries.get("parallelism.data_parallel_shard_degree", -1)
        reading.take("engine", "fsdp", "data_parallel_shard_degree", degree, is_default=True)
    reading.take("optimizer", "adamw", "optimizer.name", "AdamW", is_default=True)
    reading.take("implementation", "fused", "optimizer.implementation", "fused", is_default=True)
    reading.take("batch", 8, "training.local_batch_size", 8, is_default=True)
    reading.take("seq", 2048, "training.seq_len", 2048, is_default=True)
    reading.take("weights", "fp32", "training.dtype", "float32", is_default=True)
    reading.take("mixed", "bf16", "training.mixed_precision_param", "bfloat16", is_default=True)
    _complete_precision(reading)
    _complete_optimizer(reading)
    _complete_checkpointing(reading)
    _complete_pipeline(reading)
    if (reading.value("tensor_parallel") or 1) > 1:
        fact = reading.facts["tensor_parallel"]
        reading.take("sequence_parallel", True, fact.key, fact.text)
    offload_to_host(reading)
    reading.drop("expert_tensor", "as the other matrices")
    if reading.value("rank"):
        reading.take("adapter", "lora", "lora.rank", reading.facts["rank"].text)


def _complete_model(reading: Reading) -> None:
    """Name the model by its flavor; how attention is done does not change its size."""
    family, flavor = reading.facts.pop("family", None), reading.facts.pop("flavor", None)
    if "model" in reading.facts:
        return
    key = "model.name, model.flavor"
    plain = flavor.value if flavor else "debugmodel"
    for suffix in ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope"):
        plain = plain.removesuffix(suffix)
    kind = f"{family.value.removesuffix('_ft') if family else 'llama3'} {plain}"
    text = f"{family.text if family else 'llama3'} {flavor.text if flavor else 'debugmodel'}"
    if kind in _FLAVORS:
        reading.take("model", _FLAVORS[kind], key, text)
    elif kind in _SMALL:
        for dimension, value in _SMALL[kind].items():
            reading.take(dimension, value, key, text)
    else:
        reading.leave(key, text, Bearing.MATTERS, "is no model whose size is known")


def _complete_precision(reading: Reading) -> None:
    if reading.value("mixed") == "fp32":
        reading.drop("mixed", "nothing is computed in 16 bits")
    if reading.value("weights") == "bf16":
        found = reading.facts["weights"]
        reading.take("dtype", "bf16", found.key, found.text)


def _complete_optimizer(reading: Reading) -> None:
    found, how = reading.facts.get("optimizer"), reading.facts.pop("implementation", None)
    if found is None or how is None:
        return
    if found.value == "adamw" and how.value == "fused":
        del reading.facts["optimizer"]
        text = f"{found.text}, fused"
        default = found.is_default and how.is_default
        reading.take("optimizer", "adamw-fused", found.key, text, is_default=default)
    elif how.value == "for-loop":
        reading.leave(how.key, how.text, Bearing.MATTERS, "counted as foreach: it needs less")
    elif not how.is_default:
        reading.leave(how.key, how.text, Bearing.NONE)


def _complete_checkpointing(reading: Reading) -> None:
    mode, option = reading.facts.pop("ac", None), reading.facts.pop("ac_option", None)
    kind = mode.value if mode else "selective"
    text = mode.text if mode else "selective"
    if kind == "full":
        reading.take("checkpointing", "full", "activation_checkpoint.mode", text)
    elif kind == "selective" and (option is None or option.value != "1"):
        reading.leave(
            "activation_checkpoint.mode",
            f"{text} {option.text if option else ''}".strip(),
            Bearing.MATTERS,
            "selective checkpointing is counted as none: it needs less, but more than full",
        )
        return
    elif kind == "selective":
        reading.take("checkpointing", "full", "activation_checkpoint.mode", f"{text} 1")
    elif not is_off(kind):
        reading.leave(mode.key if mode else "", text, Bearing.MATTERS, "is counted as none")
    if option is not None:
        reading.leave(option.key, option.text, Bearing.NONE, "not selective")


def _complete_pipeline(reading: Reading) -> None:
    """Count one micro batch a pass where a pipeline splits the batch."""
    micro, schedule = reading.facts.pop("microbatch", None), reading.facts.pop("schedule", None)
    if (reading.value("pipeline_parallel") or 1) == 1:
        for fact in (micro, schedule):
            if fact is not None:
                reading.leave(fact.key, fact.text, Bearing.NONE, "there is no pipeline")
        return
    whole = reading.facts.pop("batch")
    key = "parallelism.pipeline_parallel_microbatch_size"
    reading.leave(whole.key, whole.text, Bearing.NONE, "split into micro batches")
    reading.take("batch", micro.value if micro else 1, key, micro.text if micro else "1")
    if schedule is not None and schedule.value != "1f1b":
        reason = "counted as 1F1B, which holds as many micro batches as there are stages"
        reading.leave(schedule.key, schedule.text, Bearing.MATTERS, reason)


FORMAT: Final = Format(
    title="torchtitan job",
    signs=(
        frozenset({"model.name", "model.flavor"}),
        frozenset({"model.flavor"}),
        frozenset({"training.local_batch_size"}),
        frozenset({"training.seq_len", "activation_checkpoint.mode"}),
    ),
    rules=MappingProxyType(
        _RULES
        | {f"{section}.{key}": rule for key, rule in _PARALLEL.items()
           for section in ("parallelism", "training", "experimental")}
    ),
    harmless=harmless(
        r"""
        job profiling metrics model optimizer lr_scheduler training parallelism experimental
        checkpoint activation_checkpoint compile float8 quantize mx comm memory_estimation
        fault_tolerance validation inference encoder debug hf_transformers eval lora simple_fsdp
        """,
    ),
    complete=_complete,
)  # fmt: skip
