"""Losses, softmax, dropout and normalization: kernels that request more than their results."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.reduction import accumulator_bytes, power_of_two, summed
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    after_results,
    copied_after,
    copied_before,
    in_order,
    n_bytes,
    rule,
)

in_order("native_dropout", "nll_loss2d_forward", order=(1, 0))
copied_after("_softmax", "_log_softmax", "rrelu_with_noise")
copied_after("_log_softmax_backward_data", places=(0, 1))
copied_after("nll_loss_forward", places=(0, 1, 2))
copied_after("nll_loss_backward", places=(2, 1, 0, 3))
copied_before("native_layer_norm", "_fused_rms_norm")


@after_results("_softmax_backward_data")
def _softmax_backward(call: Call) -> None:
    """The product of gradient and output (SoftMax.cu)."""
    gradient, output = call.args[:2]
    call.take(n_bytes(gradient))
    call.copy(torch.empty_like(gradient, device="meta"), output)


@after_results("pow")
def _power(call: Call) -> None:
    """A base that is a number becomes a tensor on the GPU (Pow.cpp)."""
    base = call.args[0]
    if not isinstance(base, torch.Tensor) and base != 1:
        call.take({bool: 1, complex: 16}.get(type(base), 8))


def _copy_points(call: Call, points: torch.Tensor, others: torch.Tensor) -> None:
    """Points are written out for each batch that they are compared with (Distance.cpp)."""
    batch = torch.broadcast_shapes(points.shape[:-2], others.shape[:-2])
    call.copy(*(given.expand(*batch, -1, -1) for given in (points, others)))


@rule("_cdist_backward", "_pdist_backward")
def _distances_backward(call: Call) -> None:
    """A gradient for each pair of points, before they are summed (DistanceKernel.cu)."""
    _, points, *others, norm, _ = call.args
    if others:
        _copy_points(call, points, *others)
    call.make_all()
    if norm and points.numel():
        call.take(call.outs[0].n_bytes * (others[0].shape[-2] if others else len(points) - 1))


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin_loss(call: Call) -> None:
    """The loss of each row is summed (MultiMarginLoss.cu, MultiLabelMarginCriterion.cu)."""
    *targets, loss = reversed(range(len(call.outs)))  # which labels are targets, and the loss
    tensor: torch.Tensor = call.args[0]
    call.make(*(() if targets else (loss,)))
    call.copy(*call.args[:2])
    call.make(*targets)
    rows = torch.empty(tensor.shape[:-1], dtype=tensor.dtype, device="meta")
    is_summed = call.argument("reduction") and rows.dim()
    call.take(*([n_bytes(rows)] if is_summed else ()))
    call.make(*((loss,) if targets else ()))
    if is_summed:
        summed(call, rows)


copied_after("multi_margin_loss_backward", "multilabel_margin_loss_backward", places=(1, 2))


@rule("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
def _pointwise_loss(call: Call) -> None:
    """The loss of each element is summed (BinaryOps.cpp, Loss.cpp, Loss.cu).

    Results are allocated for the loss of each element and then shrink, as
    ``TORCH_META_FUNC(mse_loss)`` resizes its output after allocating it in full; besides that there
    is another such array, or the sum for ``binary_cross_entropy``.
    """
    if not call.argument("reduction"):
        call.make_all()
        return
    name, result = call.op.overloadpacket.__name__, call.outs[0]
    shape = torch.broadcast_shapes(*(t.shape for t in call.args[:2]))
    result.n_bytes = each_bytes = shape.numel() * call.out_dtype.itemsize
    call.make(0)
    call.take(result.dtype.itemsize if name == "binary_cross_entropy" else each_bytes)
    summed(call, torch.empty(shape, dtype=result.dtype, device="meta"))


@rule("log_sigmoid_forward")
def _log_sigmoid(call: Call) -> None:
    """The buffer that other devices keep is empty."""
    call.make(0)
    call.outs[1].n_bytes = 0
    call.make(1)


FLOAT: Final = 4
WARP: Final = 32
MANY_ROWS: Final = 64 * 1024
PARTIAL_ITEMS: Final = 1 << 20
TILE: Final = 32
ROWS_PER_THREAD: Final = 16
MAX_THREADS: Final = 512
MIN_BLOCKS, MAX_BLOCKS = 8, 128


@after_results("native_group_norm")
def _group_norm(call: Call) -> None:
    """Scale and shift of each channel (group_norm_kernel.cu)."""
    tensor, weight, bias, n, channels, pixels = call.args[:6]
    if int(pixels) > 1 and (weight is not None or bias is not None):
        call.hold(*[int(n) * int(channels) * accumulator_bytes(tensor.dtype)] * 2)


@after_results("native_group_norm_backward")
def _group_norm_backward(call: Call) -> None:
    weight = call.args[4]
    n, channels, pixels, groups = (int(x) for x in call.args[5:9])
    item = accumulator_bytes(call.args[1].dtype)
    by_channel, by_group = n * channels * item, n * groups * item
    call.take(by_channel, by_channel)
    if call.argument("output_mask")[0]:
        second, third = call.take(by_group, by_group)
        if pixels > 1 and weight is not None:
            call.take(by_channel)
            call.free(third, second)


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> None:
    """Gradients of weight and bias; with many rows in blocks, which are summed at the end."""
    call.copy(call.args[1])
    call.make_all()
    call.copy(call.args[0])
    _sum_blocks(call, prod(call.args[2]), len(call.outs) - 1)


def _sum_blocks(call: Call, width: int, n_gradients: int) -> None:
    """Partial gradients of blocks of rows (``LaunchGammaBetaBackwardCUDAKernel``)."""
    tensor: torch.Tensor = call.args[1]
    n_rows = tensor.numel() // max(1, width)
    processors = session.current().facts.n_multiprocessors
    if n_rows <= MANY_ROWS or width // WARP >= processors // 2 or n_gradients < 1:
        return
    n_blocks = min(-(-n_rows // WARP), PARTIAL_ITEMS // width)
    item = tensor.element_size()
    call.take(*[n_blocks * width * item] * n_gradients)
    partial = torch.empty((n_blocks, width), dtype=tensor.dtype, device="meta")
    for _ in range(n_gradients):
        total = call.take(width * item)
        summed(call, partial, (0,))
        call.free(*total)


@after_results("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(call: Call) -> None:
    """PyTorch's own kernels (Normalization.cuh); ``cudnn_batch_norm`` requests nothing."""
    tensor = call.args[0]
    if call.argument("training") is not False and _is_channel_last(tensor):
        _stage(call, tensor, 4)


