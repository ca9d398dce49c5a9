"""Losses, softmax, dropout and other elementwise kernels that ask for more than their result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fragdoctor.rehearse.engine.kernels.reduction import whole
from fragdoctor.rehearse.engine.kernels.steps import (
    Call,
    Free,
    Out,
    Step,
    Temp,
    copied_unless_dense,
    in_order,
    n_bytes,
    rule,
)

MEAN, SUM = 1, 2

in_order("native_dropout", "nll_loss2d_forward", order=(1, 0))


@rule("_softmax", "_log_softmax")
def _softmax(call: Call) -> Iterable[Step]:
    yield from call.results
    yield from copied_unless_dense(call.args[0])


@rule("_softmax_backward_data")
def _softmax_backward(call: Call) -> Iterable[Step]:
    """The product of gradient and output (SoftMax.cu)."""
    yield from call.results
    gradient, output = call.args[:2]
    yield Temp(n_bytes(gradient))
    yield from copied_unless_dense(torch.empty_like(gradient, device="meta"))
    yield from copied_unless_dense(output)


@rule("_log_softmax_backward_data")
def _log_softmax_backward(call: Call) -> Iterable[Step]:
    yield from call.results
    for tensor in call.args[:2]:
        yield from copied_unless_dense(tensor)


@rule("mse_loss", "smooth_l1_loss")
def _pointwise_loss(call: Call) -> Iterable[Step]:
    """The result is made for the loss of each element and shrinks; another such array is summed.

    ``TORCH_META_FUNC(mse_loss)`` resizes its output after it was made in full (BinaryOps.cpp,
    Loss.cpp).
    """
    reduction = call.argument(2, "reduction", MEAN)
    if not reduction:
        yield from call.results
        return
    size = elements_bytes(call)
    call.outs[0].n_bytes = size
    yield Out(0)
    full = Temp(size)
    yield full
    yield from _reduced(call)


def elements_bytes(call: Call) -> int:
    """Return the bytes of the loss of each element."""
    shape = torch.broadcast_shapes(*(t.shape for t in call.args[:2]))
    return int(shape.numel() * call.out_dtype.itemsize)


def _reduced(call: Call) -> list[Step]:
    shape = torch.broadcast_shapes(*(t.shape for t in call.args[:2]))
    return whole(torch.empty(shape, dtype=call.outs[0].dtype, device="meta"))


@rule("huber_loss")
def _huber_loss(call: Call) -> Iterable[Step]:
    reduction = call.argument(2, "reduction", MEAN)
    if not reduction:
        yield from call.results
        return
    yield Temp(elements_bytes(call))
    yield Out(0)
    yield from _reduced(call)


@rule("binary_cross_entropy")
def _binary_cross_entropy(call: Call) -> Iterable[Step]:
    """The result is made for the loss of each element and shrinks (Loss.cu)."""
    reduction = call.argument(3, "reduction", MEAN)
    if not reduction:
        yield from call.results
        return
    size = elements_bytes(call)
    call.outs[0].n_bytes = size
    yield Out(0)
    total = Temp(call.outs[0].dtype.itemsize)
    yield total
    yield from _reduced(call)
    yield Free(total)


@rule("multi_margin_loss")
def _multi_margin_loss(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor: torch.Tensor = call.args[0]
    if call.argument(5, "reduction", MEAN) and tensor.dim() > 1:
        yield Temp(tensor.shape[0] * tensor.element_size())


@rule("log_sigmoid_forward")
def _log_sigmoid(call: Call) -> Iterable[Step]:
    """The buffer that other devices keep is empty."""
    yield Out(0)
    call.outs[1].n_bytes = 0
    yield Out(1)
