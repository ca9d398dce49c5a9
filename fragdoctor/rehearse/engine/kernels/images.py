"""Interpolation, pooling, padding, patches: kernels that copy what does not lie in one piece.

A gradient of ``torch.cat`` is a part of a larger tensor, as in each decoder of a U-Net, and one of
``sum`` is one value for all. Read off PyTorch's own allocator, kernel by kernel
(``UpSample*.cu``, ``*Pool*.cu``, ``ReflectionPad.cu``, ``Im2Col.cu``, ``Col2Im.cu``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from fragdoctor.rehearse.engine.kernels.steps import (
    Call,
    Free,
    Out,
    Step,
    Temp,
    copied_unless_dense,
    n_bytes,
    rule,
)

SIZES: Final = ("1d", "2d", "3d")
NEAREST: Final = (
    *(f"upsample_nearest{n}" for n in SIZES), *(f"_upsample_nearest_exact{n}" for n in SIZES)
)  # fmt: skip
SMOOTH: Final = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
)
ANTIALIASED: Final = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
POOLS: Final = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
OF_INPUT_TOO: Final = ("max_pool2d_with_indices_backward", "avg_pool2d_backward")


def _backward(*names: str) -> list[str]:
    return [f"{name}_backward" for name in names]


@rule(*NEAREST, *ANTIALIASED, *POOLS, "adaptive_max_pool2d", "reflection_pad2d")
@rule(*_backward(*NEAREST, *SMOOTH, *ANTIALIASED, "_adaptive_avg_pool2d", "reflection_pad2d"))
@rule(*_backward("max_pool3d_with_indices", "avg_pool3d", "adaptive_max_pool2d"))
def _first_copied(call: Call) -> Iterable[Step]:
    """The first argument is copied: the input, or the gradient of the result."""
    yield from call.results
    yield from _in_one_piece(call.args[0])


@rule(*OF_INPUT_TOO)
def _both_copied(call: Call) -> Iterable[Step]:
    yield from call.results
    for tensor in call.args[:2]:
        yield from _in_one_piece(tensor)


@rule("_adaptive_avg_pool2d")
def _copied_first(call: Call) -> Iterable[Step]:
    yield from _in_one_piece(call.args[0])
    yield from call.results


@rule("roll")
def _copied(call: Call) -> Iterable[Step]:
    yield from call.results
    yield from copied_unless_dense(call.args[0])


@rule("im2col", "col2im")
def _patches(call: Call) -> Iterable[Step]:
    """The result is first made as large as the input."""
    size = n_bytes(call.args[0])
    if size >= call.outs[0].n_bytes:
        call.outs[0].n_bytes = size
        yield Out(0)
        yield from copied_unless_dense(call.args[0])
        return
    first = Temp(size)
    yield first
    yield from copied_unless_dense(call.args[0])
    yield from (Out(0), Free(first))


def _in_one_piece(tensor: torch.Tensor) -> Iterable[Step]:
    """Return the copy of what is dense neither in the usual order nor with channels last."""
    if tensor.dim() == len("NCHW") and tensor.is_contiguous(memory_format=torch.channels_last):
        return []
    return copied_unless_dense(tensor)
