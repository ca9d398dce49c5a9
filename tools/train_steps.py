"""Train small models of transformers and diffusers for two steps: the truth for the formulas.

This is an ordinary program: it runs on a GPU, or without one under ``fragdoctor rehearse``. Nothing
is downloaded. It needs torch, transformers and diffusers, and bitsandbytes for quantized bases;
only ``--table`` and ``--presets`` need fragdoctor.

    fragdoctor rehearse tools/train_steps.py --gpu h100 --unlimited --steps 10000 --allow-writes \
        -- -o tests/estimation/trained_steps.json
    python tools/train_steps.py --table tests/estimation/trained_steps.json
    python tools/train_steps.py --presets    # parameters, as the library builds them

A case is a configuration in the format of ``save_pretrained``, the class that a user would load,
and a batch. It measures ``torch.cuda.max_memory_allocated`` over two steps of AdamW, with the
library's own loss and with attention by ``scaled_dot_product_attention``. Formulas were changed
while looking at the cases of the split ``looked``; those of ``held-out`` were compared afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("fp32", "bf16", "amp-bf16")
LOOKED, HELD_OUT = "looked", "held-out"
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One model to train.

    Attributes:
        model: name of a class in the library, such as ``LlamaForCausalLM``.
        config: arguments for the class's configuration.
        lora: arguments for PEFT's ``LoraConfig``; {} means that all parameters are trained.
        seq: number of tokens; frames, patches and images follow from the configuration.
        quantised: ``nf4`` or ``int8`` to replace all linear layers except the head by those of
            bitsandbytes; needs bitsandbytes and its kernels.
        checkpointing: whether to use the library's own gradient checkpointing.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    batch: int
    seq: int = 0
    split: str = LOOKED
    package: str = "transformers"
    lora: Mapping[str, Any] = field(default_factory=dict)
    quantised: str = ""
    checkpointing: bool = False


def _llama(  # noqa: PLR0913, PLR0917 - in the order of a configuration
    hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int = 32000, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab,
        "max_position_embeddings": 4096, **more,
    }  # fmt: skip


def _encoder(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, **more,
    }  # fmt: skip


def _bart(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "d_model": width, "encoder_layers": layers, "decoder_layers": layers,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, **more,
    }  # fmt: skip


def _clip(text: Mapping[str, Any], vision: Mapping[str, Any], width: int) -> dict[str, Any]:
    return {"text_config": dict(text), "vision_config": dict(vision), "projection_dim": width}


MLA = {
    "kv_lora_rank": 256, "q_lora_rank": 384, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
LORA = {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
UNET = {
    "sample_size": 32, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "cross_attention_dim": 768, "attention_head_dim": 8,
}  # fmt: skip

SDXL = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip

CASES = (
    # Dense decoders
    Case("llama", "LlamaForCausalLM", _llama(1024, 6, 16, 16, 2816), 4, 1024),
    Case("llama-gqa", "LlamaForCausalLM", _llama(2048, 4, 32, 8, 8192, 128256), 1, 2048, HELD_OUT),
    Case("mistral", "MistralForCausalLM", _llama(1024, 6, 16, 4, 3584), 4, 512, HELD_OUT),
    Case("qwen2", "Qwen2ForCausalLM", _llama(896, 6, 14, 2, 4864, 151936), 2, 512),
    Case("qwen3", "Qwen3ForCausalLM", _llama(1024, 6, 16, 8, 3072, 50000, head_dim=128), 2, 1024,
         HELD_OUT),
    Case("gemma", "GemmaForCausalLM", _llama(1024, 4, 8, 1, 8192, 64000, head_dim=128), 2, 1024),
    Case("gemma2", "Gemma2ForCausalLM", _llama(1024, 6, 8, 4, 4096, 64000, head_dim=128), 2, 1024),
    Case("gemma3", "Gemma3ForCausalLM",
         _llama(1152, 6, 4, 1, 6912, 64000, head_dim=256, sliding_window=512), 2, 1024, HELD_OUT),
    Case("phi3", "Phi3ForCausalLM", _llama(1024, 6, 16, 16, 2816, pad_token_id=0), 4, 512),
    Case("granite", "GraniteForCausalLM", _llama(1024, 6, 16, 4, 4096), 2, 1024, HELD_OUT),
    Case("gpt2", "GPT2LMHeadModel",
         {"n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
         4, 1024),
    Case("gpt2-wide", "GPT2LMHeadModel",
         {"n_embd": 1600, "n_layer": 4, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
         2, 512, HELD_OUT),
    Case("pythia", "GPTNeoXForCausalLM",
         _encoder(1024, 6, 16, vocab_size=50304, max_position_embeddings=2048), 2, 1024),
    Case("gptj", "GPTJForCausalLM",
         {"n_embd": 1024, "n_layer": 6, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400},
         2, 1024, HELD_OUT),
    Case("phi", "PhiForCausalLM", _encoder(1024, 6, 16, vocab_size=51200), 2, 1024),
    Case("opt", "OPTForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "ffn_dim": 4096,
          "vocab_size": 50272, "word_embed_proj_dim": 1024}, 2, 1024),
    Case("bloom", "BloomForCausalLM",
         {"hidden_size": 1024, "n_layer": 6, "n_head": 16, "vocab_size": 64000}, 2, 512, HELD_OUT),
    Case("falcon", "FalconForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
          "vocab_size": 65024}, 2, 1024),
    Case("starcoder2", "Starcoder2ForCausalLM",
         _llama(1024, 6, 16, 2, 4096, 49152), 2, 1024, HELD_OUT),
    # Mixture-of-experts models
    Case("mixtral", "MixtralForCausalLM",
         _llama(1024, 4, 16, 4, 3584, num_local_experts=8, num_experts_per_tok=2), 2, 1024),
    Case("mixtral-16", "MixtralForCausalLM",
         _llama(768, 6, 12, 12, 2048, num_local_experts=16, num_experts_per_tok=4), 2, 512,
         HELD_OUT),
    Case("qwen2-moe", "Qwen2MoeForCausalLM",
         _llama(1024, 4, 16, 16, 2816, 50000, moe_intermediate_size=704, num_experts=16,
                num_experts_per_tok=4, shared_expert_intermediate_size=2816), 2, 1024),
    Case("qwen3-moe", "Qwen3MoeForCausalLM",
         _llama(1024, 4, 16, 4, 3072, 50000, moe_intermediate_size=768, num_experts=32,
                num_experts_per_tok=8, head_dim=64), 2, 1024, HELD_OUT),
    Case("deepseek-v2", "DeepseekV2ForCausalLM",
         _llama(1024, 4, 16, 16, 2816, moe_intermediate_size=704, n_routed_experts=16,
                n_shared_experts=2, num_experts_per_tok=4, first_k_dense_replace=1,
                n_group=1, topk_group=1, topk_method="greedy", **MLA), 2, 1024),
    Case("deepseek-v3", "DeepseekV3ForCausalLM",
         _llama(1024, 5, 16, 16, 2816, moe_intermediate_size=512, n_routed_experts=32,
                n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=2, n_group=4,
                topk_group=2, **MLA), 2, 1024, HELD_OUT),
    Case("gpt-oss", "GptOssForCausalLM",
         _llama(1024, 4, 16, 4, 1024, 50000, head_dim=64, num_local_experts=16,
                num_experts_per_tok=4, sliding_window=128), 2, 1024),
    # Encoders
    Case("bert", "BertForSequenceClassification", _encoder(768, 8, 12, vocab_size=30522), 16, 256),
    Case("bert-mlm", "BertForMaskedLM", _encoder(768, 6, 12, vocab_size=30522), 8, 512, HELD_OUT),
    Case("roberta", "RobertaForSequenceClassification",
         _encoder(768, 6, 12, vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
         8, 512, HELD_OUT),
    Case("roberta-mlm", "RobertaForMaskedLM",
         _encoder(768, 6, 12, vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
         8, 256),
    # Encoder-decoder models
    Case("t5", "T5ForConditionalGeneration",
         {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 4, "num_heads": 12,
          "vocab_size": 32128, "decoder_start_token_id": 0}, 4, 512),
    Case("flan-t5", "T5ForConditionalGeneration",
         {"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_layers": 6, "num_heads": 6,
          "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
          "decoder_start_token_id": 0},
         4, 512, HELD_OUT),
    Case("bart", "BartForConditionalGeneration", _bart(768, 4, 12, vocab_size=50265), 4, 512),
    Case("mbart", "MBartForConditionalGeneration", _bart(1024, 3, 16, vocab_size=64000), 4, 256,
         HELD_OUT),
    Case("whisper", "WhisperForConditionalGeneration", _bart(512, 6, 8, vocab_size=51865), 8, 128),
    Case("whisper-3", "WhisperForConditionalGeneration",
         _bart(1280, 4, 20, vocab_size=51866, num_mel_bins=128), 4, 256, HELD_OUT),
    # Images
    Case("vit", "ViTForImageClassification",
         _encoder(768, 8, 12, image_size=224, patch_size=16), 32),
    Case("vit-384", "ViTForImageClassification",
         _encoder(1024, 6, 16, image_size=384, patch_size=16), 8, 0, HELD_OUT),
    Case("deit", "DeiTForImageClassification",
         _encoder(384, 12, 6, image_size=224, patch_size=16), 32, 0, HELD_OUT),
    Case("clip", "CLIPModel",
         _clip(_encoder(512, 6, 8), _encoder(768, 6, 12, image_size=224, patch_size=32), 512), 64),
    Case("clip-14", "CLIPModel",
         _clip(_encoder(768, 6, 12), _encoder(1024, 8, 16, image_size=224, patch_size=14), 768), 16,
         0, HELD_OUT),
    # Diffusion
    Case("unet", "UNet2DConditionModel",
         {**UNET, "block_out_channels": [320, 640, 1280, 1280]}, 4, 77, package="diffusers"),
    Case("unet-small", "UNet2DConditionModel",
         {**UNET, "sample_size": 64, "block_out_channels": [128, 256, 512, 512]}, 4, 77, HELD_OUT,
         "diffusers"),
    Case("dit", "DiTTransformer2DModel",
         {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 8, "sample_size": 32,
          "patch_size": 2}, 16, package="diffusers"),
    Case("dit-small", "DiTTransformer2DModel",
         {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 12, "sample_size": 64,
          "patch_size": 2}, 8, 0, HELD_OUT, "diffusers"),
    # Adapters
    Case("lora", "LlamaForCausalLM", _llama(1024, 6, 16, 16, 2816), 4, 1024, lora=LORA),
    Case("lora-linear", "LlamaForCausalLM", _llama(1024, 6, 16, 4, 3584), 4, 512, HELD_OUT,
         lora={**LORA, "target_modules": "all-linear"}),
    Case("dora", "LlamaForCausalLM", _llama(1024, 6, 16, 16, 2816), 4, 1024,
         lora={**LORA, "use_dora": True}),
    Case("dora-linear", "LlamaForCausalLM", _llama(1024, 6, 16, 4, 3584), 4, 512, HELD_OUT,
         lora={**LORA, "use_dora": True, "target_modules": "all-linear"}),
    # State space models
    Case("mamba", "MambaForCausalLM",
         {"hidden_size": 768, "num_hidden_layers": 2, "vocab_size": 50280}, 2, 128),
    Case("mamba-long", "MambaForCausalLM",
         {"hidden_size": 512, "num_hidden_layers": 3, "vocab_size": 4000}, 4, 256),
    Case("mamba-wide", "MambaForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 50280}, 4, 64, HELD_OUT),
    # A second set with other widths and architectures, compared with the formulas before any of
    # them was used to fit the formulas
    Case("smollm", "LlamaForCausalLM",
         _llama(960, 8, 15, 5, 2560, 49152, tie_word_embeddings=True), 4, 512),
    Case("llama-biases", "LlamaForCausalLM",
         _llama(1280, 5, 8, 8, 3456, head_dim=160, attention_bias=True, mlp_bias=True), 2, 1024,
         HELD_OUT),
    Case("qwen3-tied", "Qwen3ForCausalLM",
         _llama(1024, 5, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), 1, 1024),
    Case("gemma3-small", "Gemma3ForCausalLM",
         _llama(640, 12, 4, 1, 2048, 262144, head_dim=256, sliding_window=512), 1, 1536, HELD_OUT),
    Case("deepseek-direct", "DeepseekV2ForCausalLM",
         _llama(768, 5, 12, 12, 2048, moe_intermediate_size=512, n_routed_experts=8,
                n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
                n_group=1, topk_group=1, topk_method="greedy", **{**MLA, "q_lora_rank": None}),
         2, 768),
    Case("deepseek-deep", "DeepseekV3ForCausalLM",
         _llama(512, 8, 8, 8, 1536, moe_intermediate_size=384, n_routed_experts=16,
                n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2,
                topk_group=1, **MLA), 4, 512, HELD_OUT),
    Case("phi3-gqa", "Phi3ForCausalLM",
         _llama(1536, 5, 24, 8, 4096, pad_token_id=0, sliding_window=512, eos_token_id=1,
                bos_token_id=1), 1, 1536),
    Case("falcon-new", "FalconForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16,
          "num_kv_heads": 4, "new_decoder_architecture": True, "vocab_size": 65024}, 2, 768,
         HELD_OUT),
    Case("falcon-rw", "FalconForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "alibi": True,
          "multi_query": False, "parallel_attn": False, "bias": True, "vocab_size": 50304},
         2, 1024),
    Case("opt-350m", "OPTForCausalLM",
         {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "ffn_dim": 4096,
          "vocab_size": 50272, "word_embed_proj_dim": 512, "do_layer_norm_before": False}, 4, 512,
         HELD_OUT),
    Case("neox-serial", "GPTNeoXForCausalLM",
         _encoder(1536, 5, 12, vocab_size=50432, max_position_embeddings=2048,
                  use_parallel_residual=False), 1, 1536),
    Case("mixtral-top1", "MixtralForCausalLM",
         _llama(1024, 5, 16, 8, 2816, num_local_experts=4, num_experts_per_tok=1), 4, 512,
         HELD_OUT),
    Case("qwen2-window", "Qwen2ForCausalLM",
         _llama(1024, 8, 16, 4, 2816, 64000, use_sliding_window=True, sliding_window=256,
                max_window_layers=4), 2, 1024),
    Case("granite-tied", "GraniteForCausalLM",
         _llama(1536, 5, 12, 4, 4096, 49155, tie_word_embeddings=True), 2, 768, HELD_OUT),
    Case("whisper-tiny", "WhisperForConditionalGeneration", _bart(384, 4, 6, vocab_size=51865),
         16, 224),
    Case("whisper-small", "WhisperForConditionalGeneration", _bart(768, 6, 12, vocab_size=51865),
         8, 448, HELD_OUT),
    Case("vit-huge", "ViTForImageClassification",
         _encoder(1280, 5, 16, image_size=224, patch_size=14), 16),
    Case("vit-32", "ViTForImageClassification",
         _encoder(768, 10, 12, image_size=384, patch_size=32, num_labels=1000), 32, 0, HELD_OUT),
    Case("mt5", "MT5ForConditionalGeneration",
         {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 3, "num_heads": 12,
          "vocab_size": 100000, "decoder_start_token_id": 0}, 2, 512),
    Case("t5-uneven", "T5ForConditionalGeneration",
         {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 6, "num_decoder_layers": 2,
          "num_heads": 16, "vocab_size": 32128, "decoder_start_token_id": 0}, 4, 256, HELD_OUT),
    Case("bart-uneven", "BartForConditionalGeneration",
         {**_bart(1024, 6, 16, vocab_size=50264), "decoder_layers": 2}, 2, 768),
    Case("gpt2-medium", "GPT2LMHeadModel",
         {"n_embd": 1024, "n_layer": 8, "n_head": 16, "n_positions": 1024, "vocab_size": 50257,
          "activation_function": "gelu", "resid_pdrop": 0.0, "attn_pdrop": 0.0,
          "embd_pdrop": 0.0}, 2, 768, HELD_OUT),
    Case("starcoder2-mha", "Starcoder2ForCausalLM", _llama(768, 8, 12, 12, 3072, 49152), 4, 512),
    Case("xlm-roberta", "XLMRobertaForMaskedLM",
         _encoder(768, 6, 12, vocab_size=100002, max_position_embeddings=514, type_vocab_size=1),
         4, 256, HELD_OUT),
    Case("gpt-oss-small", "GptOssForCausalLM",
         _llama(768, 6, 12, 2, 768, 64000, head_dim=64, num_local_experts=8,
                num_experts_per_tok=2, sliding_window=128), 2, 768),
    Case("gemma2-long", "Gemma2ForCausalLM",
         _llama(768, 5, 4, 2, 3072, 64000, head_dim=256, sliding_window=512), 1, 1536, HELD_OUT),
    Case("mistral-window", "MistralForCausalLM",
         _llama(1280, 5, 20, 4, 4096, head_dim=96, sliding_window=256), 2, 1024),
    Case("phi-gqa", "PhiForCausalLM",
         _encoder(1280, 5, 20, vocab_size=51200, num_key_value_heads=4), 2, 768, HELD_OUT),
    Case("smollm3", "SmolLM3ForCausalLM",
         _llama(1024, 6, 16, 4, 4096, 64000, pad_token_id=0), 2, 1024),
    Case("qwen3-moe-wide", "Qwen3MoeForCausalLM",
         _llama(768, 5, 12, 4, 2048, 64000, moe_intermediate_size=1024, num_experts=8,
                num_experts_per_tok=2, head_dim=128), 4, 512, HELD_OUT),
    Case("dora-small", "Qwen2ForCausalLM", _llama(768, 6, 12, 4, 2048, 64000), 2, 512,
         lora={**LORA, "r": 64, "use_dora": True}),
    Case("lora-moe-free", "Qwen3ForCausalLM",
         _llama(1280, 6, 16, 4, 3584, 64000, head_dim=80), 2, 768, HELD_OUT,
         lora={**LORA, "r": 8, "target_modules": "all-linear"}),
    Case("unet-2", "UNet2DConditionModel",
         {**UNET, "sample_size": 96, "block_out_channels": [160, 320, 640, 640],
          "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024,
          "use_linear_projection": True}, 2, 77, package="diffusers"),
    Case("unet-xl", "UNet2DConditionModel", {**SDXL, "block_out_channels": [160, 320, 640]},
         2, 77, HELD_OUT, "diffusers"),
    Case("unet-shallow", "UNet2DConditionModel",
         {"sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
          "block_out_channels": [192, 384], "attention_head_dim": 12, "cross_attention_dim": 512,
          "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
          "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}, 8, 77, package="diffusers"),
    Case("unet-inpaint", "UNet2DConditionModel",
         {**UNET, "in_channels": 9, "sample_size": 48, "block_out_channels": [64, 128, 256, 256]},
         8, 77, HELD_OUT, "diffusers"),
    Case("unet-pixels", "UNet2DModel",
         {"sample_size": 64, "in_channels": 3, "out_channels": 3,
          "block_out_channels": [128, 256, 384, 512]}, 8, package="diffusers"),
    Case("unet-ddpm", "UNet2DModel",
         {"sample_size": 128, "in_channels": 3, "out_channels": 3, "layers_per_block": 2,
          "block_out_channels": [128, 128, 256, 256, 512, 512],
          "down_block_types": ["DownBlock2D"] * 4 + ["AttnDownBlock2D", "DownBlock2D"],
          "up_block_types": ["UpBlock2D", "AttnUpBlock2D"] + ["UpBlock2D"] * 4}, 4, 0, HELD_OUT,
         "diffusers"),
    Case("unet-plain", "UNet2DModel",
         {"sample_size": 96, "in_channels": 1, "out_channels": 1, "layers_per_block": 1,
          "block_out_channels": [96, 192, 288], "add_attention": False,
          "down_block_types": ["DownBlock2D"] * 3, "up_block_types": ["UpBlock2D"] * 3}, 8,
         package="diffusers"),
    Case("unet-checkpointed", "UNet2DConditionModel",
         {**UNET, "sample_size": 64, "block_out_channels": [128, 256, 512, 512]}, 8, 77, HELD_OUT,
         "diffusers", checkpointing=True),
    Case("unet-lora", "UNet2DConditionModel",
         {**UNET, "sample_size": 64, "block_out_channels": [160, 320, 640, 640]}, 4, 77,
         package="diffusers",
         lora={"r": 16, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}),
    # Quantized bases
    Case("qlora", "LlamaForCausalLM", _llama(1024, 6, 16, 16, 2816), 4, 1024, lora=LORA,
         quantised="nf4"),
    Case("qlora-linear", "LlamaForCausalLM", _llama(2048, 6, 16, 4, 5632), 2, 512, HELD_OUT,
         lora={**LORA, "target_modules": "all-linear"}, quantised="nf4"),
    Case("qlora-8", "LlamaForCausalLM", _llama(1024, 6, 16, 4, 3584), 2, 1024, lora=LORA,
         quantised="int8"),
    Case("qlora-checkpointed", "LlamaForCausalLM", _llama(2048, 8, 16, 8, 5632), 2, 1024, HELD_OUT,
         lora={**LORA, "target_modules": "all-linear"}, quantised="nf4", checkpointing=True),
    Case("lora-checkpointed", "LlamaForCausalLM", _llama(1024, 8, 16, 4, 3584), 4, 1024, lora=LORA,
         checkpointing=True),
    Case("checkpointed", "LlamaForCausalLM", _llama(1024, 8, 16, 4, 3584), 4, 1024, HELD_OUT,
         checkpointing=True),
    # Architectures that were added to the table after they were measured
    Case("olmo2", "Olmo2ForCausalLM", _llama(1024, 6, 16, 4, 2816, 50304), 2, 1024),
    Case("cohere", "CohereForCausalLM", _llama(1024, 6, 16, 4, 2816, 64000), 2, 1024, HELD_OUT),
    Case("stablelm", "StableLmForCausalLM",
         _llama(1024, 6, 16, 16, 2816, 50304, use_qkv_bias=True), 2, 1024),
    Case("granite-moe", "GraniteMoeForCausalLM",
         _llama(768, 5, 12, 4, 512, 49155, num_local_experts=16, num_experts_per_tok=4), 2, 768,
         HELD_OUT),
    Case("glm4", "Glm4ForCausalLM",
         _llama(1024, 6, 16, 2, 2816, 64000, head_dim=64, pad_token_id=0), 2, 768),
    Case("olmo", "OlmoForCausalLM", _llama(1024, 6, 16, 16, 2816, 50304), 2, 1024, HELD_OUT),
    Case("olmoe", "OlmoeForCausalLM",
         _llama(768, 5, 12, 12, 512, 50304, num_experts=16, num_experts_per_tok=4), 2, 768),
    Case("nemotron", "NemotronForCausalLM",
         _llama(1024, 6, 16, 4, 4096, 64000, head_dim=64), 2, 768, HELD_OUT),
    Case("mpt", "MptForCausalLM",
         {"d_model": 1024, "n_layers": 6, "n_heads": 16, "vocab_size": 50432, "max_seq_len": 2048},
         2, 1024),
    Case("bigcode", "GPTBigCodeForCausalLM",
         {"n_embd": 1024, "n_layer": 6, "n_head": 16, "n_positions": 2048, "vocab_size": 49152},
         2, 1024, HELD_OUT),
    Case("codegen", "CodeGenForCausalLM",
         {"n_embd": 1024, "n_layer": 6, "n_head": 16, "n_positions": 2048, "n_ctx": 2048,
          "vocab_size": 51200, "rotary_dim": 32}, 2, 768),
    Case("gpt-neo", "GPTNeoForCausalLM",
         {"hidden_size": 1024, "num_layers": 6, "num_heads": 16, "vocab_size": 50257,
          "attention_types": [[["global", "local"], 3]], "max_position_embeddings": 2048}, 2, 768,
         HELD_OUT),
    Case("distilbert", "DistilBertForSequenceClassification",
         {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522},
         8, 384),
    Case("umt5", "UMT5ForConditionalGeneration",
         {"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_layers": 4, "num_heads": 8,
          "vocab_size": 64000, "decoder_start_token_id": 0}, 4, 384),
    Case("cohere2", "Cohere2ForCausalLM",
         _llama(1024, 8, 16, 4, 2816, 64000, sliding_window=512), 1, 1024),
    Case("glm4-moe", "Glm4MoeForCausalLM",
         _llama(768, 5, 12, 4, 2048, 64000, moe_intermediate_size=512, n_routed_experts=8,
                num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, head_dim=64),
         2, 768),
    Case("exaone4", "Exaone4ForCausalLM",
         _llama(1024, 8, 16, 4, 2816, 64000, sliding_window=512, sliding_window_pattern=4), 1, 1024,
         HELD_OUT),
    Case("seed-oss", "SeedOssForCausalLM",
         _llama(1024, 6, 16, 4, 2816, 64000, head_dim=128, attention_dropout=0.0,
                residual_dropout=0.0), 2, 768),
    Case("persimmon", "PersimmonForCausalLM", _encoder(1024, 6, 16, vocab_size=64000), 2, 768,
         HELD_OUT),
    Case("ernie", "Ernie4_5ForCausalLM", _llama(1024, 6, 16, 2, 3072, 64000, use_bias=False,
                                                tie_word_embeddings=True), 2, 1024),
)  # fmt: skip


def config_of(case: Case) -> dict[str, Any]:
    """Return the configuration the way its library would write it to a file."""
    if case.package == "diffusers":
        return {"_class_name": case.model, **case.config}
    made = _transformers_config(case)
    stated = _stated(made, case.config)
    parts = {
        key: _stated(getattr(made, key), value)
        for key, value in case.config.items()
        if key.endswith("_config")
    }
    classes = {k: v for k, v in case.config.items() if k == "num_labels"}
    return {**stated, **parts, **classes, "architectures": [case.model]}


def _stated(made: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that determine shapes, without the many that are about generation."""
    words = (
        "drop",
        "model_type",
        "tie_",
        "act",
        "num_",
        "n_",
        "bias",
        "pattern",
        "types",
        "vocab",
        "implementation",
        "softcap",
        "use_",
        "size",
        "rank",
        "expand",
        "dim",
        "alibi",
        "feed_forward",
        "kernel",
        "positions",
    )
    skipped = ("token", "beam", "return", "labels", "use_cache", "id2", "chunk", "mask")
    return {
        key: value
        for key, value in made.to_dict().items()
        if isinstance(value, str | int | float | list)
        and (key in given or (any(w in key for w in words) and not any(w in key for w in skipped)))
    }  # fmt: skip


