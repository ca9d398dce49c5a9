"""torchtitan's job TOML (``torchtitan/config/job_config.py`` until it became Python).

A model is a name and a flavor. Weights are fp32; FSDP, or autocast on one GPU, computes in bf16.
``data_parallel_shard_degree = -1`` takes all remaining GPUs; the file does not say how many.
torchtitan's ``run_train.sh`` sets expandable segments.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.model_shapes import preset_of
from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts

_FLAVORS: Final = {
    "deepseek_v3 16b": "deepseek-v2-lite", "deepseek_v3 236b": "deepseek-v2",
    "deepseek_v3 671b": "deepseek-v3",
}  # fmt: skip
_FUSED: Final = values.one_of({"fused": True, "foreach": False, "for-loop": False})
_RULES: Final = facts(
    ("shard_degree", values.count, "data_parallel_shard_degree data_parallel_degree"),
    ("replicas", values.count, "data_parallel_replicate_degree"),
    ("tensor_parallel", values.count, "tensor_parallel_degree"),
    ("pipeline_parallel", values.count, "pipeline_parallel_degree"),
    ("context_parallel", values.count, "context_parallel_degree"),
    ("expert_parallel", values.count, "expert_parallel_degree"),
    ("microbatch", values.count, "pipeline_parallel_microbatch_size"),
    ("flavor", values.text_of, "model.flavor"),
    ("family", values.text_of, "model.name"),
    ("model", values.name, "hf_transformers.model"),
    ("optimizer", values.optimizer, "optimizer.name", "AdamW"),
    ("fused", _FUSED, "optimizer.implementation", "fused"),
    ("fused", True, "optimizer.fused"),
    ("batch", values.count, "training.local_batch_size training.batch_size", 8),
    ("seq", values.count, "training.seq_len", 2048),
    ("weights", values.dtype, "training.dtype", "float32"),
    ("mixed", values.dtype, "training.mixed_precision_param", "bfloat16"),
    ("offload_parameters offload_optimizer", True, "training.enable_cpu_offload"),
    ("ac", values.text_of, "activation_checkpoint.mode"),
    ("ac_option", values.text_of, "activation_checkpoint.selective_ac_option"),
    ("rank", values.count, "lora.rank"),
)


def _complete(reading: Reading, entries: Entries) -> None:
    _complete_model(reading)
    if not any(key.endswith("data_parallel_shard_degree") and entries[key] == 1 for key in entries):
        degree = entries.get("parallelism.data_parallel_shard_degree", -1)
        reading.default("engine", "fsdp", "data_parallel_shard_degree", degree)
    reading.default(
        "expandable_segments", True, "run_train.sh: PYTORCH_ALLOC_CONF", "expandable_segments:True"
    )
    if reading.value("mixed") == "fp32":
        reading.drop("mixed")
    if reading.value("weights") == "bf16":
        reading.derive("dtype", "bf16", reading.facts["weights"])
    reading.refine_optimizer("fused", {"adamw": "adamw-fused"})
    _complete_checkpointing(reading)
    _complete_pipeline(reading)
    if (reading.value("tensor_parallel") or 1) > 1:
        reading.derive("sequence_parallel", True, reading.facts["tensor_parallel"])
    if reading.value("rank"):
        reading.derive("adapter", "lora", reading.facts["rank"])


def _complete_model(reading: Reading) -> None:
    """Name the model by its flavor, without the kind of attention, which does not affect size."""
    family, flavor = reading.facts.pop("family", None), reading.facts.pop("flavor", None)
    if "model" in reading.facts:
        return
    key = "model.name, model.flavor"
    plain = flavor.value if flavor else "debugmodel"
    for suffix in ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope"):
        plain = plain.removesuffix(suffix)
    kind = f"{family.value.removesuffix('_ft') if family else 'llama3'} {plain}"
    text = f"{family.text if family else 'llama3'} {flavor.text if flavor else 'debugmodel'}"
    known = preset_of(_FLAVORS.get(kind, kind.replace("llama3 ", "llama-3.1 ")))
    if known is not None:
        reading.take("model", known.name, key, text)
    else:
        reading.leave(key, text, "is not a model whose size is known")


def _complete_checkpointing(reading: Reading) -> None:
    mode, option = reading.facts.pop("ac", None), reading.facts.pop("ac_option", None)
    kind, key = mode.value if mode else "selective", "activation_checkpoint.mode"
    text = f"{kind} {option.text}" if kind == "selective" and option else kind
    if text in ("full", "selective 1"):
        reading.take("checkpointing", "full", key, text)
    elif not values.is_off(kind):
        some = "selective checkpointing is counted as none: it needs less, but more than full"
        reading.leave(key, text, some)


def _complete_pipeline(reading: Reading) -> None:
    """Count one micro batch per pass if a pipeline splits the batch."""
    micro = reading.facts.pop("microbatch", None)
    if (reading.value("pipeline_parallel") or 1) > 1:
        whole = reading.facts.pop("batch")
        key = "parallelism.pipeline_parallel_microbatch_size"
        reading.leave(whole.key, whole.text)
        reading.take("batch", micro.value if micro else 1, key, micro.text if micro else "1")


FORMAT: Final = Format(
    title="torchtitan job",
    signs=(
        "model.flavor", "training.local_batch_size",
        "training.seq_len activation_checkpoint.mode",
    ),
    rules=_RULES,
    sections=("parallelism", "training", "experimental"),
    complete=_complete,
)  # fmt: skip
