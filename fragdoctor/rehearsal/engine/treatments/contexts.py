"""How models are called: autocast, saved tensors on the host, no graph, and fused attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import unquote

import torch

from fragdoctor.rehearsal.engine.calls import (
    Training,
    around_models,
    at_first_call,
    before_backward,
)
from fragdoctor.rehearsal.engine.memory_history import users_line


def autocast(_: str) -> None:
    """Compute forward passes and losses in bfloat16 where that is safe."""
    _until_backward(lambda: torch.autocast("cuda", torch.bfloat16), evaluates=True)


def save_on_cpu(_: str) -> None:
    """Keep what forward passes save for the backward pass on the host."""
    _until_backward(lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def no_grad(argument: str) -> None:
    """Call models at some lines, ``a.py%3A23,a.py%3A31``, without recording a graph."""
    lines = {unquote(one) for one in argument.split(",")}

    def around(*_: Any) -> AbstractContextManager[Any] | None:
        return torch.no_grad() if users_line() in lines else None

    around_models(around)


def is_eager(model: Any) -> bool:
    """Return whether a Transformers model computes attention step by step, but need not."""
    config = getattr(model, "config", None)
    return (
        getattr(config, "_attn_implementation", "") == "eager"
        and bool(getattr(model, "_supports_sdpa", False))
        and hasattr(model, "set_attn_implementation")
    )


def fused_attention(_: str) -> None:
    """Let models of Transformers use PyTorch's fused kernels, which keep no matrix of scores."""

    def switch(model: Any) -> None:
        for module in model.modules():
            if is_eager(module):
                module.set_attn_implementation("sdpa")

    at_first_call(switch)


def _until_backward(
    make: Callable[[], AbstractContextManager[Any]], *, evaluates: bool = False
) -> None:
    """Enter a context at a model's first call in training, and leave it for the backward pass."""
    entered: list[AbstractContextManager[Any]] = []
    training = Training()

    def around(model: Any, given: Any) -> AbstractContextManager[Any] | None:
        if not training.includes(model, given):
            return make() if evaluates and not entered else None
        if not entered:
            context = make()
            context.__enter__()
            entered.append(context)
        return None

    def leave(*_: Any, **__: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    around_models(around)
    before_backward(leave)
