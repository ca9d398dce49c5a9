"""torchtune's recipe YAML (https://docs.pytorch.org/torchtune/stable/deep_dives/configs.html).

A component is the path of a function; those of models name their sizes. Parameters, gradients and
states are in ``dtype``, without autocast, and adapters as well. How many GPUs share them stands on
the command line of ``tune run``, not in the file.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.estimation.recipes.accelerate import offload_to_host
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import (
    Becomes,
    Format,
    Matters,
    Reading,
    Rule,
    UnsayableError,
    count,
    dtype,
    harmless,
    is_off,
    optimizer_class,
    shown,
    when_on,
)
from fragdoctor.model.recipe import Bearing

_MODELS: Final = {
    "llama2": "Llama-2-{}-hf", "llama3": "Meta-Llama-3-{}", "llama3_1": "Llama-3.1-{}",
    "llama3_2": "Llama-3.2-{}", "llama3_3": "Llama-3.1-{}", "code_llama2": "CodeLlama-{}-hf",
    "qwen2": "Qwen2-{}", "qwen2_5": "Qwen2.5-{}", "qwen3": "Qwen3-{}", "gemma": "gemma-{}",
    "gemma2": "gemma-2-{}", "mistral": "Mistral-{}-v0.1",
    "llama3_2_vision": "Llama-3.2-{}-Vision",
}  # fmt: skip
_HUBS: Final = {
    "llama": "meta-llama", "code": "codellama", "qwen": "Qwen", "gemma": "google",
    "mistral": "mistralai",
}  # fmt: skip
_OTHERS: Final = {
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct", "phi4_14b": "microsoft/phi-4",
    "llama4_scout_17b_16e": "meta-llama/Llama-4-Scout-17B-16E",
    "llama4_maverick_17b_128e": "meta-llama/Llama-4-Maverick-17B-128E",
}  # fmt: skip
_KNOWN_FAMILY: Final = "|".join(sorted(_MODELS, key=len, reverse=True))
_KIND: Final = re.compile(rf"({_KNOWN_FAMILY})_((?:\d+_)?\d+b)(?:_base|_instruct)?")


def model(value: Any) -> str:
    """Return the repository of the model that a builder makes.

    Raises:
        UnsayableError: it is not known which one that is.
    """
    builder = str(value).rpartition(".")[2]
    for prefix in ("qlora_", "lora_"):
        builder = builder.removeprefix(prefix)
    if builder in _OTHERS:
        return _OTHERS[builder]
    found = _KIND.fullmatch(builder)
    if found is None:
        raise UnsayableError("is no model whose size is known; name one on the command line")
    family, size = found[1], found[2].replace("_", ".")
    size = size if family.startswith("gemma") else size.upper()
    hub = next(hub for start, hub in _HUBS.items() if family.startswith(start))
    return f"{hub}/{_MODELS[family].format(size)}"


_LOSSES: Final = ("linearcrossentropy", "chunked", "cewithchunked", "liger")
_RULES: Final[dict[str, Rule]] = {
    "model._component_": Becomes("model", model),
    "model.lora_rank": Becomes("rank", count),
    "model.lora_attn_modules": Becomes("modules", lambda value: value),
    "model.apply_lora_to_mlp": Becomes("mlp", when_on(True)),
    "model.apply_lora_to_output": Matters("an adapter on the head is not counted"),
    "model.lora_dropout": Matters(
        "dropout of adapters is not counted: it keeps one more input each"
    ),
    "model.use_dora": Becomes("dora", when_on(True)),
    "model.quantize_base": Becomes("quantised", when_on("int4")),
    "model.max_seq_len": Matters("--seq says it"),
    "model.encoder_trainable": Matters("what of the model is trained is not told apart"),
    "model.decoder_trainable": Matters("what of the model is trained is not told apart"),
    "model.fusion_trainable": Matters("what of the model is trained is not told apart"),
    "model.image_size": Matters("pictures are not counted: they need more"),
    "tokenizer.max_seq_len": Becomes("seq", count),
    "dataset.max_seq_len": Becomes("seq", count),
    "batch_size": Becomes("batch", count),
    "gradient_accumulation_steps": Becomes("grad_accumulation", count),
    "dtype": Becomes("weights", dtype),
    "optimizer._component_": Becomes("optimizer", optimizer_class),
    "optimizer.fused": Becomes("fused", when_on(True)),
    "optimizer.momentum": Becomes("momentum", when_on(True)),
    "enable_activation_checkpointing": Becomes("checkpointing", when_on("full")),
    "enable_activation_offloading": Becomes("offload_activations", when_on(True)),
    "ac_mode": Matters("selective checkpointing is not counted"),
    "ac_option": Matters("selective checkpointing is not counted"),
    "memory_efficient_fsdp_wrap": Matters("how layers are wrapped is not counted"),
    "fsdp_cpu_offload": Becomes("offload_fsdp", when_on(True)),
    "fsdp_reshard_after_forward": Matters("weights are counted as shared between the passes"),
    "custom_sharded_layers": Becomes("is_sharded", when_on(True)),
    "tensor_parallel_dim": Becomes("tensor_parallel", count),
    "context_parallel_dim": Becomes("context_parallel", count),
    "data_parallel_shard_dim": Becomes("shard_degree", count),
    "data_parallel_replicate_dim": Becomes("replicas", count),
    "expert_parallel_degree": Becomes("expert_parallel", count),
    "nproc_per_node": Becomes("gpus_per_node", count),
    "nproc-per-node": Becomes("gpus_per_node", count),
    "nnodes": Becomes("n_nodes", count),
    "optimizer_in_bwd": Matters(
        "gradients are counted until the step; freed in the backward pass, they need less"
    ),
    "optimizer_in_backward": Matters(
        "gradients are counted until the step; freed in the backward pass, they need less"
    ),
    "optimizer_cpu_offload": Becomes("offload_optimizer", when_on(True)),
    "loss._component_": Becomes("loss", lambda value: value),
    "loss.num_output_chunks": Matters("logits are counted whole: chunks need less"),
    "compile": Matters("what a compiler saves is not counted"),
    "enable_fp8_training": Matters("8-bit floating point is counted as bf16"),
    "quantizer._component_": Matters("fake quantisation keeps copies, which are not counted"),
    "batch_size_val": Becomes("validation", lambda value: value),
    "teacher_model._component_": Matters("a teacher model is not counted: it needs more"),
    "ref_checkpointer._component_": Matters("a reference model is not counted: it needs more"),
    "reward_and_value_model._component_": Matters("reward and value models are not counted"),
    "max_generated_tokens": Matters("generation is not counted: it needs more"),
    "dataset.packed": Becomes("packed", when_on(True)),
    "max_seq_len": Becomes("seq", count),
    "tokenizer.max_num_tiles": Matters("pictures are not counted: they need more"),
}


def _resolved(entries: Entries) -> Entries:
    """Return entries with ``${name}`` replaced by the plain value of that name."""
    reference = re.compile(r"\$\{([\w.]+)\}")

    def value_of(value: Any) -> Any:
        found = reference.fullmatch(value) if isinstance(value, str) else None
        return entries.get(found[1], value) if found else value

    return {key: value_of(value) for key, value in entries.items()}


def _complete(reading: Reading, entries: Entries) -> None:
    entries = _resolved(entries)
    reading.take("batch", 1, "batch_size", 1, is_default=True)
    _complete_adapter(reading, entries)
    _complete_optimizer(reading)
    loss = reading.facts.pop("loss", None)
    if loss is not None:
        in_parts = any(kind in str(loss.value).lower() for kind in _LOSSES)
        if in_parts:
            reading.take("logits", "chunked", loss.key, loss.text)
        else:
            reading.leave(loss.key, loss.text, Bearing.NONE)
    validation = reading.facts.pop("validation", None)
    if validation is not None:
        reason = "a validation pass keeps no activations"
        reading.leave(validation.key, validation.text, Bearing.NONE, reason)
    _complete_sharing(reading)
    reading.drop("packed", "the length is that of tokenizer.max_seq_len")
    if "dpo" in str(entries.get("loss._component_", "")).lower():
        batch = reading.facts.pop("batch")
        reading.take("batch", 2 * batch.value, batch.key, f"{batch.text} pairs")


def _complete_adapter(reading: Reading, entries: Entries) -> None:
    builder = str(entries.get("model._component_", "")).rpartition(".")[2]
    modules, mlp = reading.facts.pop("modules", None), reading.facts.pop("mlp", None)
    if "lora" not in builder and "rank" not in reading.facts:
        return
    reading.take("adapter", "lora", "model._component_", builder)
    reading.take("rank", 8, "model.lora_rank", 8, is_default=True)
    if builder.startswith("qlora"):
        reading.take("quantised", "int4", "model._component_", builder)
    names = modules.value if modules and isinstance(modules.value, list) else []
    plain = ["o_proj" if name == "output_proj" else str(name) for name in names]
    if mlp is not None:
        plain += ["gate_proj", "up_proj", "down_proj"]
    if plain:
        is_all = set(plain) >= {"q_proj", "k_proj", "v_proj", "o_proj"} and mlp is not None
        text = f"{shown(names)}{', MLP' if mlp else ''}"
        target = "all-linear" if is_all else ",".join(plain)
        reading.take("targets", target, "model.lora_attn_modules", text)
    reading.notes.append(
        f"{reading.source}: torchtune keeps adapters in its dtype; they are counted in fp32."
    )


def _complete_optimizer(reading: Reading) -> None:
    fused, momentum = reading.facts.pop("fused", None), reading.facts.pop("momentum", None)
    found = reading.facts.get("optimizer")
    if found is not None and fused is not None and found.value == "adamw":
        del reading.facts["optimizer"]
        reading.take("optimizer", "adamw-fused", found.key, f"{found.text}, fused")
    elif fused is not None:
        reading.leave(fused.key, fused.text, Bearing.NONE)
    if found is not None and momentum is not None and found.value == "sgd":
        del reading.facts["optimizer"]
        reading.take("optimizer", "sgd-momentum", found.key, f"{found.text}, momentum")


def _complete_sharing(reading: Reading) -> None:
    """Say that FSDP is used where an entry means nothing without it."""
    host, sharded = reading.facts.get("offload_fsdp"), reading.facts.pop("is_sharded", None)
    for fact in (host, sharded):
        if fact is not None:
            reading.take("engine", "fsdp", fact.key, fact.text)
    for fact_name in ("shard_degree", "gpus_per_node", "tensor_parallel"):
        if not is_off(reading.value(fact_name)) and reading.value(fact_name) != 1:
            reading.take("engine", "fsdp", reading.facts[fact_name].key, "FSDP", is_default=True)
    offload_to_host(reading)
    if "engine" not in reading.facts and "n_gpus" not in reading.facts:
        reading.notes.append(
            f"{reading.source} does not say how many GPUs tune run starts: counted on one; for a "
            "distributed recipe add --fsdp --world-size N."
        )


FORMAT: Final = Format(
    title="torchtune recipe",
    signs=(
        frozenset({"model._component_", "tokenizer._component_"}),
        frozenset({"model._component_", "checkpointer._component_"}),
        frozenset({"model._component_", "optimizer._component_"}),
    ),
    rules=MappingProxyType(_RULES),
    harmless=harmless(
        r"""
        low_cpu output_dir tokenizer checkpointer dataset shuffle seed epochs max_steps resume_ log_
        metric_logger profiler optimizer lr_scheduler clip_grad loss device save_ run_val
        collate model tensor_parallel_plan cudnn quantizer kd_ ref_checkpointer teacher reward_
        keep_last temperature top_k dataset_val use_grad gamma lmbda whiten ppo_ num_steps
        valid_ stop_token norm_ kl_ value_ min_response penalise forward_batch cp_ fp8_recipe
        validation model_dir checkpoint_dir name$ project
        """,
    ),
    complete=_complete,
)  # fmt: skip
