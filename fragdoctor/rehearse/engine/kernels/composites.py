"""Kernels that PyTorch writes with other operations: they are written so here too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from fragdoctor.rehearse.engine.dispatch import special
from fragdoctor.rehearse.engine.kernels.reduction import Kind, buffers_of, copy_and_sum
from fragdoctor.rehearse.engine.kernels.steps import (
    Call,
    Free,
    Out,
    Step,
    Temp,
    held_only,
    in_order,
    n_bytes,
    rule,
)
from fragdoctor.rehearse.engine.tensors import new

CHUNK: Final = 65536  # elements that a block of a foreach kernel works on
FAST_NORMS: Final = (1, 2, float("inf"))


@special("aten::equal")
def equal(_op: Any, self: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``: compared, reduced, read (Equal.cpp)."""
    if self.shape != other.shape:
        return False
    same = self == other
    result = same.all()
    found = bool(result.item())
    del result, same
    return found


@special("aten::count_nonzero.dim_IntList")
def count_nonzero(_op: Any, self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """``count_nonzero`` (ReduceOps.cpp)."""
    result: torch.Tensor = (self != 0).sum(tuple(dim))
    return result


@special("aten::multinomial")
def multinomial(
    _op: Any,
    self: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
) -> torch.Tensor:
    """``multinomial`` by exponential clocks, or by a prefix sum (Distributions.cpp)."""
    del generator
    shape = (*self.shape[:-1], num_samples)
    result = new(shape, None, torch.int64, self.get_device())
    if replacement and num_samples > 1:
        ordered = torch.empty_like(self)
        sums = torch.empty_like(self)
        held = torch.empty_like(self)
        del held, sums, ordered
        return result
    smallest, largest = torch.aminmax(self)
    is_finite = largest < float("inf")
    is_positive = smallest >= 0
    is_valid = is_finite & is_positive
    del is_positive, is_finite
    total = self.sum(-1)
    is_zero = total == 0
    some = is_zero.any()
    del is_zero, total
    none = some.logical_not()
    del none
    clocks = torch.empty_like(self).exponential_()
    clocks.div_(self)
    if num_samples == 1:
        torch.argmax(clocks, -1, keepdim=True, out=result)
    else:
        kept = new(shape, None, self.dtype, self.get_device())
        torch.topk(clocks, num_samples, out=(kept, result))
        del kept
    del clocks, some, is_valid, smallest, largest
    return result


@rule("_foreach_norm", "_foreach_max")
def _foreach_norm(call: Call) -> Iterable[Step]:
    """Partial norms of the chunks of all tensors (ForeachReduceOp.cu)."""
    tensors = call.args[0]
    chunks = max((-(-t.numel() // CHUNK) for t in tensors), default=0)
    kinds = {t.dtype for t in tensors}
    is_max = call.op.overloadpacket.__name__ == "_foreach_max"
    if len(kinds) != 1 or not (is_max or call.argument(1, "ord", 2) in FAST_NORMS):
        yield from call.results
        return
    item = max(t.element_size() for t in tensors)
    parts = Temp(len(tensors) * chunks * (item if is_max or item == 8 else 4))
    yield from (parts, *call.results, Free(parts))


# The workspace comes first (RNN.cu).
in_order("_thnn_fused_gru_cell", order=(1, 0))
in_order("_thnn_fused_lstm_cell", order=(2, 0, 1))


@rule("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(call: Call) -> Iterable[Step]:
    """The gradients of the biases are sums of those of the gates (RNN.cu)."""
    gates = [out for out in call.outs if len(out.shape) > 1]
    yield from (Out(i) for i in range(len(gates)))
    summed = torch.empty(gates[0].shape, dtype=gates[0].dtype, device="meta")
    for i in range(len(gates), len(call.outs)):
        yield Out(i)
        yield from copy_and_sum(summed, (0,))


@rule("histc")
def _histc(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor: torch.Tensor = call.args[0]
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    if low == high:
        yield from (Temp(tensor.element_size()), Temp(tensor.element_size()))
        yield from buffers_of(tensor, None, Kind(2 * tensor.element_size()))


@rule("renorm")
def _renorm(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor: torch.Tensor = call.args[0]
    n = tensor.shape[call.args[2]]
    halves = (n * tensor.element_size(),) if tensor.element_size() == 2 else ()
    yield from held_only(n * 4, *halves)


@rule("normal")
def _normal(call: Call) -> Iterable[Step]:
    yield from call.results
    if any(isinstance(a, torch.Tensor) for a in call.args[:2]):
        yield from held_only(call.outs[0].n_bytes)


@special("aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss")
def use_cudnn_ctc_loss(_op: Any, *_: Any, **__: Any) -> bool:
    """PyTorch's own kernel serves every case; cuDNN's a few."""
    return False


@rule("_ctc_loss")
def _ctc_loss(call: Call) -> Iterable[Step]:
    """Lengths and offsets travel to the GPU (LossCTC.cu)."""
    n = call.args[0].shape[1]
    yield from (Temp(n * 8), Temp(n * 8), Temp(n * 8))
    yield from (Out(1), Out(0))


@rule("_ctc_loss_backward")
def _ctc_loss_backward(call: Call) -> Iterable[Step]:
    n = call.args[1].shape[1]
    yield from (Temp(n * 8), Temp(n * 8), Temp(n * 8))
    yield Temp(n_bytes(call.args[6]))
    yield Out(0)
