"""Attention of Transformers by PyTorch's fused kernels, which keep no matrix of scores."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from fragdoctor.rehearsal.engine.treatments.calls import around_models


def is_eager(model: Any) -> bool:
    """Whether a model of Transformers computes attention step by step, and need not."""
    config = getattr(model, "config", None)
    return (
        getattr(config, "_attn_implementation", "") == "eager"
        and bool(getattr(model, "_supports_sdpa", False))
        and hasattr(model, "set_attn_implementation")
    )


def fused(_: str, undo: ExitStack) -> None:
    """Let models of Transformers use ``scaled_dot_product_attention``."""
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def around(model: Any) -> AbstractContextManager[Any] | None:
        if model not in seen:
            seen.add(model)
            for module in model.modules():
                if is_eager(module):
                    module.set_attn_implementation("sdpa")
        return None

    around_models(around, undo)
