"""Says what is not counted about entries that no option stands for, whatever the program.

Programs use the same words, so an entry is recognized by parts of its name. The first row that
matches wins.
"""

from __future__ import annotations

import re
from typing import Final

_ROWS: Final = (
    ((r"eval_batch_size$|^eval_sequence_len|^eval_accumulation|^predict_with_generate"
      r"|^validation\.enable$"),
     "an evaluation pass is not counted; larger than the training batch, it can need more"),
    (r"cross_entropy|num_output_chunks|upcast_lmhead|loss_parallel",
     "logits are counted in full; this kind of loss needs less"),
    (r"deepcompile|torch_compile$|^compile(\.enable|\.disable)?$|training\.compile|dynamo_backend",
     "memory that a compiler saves is not counted"),
    (r"fp8$|fp8_training|float8_linear|model\.converters|^backend$",
     "8-bit floating point is counted as bf16"),
    (r"^zero_quantized|quantizer\._component_|^qat\b|quantize_(moe|training)|^compression_training",
     "quantization during training is not counted"),
    (r"lora_dropout", "adapter dropout is not counted; it keeps one more input per adapter"),
    ((r"modules_to_save|additional_target|_trainable$|unfrozen|^freeze_|to_output|tunable|pissa_init|"
     "num_labels|lora_target_param|layers_to_transform|adapter_name|optim_target_modules"),
     "which parts of the model are trained is counted as usual"),
    (r"liger|unsloth(?!_gc)|lora_\w+_kernel|fused_attn", "fused kernels keep less than is counted"),
    (r"speculative|(reward|value|teacher|ref)\w*_?model|ref_checkpointer|use_asft|encoder\.\w+_(encoder|path)$",
     "a second model on the same GPU is not counted; it needs more"),
    (r"use_vllm|^vllm(_device|_gpu_\w+|_mode)?$|num_generations|max_generated",
     "generation on the same GPU is not counted; it needs more"),
    ((r"pixels|video_max|image_(size|res)|img_size|tiles|(patches|images)_per|vision_tower|limit_mm"
     r"|mm_processor_kwargs"), "images and audio are not counted; they need more"),
    (r"optimizer_in_b|step_in_backward",
     "gradients are counted until the step; freed in the backward pass, they need less"),
    (r"bucket|overlap_comm|(forward|stage3)_prefetch|async_tensor|fault_tolerance\.enable|kv_transfer|eplb|redundant",
     "these extra buffers are not counted; they need more"),
    (r"max_live_param|persistence|hpz_part|fsdp_wrap|mics_shard|sub_group",
     "weights are counted as gathered by default settings"),
    (r"selective|^ac_|memory_budget|partition_activ|number_checkpoints|recompute_activ",
     "--checkpointing says what is recomputed"),
    (r"offload(ing|_gb)?$|\.ratio$|on_cpu|cpu_checkpointing|unsloth_gc|use_kt",
     "other data on the host is counted on the GPU; the run needs less"),
    (r"cuda_?graph|compilation_config", "CUDA graphs are not counted"),
    (r"enable_lora|max_lora", "served adapters are not counted; they need more"),
    ((r"random_ltd\.enabled|curriculum\w*\.enabled|layer_drop|mixture_of_depths|sparse_attention|shift_attn"
     r"|tiled_mlp|padding_free|group_by_length"), "all layers and tokens are counted in full"),
    ((r"resize_(token|vocab)|embeddings_skip|fp32_norms|upcast_layernorm|neftune|hf_overrides"
     r"|rope_scaling|galore_rank|dion_rank"), "the model is counted as in its configuration"),
    (r"memory_limit|max_memory|device_map|kv_cache_memory|num_gpu_blocks|find_batch_size",
     "this limit is ignored; set it with --gpu SIZE and --batch"),
    (r"use_(mca|megatron_bridge|hyper_parallel)|decode_context", "its layout is not counted"),
)  # fmt: skip
_REASONS: Final = tuple((re.compile(pattern), reason) for pattern, reason in _ROWS)
_OF_MEMORY: Final = re.compile(
    r"offload|quanti[sz]|(?<!pin_)memory(?!_s)|parallel_(size|degree)$|(?<!re)shard(?!ing)|checkpointing|precision|kv_cache"
)


def reason_of(key: str) -> str:
    """Return what is not counted about an entry, or "" if nothing is known about it.

    ``key`` joins nested names with dots.
    """
    parts = ".".join(key.split(".")[-2:]), key.rpartition(".")[2]
    found = (reason for sign, reason in _REASONS if any(map(sign.search, parts)))
    return next(found, "")


def may_matter(key: str) -> bool:
    """Return whether the name of an unknown entry suggests that it affects memory."""
    return _OF_MEMORY.search(key.rpartition(".")[2].lower()) is not None
