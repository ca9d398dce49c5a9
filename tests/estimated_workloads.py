"""Workloads whose peaks were recorded, rebuilt from their settings for the estimate.

``tests/estimation/recorded_peaks.json`` holds the settings and the figures: peaks of ordinary
training loops (three steps) under PyTorch 2.12.1's own CUDA allocator. The models are a GPT
(LayerNorm, packed qkv, GELU, untied head, 4096 learned positions) and a Llama (RMSNorm written out
or fused, rotary, SwiGLU, grouped heads); the loss is ``F.cross_entropy`` on the logits. Rows with a
``config`` were recorded later, after the formulas were final, with models written by somebody else:
a Llama that repeats keys and values itself, so that fp32 also has a fused kernel, and a T5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fragdoctor.estimation.architectures import Dimensions, parameters_of
from fragdoctor.estimation.config_json import shape_of_config
from fragdoctor.model.workload import Attention, ModelShape, Norm, Workload

RECORDED = Path(__file__).parent / "estimation" / "recorded_peaks.json"


def recorded_peaks() -> list[dict[str, Any]]:
    """Return the recorded runs."""
    rows: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return rows


def shape_of(s: dict[str, Any]) -> ModelShape:
    """Return the shape of a recorded model."""
    if "config" in s:
        return shape_of_config(s["config"], "a recorded run")
    is_gpt = s["family"] == "gpt"
    hidden, heads = s["hidden"], s["heads"]
    written_out = Norm.RMSNORM if s.get("fused_norm") else Norm.RMSNORM_WRITTEN_OUT
    dimensions = Dimensions(
        vocab=s["vocab"],
        hidden=hidden,
        n_layers=s["layers"],
        n_heads=heads,
        n_kv_heads=s.get("kv", heads),
        head_dim=hidden // heads,
        ffn=s.get("ffn", 4 * hidden),
        positions=4096 if is_gpt else 0,
        is_gated=not is_gpt,
        norm=Norm.LAYERNORM if is_gpt else written_out,
        qkv_bias=is_gpt,
        out_bias=is_gpt,
        mlp_bias=is_gpt,
        packed_qkv=is_gpt,
        tied_head=bool(s.get("tied")),
    )
    return ModelShape(
        name=s["family"],
        source="a recorded run",
        parameters=tuple(parameters_of(dimensions)),
        n_layers=s["layers"],
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=dimensions.n_kv_heads,
        head_dim=dimensions.head_dim,
        ffn=dimensions.ffn,
        vocab=s["vocab"],
        is_gated=not is_gpt,
        activation=s.get("activation", "gelu" if is_gpt else "silu"),
        norm=dimensions.norm,
        softmax_fp32=not is_gpt,
        tied_head=dimensions.tied_head,
        hidden_dropout=s.get("dropout", 0.1) if is_gpt else 0.0,
        attention_dropout=s.get("attention_dropout", 0.0),
        upcasts_logits=bool(s.get("upcasts_logits")),
    )


def workload_of(s: dict[str, Any]) -> Workload:
    """Return the workload of a recorded run."""
    return Workload(
        shape=shape_of(s),
        dtype=s["dtype"],
        optimizer=s.get("optimizer", "adamw"),
        batch=s["batch"],
        seq=s["seq"],
        attention=Attention(s.get("attention", "sdpa")),
        checkpointing=str(s["checkpointing"]) if s.get("checkpointing") else "none",
        grad_accumulation=s.get("grad_accumulation", 1),
        keeps_logits=bool(s.get("keeps_logits")),
        lora_rank=s.get("lora", 0),
        lora_targets=(s.get("lora_targets", "attention"),),
        compute="9.0",
    )
