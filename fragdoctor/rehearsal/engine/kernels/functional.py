"""Losses, softmax, dropout and normalization: kernels that request more than their results."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.reduction import power_of_two, summed
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    Free,
    Out,
    Step,
    Temp,
    after_results,
    copied_after,
    copied_before,
    copied_unless_dense,
    held_only,
    in_order,
    n_bytes,
    rule,
)

in_order("native_dropout", "nll_loss2d_forward", order=(1, 0))
copied_after("_softmax", "_log_softmax", "rrelu_with_noise")
copied_after("_log_softmax_backward_data", places=(0, 1))
copied_before("native_layer_norm", "_fused_rms_norm")


@after_results("_softmax_backward_data")
def _softmax_backward(call: Call) -> Iterable[Step]:
    """The product of gradient and output (SoftMax.cu)."""
    gradient, output = call.args[:2]
    yield Temp(n_bytes(gradient))
    yield from copied_unless_dense(torch.empty_like(gradient, device="meta"))
    yield from copied_unless_dense(output)


def _points(points: torch.Tensor, others: torch.Tensor) -> Iterable[Step]:
    """Points are written out for each batch that they are compared with (Distance.cpp)."""
    batch = torch.broadcast_shapes(points.shape[:-2], others.shape[:-2])
    for given in (points, others):
        yield from copied_unless_dense(given.expand(*batch, -1, -1))


@rule("_cdist_forward")
def _distances(call: Call) -> Iterable[Step]:
    return [*_points(*call.args[:2]), *call.results]


@rule("_cdist_backward", "_pdist_backward")
def _distances_backward(call: Call) -> Iterable[Step]:
    """A gradient for each pair of points, before they are summed (DistanceKernel.cu)."""
    _, points, *others, norm, _ = call.args
    if others:
        yield from _points(points, *others)
    yield from call.results
    if norm and points.numel():
        yield Temp(call.outs[0].n_bytes * (others[0].shape[-2] if others else len(points) - 1))


@after_results("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin_loss(call: Call) -> Iterable[Step]:
    """The loss of each row is summed (MultiMarginLoss.cu, MultiLabelMarginCriterion.cu)."""
    tensor: torch.Tensor = call.args[0]
    yield from copied_unless_dense(tensor)
    yield from copied_unless_dense(call.args[1])
    if call.argument("reduction") and tensor.dim() > 1:
        rows = torch.empty(len(tensor), dtype=tensor.dtype, device="meta")
        yield Temp(n_bytes(rows))
        yield from summed(rows)


copied_after("multi_margin_loss_backward", "multilabel_margin_loss_backward", places=(1, 2))


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def _pointwise_loss(call: Call) -> Iterable[Step]:
    """The loss of each element is summed (BinaryOps.cpp, Loss.cpp, Loss.cu).

    Most results are allocated for the loss of each element and then shrink, as
    ``TORCH_META_FUNC(mse_loss)`` resizes its output after allocating it in full; besides that there
    is another such array, or the sum for ``binary_cross_entropy``.
    """
    if not call.argument("reduction"):
        yield from call.results
        return
    name, result = call.op.overloadpacket.__name__, call.outs[0]
    shape = torch.broadcast_shapes(*(t.shape for t in call.args[:2]))
    each = Temp(shape.numel() * call.out_dtype.itemsize)
    if name == "huber_loss":
        yield each
    else:
        result.n_bytes = each.n_bytes
    yield Out(0)
    if name != "huber_loss":
        yield Temp(result.dtype.itemsize) if name == "binary_cross_entropy" else each
    yield from summed(torch.empty(shape, dtype=result.dtype, device="meta"))


@rule("log_sigmoid_forward")
def _log_sigmoid(call: Call) -> Iterable[Step]:
    """The buffer that other devices keep is empty."""
    yield Out(0)
    call.outs[1].n_bytes = 0
    yield Out(1)


FLOAT: Final = 4
WARP: Final = 32
MANY_ROWS: Final = 64 * 1024
PARTIAL_ITEMS: Final = 1 << 20
TILE: Final = 32
ROWS_PER_THREAD: Final = 16
MAX_THREADS: Final = 512
MIN_BLOCKS, MAX_BLOCKS = 8, 128


@after_results("native_group_norm")
def _group_norm(call: Call) -> Iterable[Step]:
    """Scale and shift of each channel (group_norm_kernel.cu)."""
    _, weight, bias, n, channels, pixels = call.args[:6]
    if int(pixels) > 1 and (weight is not None or bias is not None):
        yield from held_only(*[int(n) * int(channels) * FLOAT] * 2)


@after_results("native_group_norm_backward")
def _group_norm_backward(call: Call) -> Iterable[Step]:
    weight = call.args[4]
    n, channels, pixels, groups = (int(x) for x in call.args[5:9])
    by_channel, by_group = n * channels * FLOAT, n * groups * FLOAT
    yield from (Temp(by_channel), Temp(by_channel))
    second, third = Temp(by_group), Temp(by_group)
    yield from (second, third)
    if pixels > 1 and weight is not None:
        yield Temp(by_channel)
        yield from (Free(third), Free(second))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> Iterable[Step]:
    """Gradients of weight and bias; with many rows in blocks, which are summed at the end."""
    yield from copied_unless_dense(call.args[1])
    yield from call.results
    yield from copied_unless_dense(call.args[0])
    yield from _by_blocks(call, prod(call.args[2]), len(call.outs) - 1)


def _by_blocks(call: Call, width: int, n_gradients: int) -> Iterable[Step]:
    """Partial gradients of blocks of rows (``LaunchGammaBetaBackwardCUDAKernel``)."""
    tensor: torch.Tensor = call.args[1]
    n_rows = tensor.numel() // max(1, width)
    processors = session.current().facts.n_multiprocessors
    if n_rows <= MANY_ROWS or width // WARP >= processors // 2 or n_gradients < 1:
        return
    n_blocks = min(-(-n_rows // WARP), PARTIAL_ITEMS // width)
    item = tensor.element_size()
    for _ in range(n_gradients):
        yield Temp(n_blocks * width * item)
    partial = torch.empty((n_blocks, width), dtype=tensor.dtype, device="meta")
    for _ in range(n_gradients):
        total = Temp(width * item)
        yield total
        yield from summed(partial, (0,))
        yield Free(total)


@after_results("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(call: Call) -> Iterable[Step]:
    """PyTorch's own kernels (Normalization.cuh); ``cudnn_batch_norm`` requests nothing."""
    tensor = call.args[0]
    if call.argument("training") is not False and _is_channel_last(tensor):
        yield from _staging(tensor, 4)


