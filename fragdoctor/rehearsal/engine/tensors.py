"""Kernels that create, resize and fill tensors, and those that read their values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fragdoctor.rehearsal.engine import allocation, session, values
from fragdoctor.rehearsal.engine.allocation import BlockLayout, dense_strides, storage_bytes
from fragdoctor.rehearsal.engine.dispatch import of_cpu, special
from fragdoctor.rehearsal.engine.vtables import fields

_layout: Final = lru_cache(maxsize=100_000)(BlockLayout)


def new(
    sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: int
) -> torch.Tensor:
    """Return a new tensor on a GPU."""
    layout = _layout(tuple(sizes), None if strides is None else tuple(strides), dtype)
    return layout.make(device, allocation.stack_here())


def scratch(like: torch.Tensor, n_bytes: int) -> torch.Tensor:
    """Return scratch memory on the GPU of a tensor; it is freed with the last reference to it."""
    return new((n_bytes,), None, torch.uint8, like.get_device())


def strides_for(
    size: Sequence[int], memory_format: torch.memory_format | None
) -> tuple[int, ...] | None:
    """Return the strides of a layout; None = contiguous."""
    if memory_format not in {torch.channels_last, torch.channels_last_3d}:
        return None
    return torch.empty(size, memory_format=memory_format, device="meta").stride()


def like_format(
    tensor: torch.Tensor, size: Sequence[int], memory_format: torch.memory_format
) -> torch.Tensor:
    """Return a new tensor of another's dtype on its GPU, in a layout."""
    return new(size, strides_for(size, memory_format), tensor.dtype, tensor.get_device())


@special("aten::empty.memory_format", "aten::empty_strided")
def empty(
    _op: Any,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    """``empty`` and ``empty_strided``: the root of most new tensors."""
    strides = strides_for(size, memory_format) if stride is None else stride
    index = None if device is None else device.index
    place = session.current().gpus.device() if index is None else index
    return new(size, strides, dtype or torch.get_default_dtype(), place)


@special("aten::resize_")
def resize_(_op: Any, self: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    """``resize_``: takes new memory only if the old memory is too small."""
    strides = dense_strides(size)
    storage = fields().of(self)
    first = int(self.storage_offset())
    offset = first * self.dtype.itemsize
    needed = storage_bytes(size, strides, self.dtype.itemsize) + offset
    if needed > offset and needed > fields().read(storage)[1]:
        allocation.resize_storage(storage, self.get_device(), needed)
    return self.as_strided_(size, strides, first)


def _set(tensor: torch.Tensor, *part: Any) -> torch.Tensor:
    """Let a tensor view a part of a storage; the CPU's kernel only writes sizes and strides."""
    return of_cpu("CPU", torch.ops.aten.set_.source_Storage_storage_offset, tensor, *part)  # type: ignore[no-any-return]


@special("aten::set_.source_Storage_storage_offset")
def set_storage(
    _op: Any,
    self: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int,
    size: Sequence[int],
    stride: Sequence[int] = (),
) -> torch.Tensor:
    """``set_``: the storage grows if the tensor needs more."""
    strides = tuple(stride) or dense_strides(size)
    needed = storage_bytes(size, strides, self.dtype.itemsize)
    needed += storage_offset * self.dtype.itemsize if needed else 0
    if needed > source.nbytes():
        allocation.resize_storage(source._cdata, source.device.index, needed)
    return _set(self, source, storage_offset, size, strides)


@special("aten::set_")
def set_to_nothing(_op: Any, self: torch.Tensor) -> torch.Tensor:
    """``set_``: the tensor views no memory."""
    nothing = new((0,), None, self.dtype, self.get_device())
    return _set(self, nothing.untyped_storage(), 0, (0,), (1,))


@special("aten::_local_scalar_dense")
def item(_op: Any, self: torch.Tensor) -> Any:
    """``item()``: a value of the device's memory that is not known reads as a stand-in."""
    now = session.current()
    now.assumptions.read = None
    known = now.known.of(self)
    return values.stand_in(self.dtype) if known is None else known.item()


@special("aten::copy_")
def copy_(
    _op: Any, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """``copy_``: temporaries if layouts or dtypes differ across devices (Copy.cu)."""
    if isinstance(
        src, UninitializedParameter | UninitializedBuffer
    ):  # belongs to a lazy module and has no shape yet
        src = src.data
    if not (self.is_cuda and src.is_cuda):
        _across(self, src, non_blocking=non_blocking)
    elif self.get_device() != src.get_device():
        _across(self, src, non_blocking=True)
    known = session.current().known
    if self.is_cuda:
        known.copied(self, src)
        return self
    found = known.of(src)
    if found is None:
        values.fill(self, known.n_parts(src))
    else:
        values.COPIES.pop(self.data_ptr(), None)
        self.copy_(found)
    return self


def _across(dst: torch.Tensor, src: torch.Tensor, *, non_blocking: bool) -> None:
    """Request the temporaries of a copy between devices.

    Dtypes are converted on the GPU if the copy is non-blocking, else on the CPU.
    """
    same_dtype = dst.dtype == src.dtype
    source = src if src.shape == dst.shape else src.expand(dst.shape)
    is_flat = dst.is_contiguous() and source.is_contiguous()
    if not is_flat and dst.stride() == source.stride():  # in one order, without gaps
        is_flat = bool(torch.ops.aten.is_non_overlapping_and_dense(dst))
    if same_dtype and is_flat:
        return
    held = []
    if dst.is_cuda or non_blocking:
        if dst.is_cuda and not dst.is_contiguous():
            held.append(new(dst.shape, None, dst.dtype, dst.get_device()))
        if src.is_cuda:
            converted = source if same_dtype else source.to(dst.dtype)
            held += [converted, converted.contiguous()]
        elif non_blocking and not same_dtype:
            held.append(new(dst.shape, None, src.dtype, dst.get_device()))
    elif src.is_cuda:
        held.append(source.contiguous())
    while held:
        held.pop()


@special("aten::record_stream")
def record_stream(_op: Any, self: torch.Tensor, s: Any) -> None:
    """``Tensor.record_stream``."""
    session.current().gpus.record_stream(self.untyped_storage().data_ptr(), s.stream_id)
