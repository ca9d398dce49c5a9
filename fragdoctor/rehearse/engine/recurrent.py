"""Recurrent layers, step by step: PyTorch's own kernels for a cell instead of cuDNN's for all.

What cuDNN keeps between the passes only its library says. PyTorch asks whether it is there in C++,
past the dispatcher, so these functions are given a kernel of their own.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch

from fragdoctor.rehearse.engine import values
from fragdoctor.rehearse.engine.dispatch import library_for, special

LAYERS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
OVERLOADS: Final = ("input", "data")


def _without_cudnn(op: Any, *args: Any, **kwargs: Any) -> Any:
    values.assume(op.overloadpacket.__name__, "it runs step by step, without cuDNN")
    with torch.backends.cudnn.flags(enabled=False):
        return op.decompose(*args, **kwargs)


@special("aten::_cudnn_rnn_flatten_weight")
def _flatten_weight(_op: Any, weights: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Lay the weights of a layer one after another into one buffer, as cuDNN wants them."""
    buffer: torch.Tensor = weights[0].new_empty(sum(weight.numel() for weight in weights))
    begin = 0
    for weight in weights:
        weight.set_(buffer.untyped_storage(), begin, weight.shape, weight.stride())
        begin += weight.numel()
    return buffer


def install(undo: ExitStack) -> None:
    """Put the steps in place of cuDNN's kernels until ``undo`` is closed."""
    library = library_for("aten", undo)
    for layer in LAYERS:
        for overload in OVERLOADS:
            kernel = partial(_without_cudnn, getattr(getattr(torch.ops.aten, layer), overload))
            for key in ("AutogradCUDA", "CUDA"):
                library.impl(f"{layer}.{overload}", kernel, key)
