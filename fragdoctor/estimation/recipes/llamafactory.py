"""LLaMA-Factory's YAML and JSON (https://llamafactory.readthedocs.io/en/latest/advanced/arguments.html).

It recomputes activations unless told otherwise, loads weights in the dtype of ``bf16`` or
``fp16``, and casts what is trained up to fp32 unless ``pure_bf16`` is set (``hparams/``,
``model/adapter.py``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fragdoctor.estimation.recipes.accelerate import complete_fsdp
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import (
    HARMLESS_IN_TRAINING,
    Format,
    Matters,
    Reading,
    Rule,
    UnsayableError,
    attention,
    count,
    facts,
    harmless,
    is_off,
    matters,
    name,
    one_of,
    targets,
    text_of,
    when_on,
)
from fragdoctor.estimation.recipes.trainer import (
    LORA_RULES,
    REFERENCE,
    TRAINER_RULES,
    complete_evaluation,
    count_preferences,
    deepspeed_reference,
    scales_unquantised,
    without_adapter,
)
from fragdoctor.model.recipe import Bearing

_TUNING: Final = one_of(
    {"lora": "lora", "full": None},
    "trains what an estimate cannot count",
)


def _bits(value: Any) -> str | None:
    """Return the dtype of a base quantised on load.

    Raises:
        UnsayableError: neither 4 nor 8 bits.
    """
    if is_off(value):
        return None
    known = {"4": "int4", "8": "int8"}
    if str(value) not in known:
        raise UnsayableError("bits are no quantisation that an estimate knows")
    return known[str(value)]


def _unknown_optimizer(value: Any) -> None:
    if not is_off(value):
        raise UnsayableError("is no optimizer that an estimate knows")


_PICTURES: Final = Matters("pictures and videos are not counted: they need more")
_RULES: Final[dict[str, Rule]] = (
    {key: rule for key, rule in TRAINER_RULES.items() if key != "gradient_checkpointing"}
    | LORA_RULES
    | facts(
        ("model", name, "model_name_or_path"),
        ("checkpointing", when_on("none"), "disable_gradient_checkpointing"),
        ("seq", count, "cutoff_len"),
        ("adapter", _TUNING, "finetuning_type"),
        ("rank", count, "lora_rank"),
        ("targets", targets, "lora_target"),
        ("dora", when_on(True), "use_dora"),
        ("quantised", _bits, "quantization_bit"),
        ("attention", attention, "flash_attn"),
        ("pure", when_on("bf16"), "pure_bf16"),
        ("optimizer", when_on("galore"), "use_galore"),
        ("optimizer", when_on("muon"), "use_muon"),
        ("optimizer", _unknown_optimizer, "use_apollo use_badam use_adam_mini"),
        ("task", text_of, "stage"),
        ("method", text_of, "quantization_method"),
        ("double", lambda value: "no" if is_off(value) else None, "double_quantization"),
        ("logits", when_on("fused"), "enable_liger_kernel"),
        ("n_gpus", count, "ray_num_workers"),
    )
    | matters(f"""
        galore_rank: GaLore's states are counted at rank 128
        additional_target: layers trained beside the adapters are not counted
        pissa_init: the initialisation of adapters (PiSSA) is not counted
        use_unsloth: Unsloth's kernels and loss keep less than is counted
        use_unsloth_gc: checkpoints on the host are not counted: they need less
        upcast_layernorm: fp32 norms are not counted: they need more
        upcast_lmhead_output: fp32 logits are counted once
        shift_attn: shifted attention is not counted
        mixture_of_depths: skipped layers are counted
        use_asft_loss ref_model: {REFERENCE}
        reward_model: a reward model is not counted: it needs more
        image_max_pixels image_resolution video_max_pixels video_resolution video_maxlen: \
            pictures and videos are not counted: they need more
        freeze_vision_tower: only the language model is counted, not the pictures' tower
        freeze_language_model: the language model is counted as trained
        fp8: 8-bit floating point is counted as bf16
        resize_vocab: more rows of the embedding are not counted
        use_hyper_parallel: hyper-parallel training is not counted
        use_mca: training by Megatron-Core is not counted
        use_megatron_bridge: training by Megatron is not counted
        use_kt: experts on the CPU (KTransformers) are counted on the GPU
        predict_with_generate: generation in an evaluation is not counted
        adapter_name_or_path: an adapter that is loaded is counted as trained anew
    """)
)

_FEWER: Final = ("pt", "sft")


def _complete(reading: Reading, entries: Entries) -> None:
    deepspeed_reference(reading, entries)
    found = reading.facts.pop("mixed", None)
    pure = reading.facts.pop("pure", None)
    _method(reading)
    if "adapter" not in reading.facts and "finetuning_type" not in entries:
        reading.default("adapter", "lora", "finetuning_type")
    if pure is not None:
        reading.take("weights", "bf16", pure.key, pure.text)
        if reading.value("adapter") is None:
            reading.take("dtype", "bf16", pure.key, pure.text)
    elif found is not None:
        reading.take("mixed", found.value, found.key, found.text)
        kept = found.value if reading.value("adapter") else "fp32"
        reading.take("weights", kept, found.key, found.text)
    else:
        loaded = "auto" if reading.value("adapter") else "fp32"
        reading.default("weights", loaded, "bf16", "not set")
    _defaults(reading)
    if reading.value("adapter") is None:
        without_adapter(reading, "no adapters are trained")
    _task(reading)
    complete_evaluation(reading)
    complete_fsdp(reading, entries)


def _method(reading: Reading) -> None:
    if reading.facts.pop("double", None) is not None:
        scales_unquantised(reading)
    counted = reading.value("quantised")
    if reading.value("method") in ("bnb", "bitsandbytes") or not counted:
        reading.drop("method")
    else:
        reading.drop("method", f"is counted as {counted} of bitsandbytes", Bearing.MATTERS)


def _defaults(reading: Reading) -> None:
    reading.default("batch", 8, "per_device_train_batch_size")
    reading.default("seq", 2048, "cutoff_len")
    reading.default("checkpointing", "full", "disable_gradient_checkpointing", "false")
    if reading.value("checkpointing") == "none":
        reading.drop("checkpointing", "no activations are recomputed, as counted")
    reading.default("optimizer", "adamw-fused", "optim", "adamw_torch_fused")
    if reading.value("adapter"):
        reading.default("rank", 8, "lora_rank")
        reading.default("targets", "all-linear", "lora_target", "all")


def _task(reading: Reading) -> None:
    task = reading.drop("task", "see the notes" * (reading.value("task") not in _FEWER))
    if task is None:
        return
    count_preferences(
        reading,
        f"stage {task.text}: ",
        is_paired=task.value in ("dpo", "rm"),
        needs_reference=task.value in ("dpo", "kto", "ppo") and reading.value("adapter") is None,
        generates=task.value == "ppo",
    )


FORMAT: Final = Format(
    title="LLaMA-Factory recipe",
    signs=(
        frozenset({"model_name_or_path", "finetuning_type"}),
        frozenset({"model_name_or_path", "cutoff_len"}),
        frozenset({"model_name_or_path", "template", "stage"}),
        frozenset({"model_name_or_path", "template", "dataset"}),
    ),
    rules=MappingProxyType(_RULES),
    harmless=harmless(
        HARMLESS_IN_TRAINING,
        r"""
        gradient_checkpointing
        video_fps image_min image_do_pan video_min freeze_multi_modal packing neat_packing pref_
        kto_ dpo_ simpo_ ppo_ use_(dft|eaft) eaft_ asft_ pissa_(iter|convert) galore_ apollo_
        badam_ oft_ freeze_(trainable|extra) use_llama_pro quantization_(type|device)
        rope_scaling fp8_ fsdp_ ray_ resize_ new_special add_(tokens|special) train_on_prompt
        mask_history tool_ default_system enable_thinking use_reentrant infer_ export_ vllm_
        sglang_ generating temperature top_ repetition max_new_tokens adapter_folder ref_model_
        reward_model_ create_new_adapter moe_aux train_from_scratch low_cpu offload_folder
        use_kv_cache use_v1 print_param init_special kt_ compute_accuracy disable_shuffling
        callback enable_torch crop_ audio_ use_audio hyper_parallel megatron_bridge deepspeed$
        split_special preserve_thinking max_concurrent bf16$ recompute
        """,
    ),
    references=("deepspeed",),
    complete=_complete,
)  # fmt: skip