def _transformers_config(case: Case) -> Any:
    import transformers

    return getattr(transformers, case.model).config_class(**case.config)


@dataclass
class Program:
    """A model on the GPU and its batch.

    Attributes:
        target: what the output is compared with if the model does not compute a loss itself.
    """

    model: Any
    inputs: dict[str, Any]
    target: Any = None

    def loss(self) -> Any:
        """Run the forward pass and return the loss."""
        import torch

        outputs = self.model(**self.inputs)
        if self.target is None:
            return outputs.loss
        predicted = outputs.sample[:, : self.target.shape[1]]
        return torch.nn.functional.mse_loss(predicted.float(), self.target.float())


def built(case: Case, dtype: str) -> Program:
    """Return the program to train; call it with the GPU as the default device."""
    import torch

    if case.package == "diffusers":
        return _diffusion(case, dtype)
    import transformers

    config = _transformers_config(case)
    model = _converted(getattr(transformers, case.model)(config), dtype)
    if case.quantised:
        model = _quantised(model, case.quantised)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case.lora))
    n, seq = case.batch, case.seq
    tokens = torch.zeros((n, seq), dtype=torch.int64)
    classes = torch.zeros(n, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if config.model_type == "clip":
        side, length = config.vision_config.image_size, config.text_config.max_position_embeddings
        inputs = {
            "input_ids": torch.zeros((n, length), dtype=torch.int64), "return_loss": True,
            "pixel_values": torch.zeros((n, 3, side, side)),
        }  # fmt: skip
    elif case.model.endswith("ForImageClassification"):
        side = config.image_size
        inputs = {"pixel_values": torch.zeros((n, 3, side, side)), "labels": classes}
    elif config.model_type == "whisper":
        frames = torch.zeros((n, config.num_mel_bins, 2 * config.max_source_positions))
        inputs = {"input_features": frames, "labels": tokens}
    elif case.model.endswith("ForSequenceClassification"):
        inputs["labels"] = classes
    return Program(model, inputs)


def _quantised(model: Any, kind: str) -> Any:
    """Replace the linear layers by those of bitsandbytes, like transformers does."""
    import bitsandbytes
    import torch

    for name, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        size, bias = (linear.in_features, linear.out_features), linear.bias is not None
        if kind == "nf4":
            made = bitsandbytes.nn.Linear4bit(
                *size, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4", device="cpu"
            )
        else:
            made = bitsandbytes.nn.Linear8bitLt(
                *size, bias=bias, has_fp16_weights=False, device="cpu"
            )
        made.weight.requires_grad_(requires_grad=False)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, made.to("cuda"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind != "nf4"
    return model


def _converted(model: Any, dtype: str) -> Any:
    import torch

    return model.to(torch.bfloat16) if dtype == "bf16" else model


def _diffusion(case: Case, dtype: str) -> Program:
    import diffusers
    import torch

    model = _converted(getattr(diffusers, case.model)(**case.config), dtype)
    if case.checkpointing:
        model.enable_gradient_checkpointing()
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**case.lora))
    side, channels = case.config["sample_size"], case.config.get("in_channels", 4)
    noisy = torch.zeros((case.batch, channels, side, side))
    inputs = {"timestep": torch.zeros(case.batch, dtype=torch.int64)}
    if case.model.startswith("UNet"):
        inputs["sample"] = noisy
        if width := case.config.get("cross_attention_dim"):
            inputs["encoder_hidden_states"] = torch.zeros((case.batch, case.seq, width))
        if case.config.get("addition_embed_type"):
            inputs["added_cond_kwargs"] = {
                "text_embeds": torch.zeros((case.batch, 1280)),
                "time_ids": torch.zeros((case.batch, 6)),
            }
    else:
        inputs["hidden_states"] = noisy
        inputs["class_labels"] = torch.zeros(case.batch, dtype=torch.int64)
    channels = case.config.get("out_channels", channels)
    return Program(model, inputs, torch.zeros((case.batch, channels, side, side)))


