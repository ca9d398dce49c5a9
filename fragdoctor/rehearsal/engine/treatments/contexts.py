"""How models are called: precision, saved tensors on the host, no graph, and fused attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import unquote

import torch
from torch.utils._pytree import tree_map_only

from fragdoctor.rehearsal.engine import wrap
from fragdoctor.rehearsal.engine.calls import (
    Training,
    around_models,
    at_first_call,
    before_backward,
    put_model_call,
)
from fragdoctor.rehearsal.engine.memory_history import users_line


def autocast(_: str) -> None:
    """Compute forward passes and losses in bfloat16 where that is safe."""
    _until_backward(lambda: torch.autocast("cuda", torch.bfloat16), evaluates=True)


def bfloat16_parameters(_: str) -> None:
    """Hold parameters in bfloat16; models still get and return what the program has in float32."""

    def moved(move: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        return move(model.bfloat16(), *args, **kwargs)

    for name in ("cuda", "to"):
        wrap(torch.nn.Module, name, moved)
    at_first_call(lambda model: model.bfloat16())  # it may have been made on the GPU

    def called(call: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.float32, torch.bfloat16)
        return _cast(call(model, *args, **kwargs), torch.bfloat16, torch.float32)

    put_model_call(called)


def _cast(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """Return what models are given or return with its tensors of one type in another."""
    return tree_map_only(torch.Tensor, lambda x: x.to(after) if x.dtype == before else x, tree)


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
