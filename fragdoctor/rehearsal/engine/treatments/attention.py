"""Attention of Transformers with PyTorch's fused kernels, which keep no matrix of scores."""

from __future__ import annotations

from typing import Any

from fragdoctor.rehearsal.engine.calls import at_first_call


def is_eager(model: Any) -> bool:
    """Return whether a Transformers model computes attention step by step, but need not."""
    config = getattr(model, "config", None)
    return (
        getattr(config, "_attn_implementation", "") == "eager"
        and bool(getattr(model, "_supports_sdpa", False))
        and hasattr(model, "set_attn_implementation")
    )


def fused(_: str) -> None:
    """Let models of Transformers use ``scaled_dot_product_attention``."""

    def switch(model: Any) -> None:
        for module in model.modules():
            if is_eager(module):
                module.set_attn_implementation("sdpa")

    at_first_call(switch)