@rule("native_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(call: Call) -> None:
    tensor = call.args[1]
    is_training, mask = call.argument("train"), call.argument("output_mask")
    if call.op.overloadpacket.__name__.startswith("native") and not (is_training or any(mask[1:])):
        # Element by element; cuDNN's forward pass leaves the statistics to it.
        if not call.argument("save_invstd").numel():
            call.take(tensor.shape[1] * FLOAT)
        call.make_all()
        return
    if not _is_channel_last(tensor):
        for given in call.args[:2]:
            if not _flattens(given):
                call.take(n_bytes(given))
        call.make_all()
        return
    size = tensor.shape[1] * FLOAT
    call.take(size, size)
    call.make(*range(1, len(call.outs)))
    _stage(call, tensor, 2)
    call.make(0)


def _flattens(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be seen in three dimensions without a copy."""
    dims = zip(tensor.shape[2:], tensor.stride()[2:], strict=True)
    long = [(size, stride) for size, stride in dims if size != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in pairwise(long))


def _is_channel_last(tensor: torch.Tensor) -> bool:
    """Return whether rows of channels are contiguous (``batch_norm_choose_impl``)."""
    if tensor.is_contiguous():
        return tensor.stride(1) == 1
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _stage(call: Call, tensor: torch.Tensor, n_values: int) -> None:
    """Partial statistics of several blocks of rows (``flexible_launch_configs``)."""
    channels = tensor.shape[1]
    n_rows = tensor.numel() // max(1, channels)
    width = power_of_two(channels, TILE)
    height = power_of_two(-(-n_rows // ROWS_PER_THREAD), MAX_THREADS // width)
    if width * height != MAX_THREADS:
        width = power_of_two(channels, MAX_THREADS // height)
    n_blocks = min(-(-n_rows // (height * ROWS_PER_THREAD)), MAX_BLOCKS)
    if n_blocks >= MIN_BLOCKS:
        call.hold(n_values * channels * n_blocks * FLOAT, -(-channels // width) * 4)