@rule("native_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(call: Call) -> Iterable[Step]:
    tensor = call.args[1]
    if not _is_channel_last(tensor):
        yield from call.results
        if tensor.dim() > 2:  # it is viewed in three dimensions
            for given in call.args[:2]:
                yield from copied_unless_dense(given)
        return
    n_bytes = tensor.shape[1] * FLOAT
    yield from (Temp(n_bytes), Temp(n_bytes))
    yield from call.results[1:]
    yield from _staging(tensor, 2)
    yield from call.results[:1]


def _is_channel_last(tensor: torch.Tensor) -> bool:
    """Return whether rows of channels are contiguous (``batch_norm_choose_impl``)."""
    if tensor.is_contiguous():
        return tensor.stride(1) == 1
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _staging(tensor: torch.Tensor, n_values: int) -> Iterable[Step]:
    """Partial statistics of several blocks of rows (``flexible_launch_configs``)."""
    channels = tensor.shape[1]
    n_rows = tensor.numel() // max(1, channels)
    width = power_of_two(channels, TILE)
    height = power_of_two(-(-n_rows // ROWS_PER_THREAD), MAX_THREADS // width)
    if width * height != MAX_THREADS:
        width = power_of_two(channels, MAX_THREADS // height)
    n_blocks = min(-(-n_rows // (height * ROWS_PER_THREAD)), MAX_BLOCKS)
    if n_blocks >= MIN_BLOCKS:
        yield from held_only(n_values * channels * n_blocks * FLOAT, -(-channels // width) * 4)
