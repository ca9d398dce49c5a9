"""Axolotl's YAML (https://docs.axolotl.ai/docs/config-reference.html).

Weights are loaded in the dtype of ``bf16`` or ``fp16``, so that autocast makes no copies of them;
LoRA's targets are every linear layer of the decoder with ``lora_target_linear``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fragdoctor.estimation.recipes.accelerate import complete_fsdp
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import (
    AUTO,
    HARMLESS_IN_TRAINING,
    LOSS_IN_PARTS,
    Becomes,
    Format,
    Matters,
    Reading,
    Rule,
    count,
    harmless,
    is_off,
    name,
    one_of,
    optimizer,
    targets,
    text_of,
    when_on,
)
from fragdoctor.estimation.recipes.trainer import (
    COMPILED,
    EVALUATION,
    GENERATION,
    LORA_RULES,
    TRAINER_RULES,
    complete_evaluation,
    count_preferences,
    deepspeed_reference,
    without_adapter,
)
from fragdoctor.model.recipe import Bearing

_ADAPTER: Final = one_of(
    {"lora": "lora", "qlora": "lora", "none": None, "": None},
    "is no adapter that an estimate knows",
)


def _bf16(value: Any) -> str | None:
    """Return bf16 for ``true`` and ``full``, and for ``auto``, which takes it where it can."""
    return "bf16" if value == AUTO or not is_off(value) else None


def _checkpointing(value: Any) -> str | None:
    if is_off(value):
        return None
    return "full"


def _plugins(value: Any) -> str | None:
    """Return what a plugin means: which ones save memory is said by their entries, but for one."""
    return "fused" if "CutCrossEntropy" in str(value) else None


_RULES: Final[dict[str, Rule]] = {
    "base_model": Becomes("model", name),
    **TRAINER_RULES,
    "micro_batch_size": Becomes("batch", count),
    "sequence_len": Becomes("seq", count),
    "optimizer": Becomes("optimizer", optimizer),
    "gradient_checkpointing": Becomes("checkpointing", _checkpointing),
    "fsdp_config.activation_checkpointing": Becomes("checkpointing", when_on("full")),
    "fsdp_config.offload_params": Becomes("offload_fsdp", when_on(True)),
    "bf16": Becomes("mixed", _bf16),
    "bfloat16": Becomes("mixed", _bf16),
    "float16": Becomes("mixed", when_on("fp16")),
    "adapter": Becomes("adapter", _ADAPTER),
    "lora_r": Becomes("rank", count),
    "lora_target_modules": Becomes("targets", targets),
    "peft_use_dora": Becomes("dora", when_on(True)),
    "load_in_4bit": Becomes("quantised", when_on("int4")),
    "load_in_8bit": Becomes("quantised", when_on("int8")),
    "flash_attention": Becomes("attention", when_on("flash")),
    "sdp_attention": Becomes("attention", when_on("sdpa")),
    "flex_attention": Becomes("attention", when_on("flash")),
    "sage_attention": Becomes("attention", when_on("flash")),
    "xformers_attention": Becomes("attention", when_on("sdpa")),
    "eager_attention": Becomes("attention", when_on("eager")),
    "activation_offloading": Becomes("offload_activations", when_on(True)),
    "world_size": Becomes("n_gpus", count),
    "dp_shard_size": Becomes("shard_degree", count),
    "context_parallel_size": Becomes("context_parallel", count),
    "sequence_parallel_degree": Becomes("context_parallel", count),
    "tensor_parallel_size": Becomes("tensor_parallel", count),
    **LORA_RULES,
    "plugins": Becomes("logits", _plugins),
    "chunked_cross_entropy": Matters(LOSS_IN_PARTS),
    "flash_attn_cross_entropy": Matters(LOSS_IN_PARTS),
    "cut_cross_entropy": Becomes("logits", when_on("fused")),
    "liger_fused_linear_cross_entropy": Becomes("logits", when_on("fused")),
    "liger_cross_entropy": Matters(LOSS_IN_PARTS),
    "liger_rms_norm": Matters("fused norms keep less than is counted"),
    "liger_layer_norm": Matters("fused norms keep less than is counted"),
    "liger_glu_activation": Matters("a fused activation keeps less than is counted"),
    "liger_swiglu": Matters("a fused activation keeps less than is counted"),
    "liger_rope": Matters("fused rotary embeddings keep less than is counted"),
    "lora_mlp_kernel": Matters("fused kernels of adapters keep less than is counted"),
    "lora_qkv_kernel": Matters("fused kernels of adapters keep less than is counted"),
    "lora_o_kernel": Matters("fused kernels of adapters keep less than is counted"),
    "unsloth_cross_entropy_loss": Matters(LOSS_IN_PARTS),
    "selective_checkpointing": Matters("selective checkpointing is not counted: it needs more"),
    "layer_offloading": Matters("layers on the host are not counted: they need less"),
    "tiled_mlp": Matters("a feed-forward layer in tiles is not counted: it needs less"),
    "eval_batch_size": Matters(EVALUATION),
    "eval_sequence_len": Matters("an evaluation pass is not counted"),
    "unfrozen_parameters": Matters("all parameters are counted as trained: a part needs less"),
    "lora_on_cpu": Matters("adapters are counted on the GPU"),
    "lora_layers_to_transform": Matters("adapters are counted on all layers"),
    "peft_layers_to_transform": Matters("adapters are counted on all layers"),
    "embeddings_skip_upcast": Matters("fp32 embeddings are not counted"),
    "fp32_norms": Matters("fp32 norms are not counted"),
    "fp8": Matters("8-bit floating point is counted as bf16"),
    "qat": Matters("fake quantisation keeps copies, which are not counted: it needs more"),
    "quantize_moe_experts": Matters("quantised experts are counted with the rest"),
    "gptq": Matters("the model's own quantisation is counted where its config.json says it"),
    "model_quantization_config": Becomes("loads_as", name),
    "model_quantization_config_kwargs.dequantize": Becomes("dequantised", when_on(True)),
    "fused_attn_kernel": Matters("fused kernels of attention keep less than is counted"),
    "gpu_memory_limit": Matters("a limit is not heeded; --gpu SIZE says it"),
    "max_memory": Matters("a limit is not heeded; --gpu SIZE says it"),
    "device_map": Matters("a model spread over several GPUs is not counted"),
    "rl": Becomes("rl", text_of),
    "reward_model": Matters("the head of a reward model is not counted"),
    "process_reward_model": Matters("the head of a reward model is not counted"),
    "num_labels": Matters("the head of a classifier is not counted"),
    "trl.use_vllm": Matters(GENERATION),
    "trl.max_completion_length": Becomes("completion", count),
    "vllm": Matters(GENERATION),
    "relora": Matters("ReLoRA's merging is not counted"),
    "auto_find_batch_size": TRAINER_RULES["auto_find_batch_size"],
    "torch_compile": Matters(COMPILED),
    "deepcompile": Matters(COMPILED),
    "dion_rank_fraction": Matters("states of Dion are not counted by rank"),
    "image_size": Matters("pictures are not counted: they need more"),
    "resize_token_embeddings_to_32x": Matters("a few more rows of the embedding are not counted"),
}

_NEEDS_REFERENCE: Final = ("dpo", "ipo", "kto")
_PAIRED: Final = ("dpo", "ipo", "orpo", "simpo", "cpo")


def _complete(reading: Reading, entries: Entries) -> None:
    deepspeed_reference(reading, entries)
    if reading.value("mixed"):
        mixed = reading.facts["mixed"]
        reading.take("weights", mixed.value, mixed.key, mixed.text)
    reading.take("optimizer", "adamw-fused", "optimizer", "adamw_torch_fused", is_default=True)
    if reading.unsayable.get("optimizer"):
        reading.drop("optimizer", "")
    reading.take("batch", 1, "micro_batch_size", 1, is_default=True)
    reading.take("seq", 512, "sequence_len", 512, is_default=True)
    _complete_adapter(reading, entries)
    _complete_quantisation(reading)
    _complete_loss_of_preferences(reading)
    activation = text_of(entries.get("gradient_checkpointing"))
    if "offload" in activation:
        key = "gradient_checkpointing"
        reading.take("offload_activations", True, key, activation)
    if not is_off(entries.get("fsdp_config")) or any(k.startswith("fsdp_config.") for k in entries):
        reading.take("engine", "fsdp", "fsdp_config", "FSDP", is_default=True)
    if "fsdp_config.fsdp_version" in entries or "fsdp_version" in entries:
        reading.take("engine", "fsdp", "fsdp_version", "FSDP", is_default=True)
    if not is_off(reading.value("shard_degree")):
        reading.take("engine", "fsdp", "dp_shard_size", "FSDP", is_default=True)
    complete_evaluation(reading)
    complete_fsdp(reading, entries)


def _complete_adapter(reading: Reading, entries: Entries) -> None:
    if reading.value("adapter") is None:
        without_adapter(reading, "no adapters are trained")
        if reading.facts.get("quantised") and "adapter" not in reading.unsayable:
            reading.drop("quantised", "without an adapter nothing is quantised")
        return
    if not is_off(entries.get("lora_target_linear")):
        found = reading.facts.pop("targets", None)
        if found is not None and found.value != "all-linear":
            reading.leave(found.key, found.text, Bearing.NONE, "lora_target_linear names them all")
        reading.take("targets", "all-linear", "lora_target_linear", "true")
    reading.take("rank", 8, "lora_r", 8, is_default=True)
    reading.take("targets", "q_proj,v_proj", "lora_target_modules", "as PEFT", is_default=True)


def _complete_quantisation(reading: Reading) -> None:
    """Tell a checkpoint that is stored quantised and used so from one that is not."""
    loads = reading.facts.pop("loads_as", None)
    if loads is not None and not reading.value("dequantised"):
        reason = "quantisation on load is counted where the model's config.json has it"
        reading.leave(loads.key, loads.text, Bearing.MATTERS, reason)
    elif loads is not None:
        reading.leave(loads.key, loads.text, Bearing.NONE, "it is dequantised")


def _complete_loss_of_preferences(reading: Reading) -> None:
    found = reading.facts.pop("rl", None)
    reading.drop("completion", "a limit of the answer")
    if found is None:
        return
    reading.leave(found.key, found.text, Bearing.NONE, "see the notes")
    count_preferences(
        reading,
        f"rl {found.text}: ",
        is_paired=found.value in _PAIRED,
        needs_reference=found.value in _NEEDS_REFERENCE and reading.value("adapter") is None,
        generates=found.value in ("grpo", "gdpo", "ebft"),
    )


FORMAT: Final = Format(
    title="Axolotl recipe",
    signs=(
        frozenset({"base_model", "micro_batch_size"}),
        frozenset({"base_model", "sequence_len"}),
        frozenset({"base_model", "adapter"}),
        frozenset({"base_model", "datasets"}),
        frozenset({"base_model", "pretraining_dataset"}),
    ),
    rules=MappingProxyType(_RULES),
    harmless=harmless(
        HARMLESS_IN_TRAINING,
        r"""
        model_type base_model_ sample_packing pad_to_sequence train_on_inputs
        lora_(fan_in|model_dir|target_linear) is_(llama|mistral|falcon|qwen) skip_prepare
        processor_type gradient_checkpointing_kwargs fsdp_ save_ saves_ rl_beta loss_watchdog
        pretraining_ pretrain_ field_ eval_ torchdistx ddp$ multipack batch_flattening
        experimental hub_ trl use_pose pose_ bnb_config peft$ rope_scaling overrides_of
        qlora_sharded flash_attn_(fuse|rms) dpo_ kto_ orpo_ simpo_ dataset unk_
        additional_special fix_untrained reinit low_cpu gemma4_hybrid scaling_softmax
        use_kernels use_scattermoe experts_implementation mean_resizing embedding generation_
        num_generation skip_move merge pad_to_multiple curriculum excess_length min_sample
        max_prompt_len center_rewards default_system axolotl auto_resume gc_steps
        dynamic_checkpoint local_rank chat_ adam_ gpu_ids type$ bench float32 ring_attn
        heads_k_stride quantization kd_ use_onebit group_ remove_
        """,
    ),
    sections=("fsdp_config",),
    references=("deepspeed",),
    complete=_complete,
)  # fmt: skip