def _narrowed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {
        key: _narrowed(value) if isinstance(value, dict)
        else value.bfloat16() if getattr(value, "dtype", None) is torch.float32
        else value
        for key, value in inputs.items()
    }  # fmt: skip


def trained(case: Case, dtype: str) -> tuple[int, int, int]:
    """Train two steps; return the numbers of all and trained parameters, and the peak in bytes."""
    import torch

    with torch.device("cuda"):
        program = built(case, dtype)
    model = program.model.train()
    if dtype == "bf16":
        program.inputs = _narrowed(program.inputs)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "amp-bf16"):
            loss = program.loss()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    n_parameters = sum(p.numel() for p in model.parameters())
    return n_parameters, n_trained, torch.cuda.max_memory_allocated()


def measured(cases: Sequence[Case], dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train all cases, and yield the row of each."""
    import diffusers
    import torch
    import transformers

    libraries = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, diffusers))
    machine = torch.cuda.get_device_name() if torch.version.cuda else "rehearsed"
    for case in cases:
        peaks = {}
        n_parameters = n_trained = 0
        for dtype in ("bf16",) if case.quantised else dtypes:
            try:
                n_parameters, n_trained, peaks[dtype] = trained(case, dtype)
            except Exception as e:  # noqa: BLE001 - the others are still worth having
                print(f"{case.name} {dtype}: {type(e).__name__}: {str(e)[:2000]}", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
        yield {
            "name": case.name, "split": case.split, "batch": case.batch, "seq": case.seq,
            "n_parameters": n_parameters, "n_trained": n_trained, "peak_allocated_bytes": peaks,
            "lora": dict(case.lora), "quantised": case.quantised,
            "checkpointing": case.checkpointing, "config": config_of(case),
            "source": f"{machine}, {libraries}",
        }  # fmt: skip


def errors_of(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return by how many parameters the formulas overcount, and the relative error of each peak."""
    from fragdoctor.estimation.config_json import shape_of_config
    from fragdoctor.estimation.formula import formula_footprint
    from fragdoctor.model.workload import Workload

    shape = shape_of_config(row["config"], row["name"])
    errors = {}
    for dtype, peak in row["peak_allocated_bytes"].items():
        seq = row["seq"]
        kept = {"nf4": "int4", "int8": "int8"}.get(row.get("quantised", ""), dtype)
        workload = Workload(
            shape, kept, batch=row["batch"], seq=seq, compute="9.0",
            checkpointing="full" if row.get("checkpointing") else "none", **adapters_of(row),
        )  # fmt: skip
        errors[dtype] = formula_footprint(workload).peak_allocated_bytes / peak - 1
    n_adapters = row["n_trained"] if row["lora"] else 0
    return shape.n_parameters + n_adapters - row["n_parameters"], errors


def adapters_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's LoRA as arguments for the formulas."""
    if not row["lora"]:
        return {}
    names = row["lora"]["target_modules"]
    targets = ("all-linear",) if names == "all-linear" else tuple(n.split(".")[0] for n in names)
    return {"lora_rank": row["lora"]["r"], "lora_targets": targets,
            "dora": row["lora"].get("use_dora", False)}  # fmt: skip


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the errors of the formulas, and how many of them are small."""
    from fragdoctor.errors import FragdoctorError

    found: list[float] = []
    for row in rows:
        head = f"{row['name']:14} {row['split']:9}"
        try:
            surplus, errors = errors_of(row)
        except FragdoctorError as e:
            print(f"{head} {e}")
            continue
        found += errors.values()
        cells = [
            f"{dtype} {row['peak_allocated_bytes'][dtype] / MIB:8.0f} MiB {100 * error:+6.2f} %"
            for dtype, error in errors.items()
        ]
        print(head, "  ".join(cells), f"parameters {surplus:+d}" if surplus else "")
    for limit in (0.05, 0.10):
        n = sum(abs(error) <= limit for error in found)
        print(f"within {100 * limit:.0f} %: {n} of {len(found)}")


def print_presets() -> None:
    """Print the parameters of each known model, and the errors of our and the published count."""
    import torch
    import transformers

    from fragdoctor.estimation.config_json import shape_of_config
    from fragdoctor.estimation.model_shapes import presets

    classes = {
        "t5": "T5ForConditionalGeneration", "bert": "BertModel", "roberta": "RobertaModel",
        "vit": "ViTForImageClassification", "clip": "CLIPModel",
        "whisper": "WhisperForConditionalGeneration",
    }  # fmt: skip
    for preset in presets().values():
        config = {k: v for k, v in preset.config.items() if k != "quantization_config"}
        kind = config.pop("model_type")
        made = transformers.AutoConfig.for_model(kind, pad_token_id=0, **config)
        with torch.device("meta"):
            if kind in classes:
                model = getattr(transformers, classes[kind])(made)
            else:
                model = transformers.AutoModelForCausalLM.from_config(made)
        built = sum(p.numel() for p in model.parameters())
        ours = shape_of_config(preset.config, preset.name).n_parameters
        print(f"{preset.name:24} {built:15,} {100 * (ours / built - 1):+8.4f} % "
              f"{100 * (preset.n_parameters / built - 1):+8.4f} %")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure, or compare with earlier measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="cases; else all")
    parser.add_argument("--split", choices=(LOOKED, HELD_OUT))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--presets", action="store_true")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args(argv)

    def is_wanted(name: str, split: str) -> bool:
        named = not options.names or name in options.names
        return named and options.split in (None, split)

    if options.presets:
        print_presets()
        return 0
    if options.table:
        rows = json.loads(options.table.read_text())
        print_table([row for row in rows if is_wanted(row["name"], row["split"])])
        return 0
    cases = [case for case in CASES if is_wanted(case.name, case.split)]
    rows, text = [], ""
    for row in measured(cases, options.dtypes.split(",")):
        rows.append(row)
        text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
        if options.output:
            options.output.write_text(text)
    if not options.output:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
