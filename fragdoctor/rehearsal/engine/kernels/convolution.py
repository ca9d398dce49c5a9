"""Convolutions and products: which backend PyTorch uses, and copies into the layout it needs.

PyTorch's own code chooses the backend (``select_conv_backend``) and calls the forward kernels one
by one; the backward pass calls its kernels past the dispatcher and is written out here, after
``convolution_backward`` in ``aten/src/ATen/native/Convolution.cpp`` and ``cudnn/ConvShared.cpp``.
CuDNN's workspaces come from cuDNN (:mod:`fragdoctor.rehearsal.engine.cudnn`). If cuDNN is not used,
PyTorch arranges the patches of one sample as columns and multiplies them (``ConvolutionMM2d.cu``,
``NaiveDilatedConvolution.cu``, ``NaiveConvolutionTranspose*.cu``).

Interpolation, pooling, padding and patches copy what is not contiguous. A gradient of ``torch.cat``
is a part of a larger tensor, as in each decoder of a U-Net, and one of ``sum`` is a single value
for all. This follows PyTorch's own allocator, kernel by kernel (``UpSample*.cu``, ``*Pool*.cu``,
``ReflectionPad.cu``, ``Im2Col.cu``, ``Col2Im.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from fragdoctor.rehearsal.engine import cudnn, session
from fragdoctor.rehearsal.engine.allocation import dense_strides
from fragdoctor.rehearsal.engine.dispatch import special, use_blas
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    after_results,
    copied_after,
    copied_before,
    n_bytes,
    rule,
)
from fragdoctor.rehearsal.engine.tensors import like_format, new

BACKEND: Final = torch._C._ConvBackend  # type: ignore[attr-defined]
HOPPER: Final = "9.0"
GROUP_BYTES, DESCRIPTOR_BYTES = 60, 512  # of each group, and of each multiprocessor
TRANSPOSED: Final = (BACKEND.SlowTranspose2d, BACKEND.SlowTranspose3d)
DILATED: Final = (BACKEND.SlowDilated2d, BACKEND.SlowDilated3d)
COLUMNS: Final = (BACKEND.Slow2d, *DILATED, *TRANSPOSED)
"""Backends that arrange patches as columns."""
ATEN: Final = torch.ops.aten
IMAGE: Final = 4
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of the input, the weight and the bias; None for those that were not asked for."""


class _Asked(NamedTuple):
    """What gradients are computed from, and which of them are asked for."""

    gradient: torch.Tensor
    input: torch.Tensor
    weight: torch.Tensor
    mask: Sequence[bool]


def _format(input_: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    found: torch.memory_format = torch._C._conv_determine_backend_memory_format(
        input_, weight, backend
    )
    return found


def _size(
    input_: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Any], *, transposed: bool
) -> torch.Size:
    """Return the shape of a convolution's result."""
    padding, output_padding, stride, dilation, groups = geometry
    out = ATEN.convolution.default(
        torch.empty(input_.shape, device="meta"), torch.empty(weight.shape, device="meta"), None,
        stride, padding, dilation, transposed, output_padding, groups,
    )  # fmt: skip
    return out.shape  # type: ignore[no-any-return]


def _dense(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    return tensor.contiguous(memory_format=layout)


def _forward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    shape: Sequence[int],
    layout: torch.memory_format,
    compute: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return the result of a forward pass; ``compute`` is called with everything in place."""
    out = like_format(input_, shape, layout)
    if out.numel():
        dense_weight = _dense(weight, layout)
        dense_input = _dense(input_, layout)
        compute()
        del dense_input, dense_weight
    return out


def _use_cudnn(
    operation: str,
    weight: torch.Tensor,
    seen: Sequence[int],
    made: Sequence[int],
    layout: torch.memory_format,
    geometry: Sequence[Sequence[int]],
) -> None:
    """Take the workspaces of a call of cuDNN.

    Args:
        operation: its pass.
        weight: the weight of the forward pass.
        seen: input shape of an ordinary forward pass.
        made: output shape of that pass.
        layout: layout of all tensors.
        geometry: padding, stride and dilation.
    """
    is_last = layout in {torch.channels_last, torch.channels_last_3d}
    x, w, y = (tuple(shape) for shape in (seen, weight.shape, made))
    padding, stride, dilation = (tuple(g) for g in geometry)
    call = cudnn.Convolution(operation, weight.dtype, x, w, y, is_last, padding, stride, dilation)
    cudnn.take(call, weight.get_device())


@special("aten::cudnn_convolution", "aten::cudnn_convolution_transpose")
def cudnn_convolution(
    op: Any, self: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], *rest: Any, **_: Any
) -> torch.Tensor:
    """CuDNN's convolution; a transposed one is the input gradient of an ordinary one."""
    is_transposed = "transpose" in op.name()
    numbers = rest if is_transposed else ([0] * len(padding), *rest)
    output_padding, stride, dilation, groups = numbers[:4]
    layout = _format(self, weight, BACKEND.CudnnTranspose if is_transposed else BACKEND.Cudnn)
    geometry = (padding, output_padding, stride, dilation, groups)
    shape = _size(self, weight, geometry, transposed=is_transposed)
    seen, made = (shape, self.shape) if is_transposed else (self.shape, shape)
    operation = "backward_data" if is_transposed else "forward"
    described = (operation, weight, seen, made, layout, (padding, stride, dilation))
    return _forward(self, weight, shape, layout, partial(_use_cudnn, *described))


@special("aten::_conv_depthwise2d", "aten::conv_depthwise3d")
def conv_depthwise(
    _op: Any, self: torch.Tensor, weight: torch.Tensor, _shape: Any, _bias: Any, *how: Sequence[int]
) -> torch.Tensor:
    """PyTorch's own kernels for one filter per channel (DepthwiseConv2d.cu)."""
    stride, padding, dilation = how
    geometry = (padding, [0] * len(padding), stride, dilation, self.shape[1])
    shape = _size(self, weight, geometry, transposed=False)
    return _forward(self, weight, shape, torch.contiguous_format)


@special("aten::convolution_backward")
def convolution_backward(
    _op: Any,
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - PyTorch's name
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *how: Any,
) -> Gradients:
    """The gradients of a convolution, by the backend of its forward pass."""
    *called, output_mask = how
    stride, padding, dilation, transposed, _, groups = called
    n_dims = weight.dim()
    backend = torch._C._select_conv_backend(
        _seen_dense(input) if n_dims == IMAGE - 1 else input, weight, None, *called, bias_sizes
    )
    geometry = (padding, stride, dilation)
    if n_dims == IMAGE - 1:  # one dimension is treated as two
        input = input.contiguous().unsqueeze(2)  # noqa: A001
        grad_output, weight = grad_output.unsqueeze(2), weight.unsqueeze(2)
        geometry = ([0, *padding], [1, *stride], [1, *dilation])
    layout = _format(input, weight, backend)
    bias = None
    if backend in {BACKEND.Cudnn, BACKEND.CudnnTranspose}:
        gradient = grad_output
        if backend == BACKEND.CudnnTranspose:  # for others, each result copies it again
            gradient = gradient.contiguous(memory_format=suggest_memory_format(input))
        asked = _Asked(gradient, input, weight, output_mask)
        first, second = _cudnn_backward(asked, layout, geometry, transposed=transposed)
        del gradient, asked
    elif backend in {BACKEND.CudaDepthwise2d, BACKEND.CudaDepthwise3d}:
        asked = _Asked(grad_output, input, weight, output_mask)
        first, second = _depthwise_backward(asked, is_flat=backend == BACKEND.CudaDepthwise2d)
        del asked
    elif backend in COLUMNS:
        asked = _Asked(grad_output, input.contiguous(), weight, output_mask)
        first, second, bias = _columns_backward(asked, backend, groups)
        del asked
    else:
        first = like_format(input, input.shape, layout) if output_mask[0] else None
        second = like_format(weight, weight.shape, layout) if output_mask[1] else None
    if n_dims == IMAGE - 1:
        first = None if first is None else first.squeeze(2)
        second = None if second is None else second.squeeze(2)
    if output_mask[2] and bias is None:
        bias = grad_output.sum([0, *range(2, grad_output.dim())])
    return first, second, bias


def _seen_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of a tensor's memory; choosing a backend would copy the tensor."""
    if (
        tensor.is_contiguous()
        or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
    ):
        return tensor
    return tensor.as_strided(tensor.shape, dense_strides(tensor.shape), 0)


def _cudnn_backward(
    asked: _Asked, layout: torch.memory_format, geometry: Sequence[Any], *, transposed: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, input_, weight, mask = asked
    # A transposed convolution is the gradient of an ordinary one, from its result to its input.
    of_input = "forward" if transposed else "backward_data"
    seen, made = (grad_output, input_) if transposed else (input_, grad_output)
    held = input_.contiguous(memory_format=layout) if mask[1] else input_
    gradient = grad_output.to(memory_format=suggest_memory_format(held))
    first = second = None
    if mask[0]:
        wanted = _format(gradient, weight, BACKEND.Cudnn)
        first = like_format(input_, input_.shape, wanted)
        dense_weight = _dense(weight, wanted)
        dense_gradient = _dense(gradient, wanted)
        _use_cudnn(of_input, weight, seen.shape, made.shape, wanted, geometry)
        del dense_gradient, dense_weight
    if mask[1]:
        wanted = _format(held, gradient, BACKEND.Cudnn)
        dense_gradient = _dense(gradient, wanted)
        dense_input = _dense(held, wanted)
        second = like_format(weight, weight.shape, wanted)
        _use_cudnn("backward_filter", weight, seen.shape, made.shape, wanted, geometry)
        del dense_input, dense_gradient
    del gradient, held
    return first, second


def _depthwise_backward(
    asked: _Asked, *, is_flat: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of images, the results come last, the weight's first (DepthwiseConv2d.cu, ...3d.cu)."""
    grad_output, input_, weight, mask = asked

    def result(number: int) -> torch.Tensor | None:
        like = (input_, weight)[number]
        return like_format(like, like.shape, torch.contiguous_format) if mask[number] else None

    if is_flat:
        held = [t.contiguous() for t in (grad_output, weight, input_)]
        second, first = result(1), result(0)
        del held
    else:
        first, second = result(0), result(1)
        dense = grad_output.contiguous()
        for other, wanted in ((weight, mask[0]), (input_, mask[1])):
            if wanted:
                other.contiguous()
        del dense
    return first, second


@rule("_slow_conv2d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d")
@rule("slow_conv_transpose2d", "slow_conv_transpose3d")
def _by_columns(call: Call) -> None:
    """The columns of one sample, and the ones with which a transposed convolution adds its bias."""
    input_, weight, kernel = call.args[:3]
    bias, stride, padding = map(call.argument, ("bias", "stride", "padding"))
    is_transposed = "transpose" in call.op.name()
    if "transpose3d" in call.op.name():
        _make_resized(call, weight)
    else:
        call.copy(input_, weight)
        call.make_all()
    made = call.outs[0].shape[2:]
    is_direct = call.op.name().startswith("aten::_slow_conv2d") and not (
        any(n != 1 for n in (*kernel, *stride)) or any(padding)
    )
    if not is_direct:
        positions = input_.shape[2:] if is_transposed else made
        call.take(_column_numbers(weight, positions) * input_.element_size())
    if is_transposed and bias is not None:
        call.take(prod(made) * input_.element_size())
    call.use_blas()


def _column_numbers(weight: torch.Tensor, positions: Sequence[int]) -> int:
    """Return how many numbers the columns of one sample have."""
    return prod(weight.shape[1:]) * prod(positions)


def _columns_backward(asked: _Asked, backend: Any, groups: int) -> Gradients:
    """The gradients of a convolution by columns: group by group, then concatenated."""
    if groups == 1:
        return _group_backward(asked, backend)
    found: list[Gradients] = []
    for n in range(groups):
        gradient, seen, filters = (
            tensor.tensor_split(groups, dim)[n].contiguous()
            for tensor, dim in ((asked.gradient, 1), (asked.input, 1), (asked.weight, 0))
        )
        found.append(_group_backward(_Asked(gradient, seen, filters, asked.mask), backend))
        del gradient, seen, filters
    first, second, bias = (
        torch.cat([one[i] for one in found], dim) if asked.mask[i] else None  # type: ignore[misc]
        for i, dim in enumerate((1, 0, 0))
    )
    return first, second, bias


def _group_backward(asked: _Asked, backend: Any) -> Gradients:
    grad_output, input_, weight, mask = asked
    device = grad_output.get_device()
    gradient, filters = grad_output.contiguous(), weight.contiguous()
    is_transposed = backend in TRANSPOSED
    positions = (input_ if is_transposed else gradient).shape[2:]
    n_numbers = _column_numbers(weight, positions)

    def empty(shape: Sequence[int]) -> torch.Tensor:
        return new(shape, None, input_.dtype, device)

    def columns() -> torch.Tensor:
        made = empty((n_numbers,))
        use_blas(device)
        return made

    first = held = None
    if mask[0]:
        first = empty(input_.shape)
        if backend == BACKEND.Slow2d:
            held = columns()
        elif is_transposed:
            columns()
    bias = gradient.sum([0, 2, 3]) if mask[2] and backend == BACKEND.Slow2d else None
    second = empty(weight.shape) if mask[1] else None
    if mask[2] and bias is None:
        bias = empty((gradient.shape[1],))
    if held is None and (any(mask[1:]) if is_transposed else any(mask[:2])):
        held = columns()
    if mask[2] and backend in DILATED:
        gradient[0].sum(list(range(1, gradient.dim() - 1)))  # added to the bias, sample by sample
    del held, gradient, filters
    return first, second, bias


COPIED_INTO_RESULT: Final = ("addmm", "baddbmm", "addmv", "addbmm")
"""Products whose first argument is copied into the result before cuBLAS sees it."""


@after_results("mm", *COPIED_INTO_RESULT, "bmm", "dot", "vdot")
@after_results("addmm_", "baddbmm_", "addmv_", "addbmm_")
def _product(call: Call) -> None:
    """Copies of matrices that cuBLAS cannot use as they are (``prepare_matrix_for_cublas``)."""
    is_copied = call.op.overloadpacket.__name__ in COPIED_INTO_RESULT
    for tensor in call.args[is_copied:]:
        if isinstance(tensor, torch.Tensor) and not _fits_blas(tensor):
            call.take(n_bytes(tensor))
    call.use_blas(is_lt=_adds_bias(call))


@after_results("_scaled_mm", "_int_mm")
def _product_of_bytes(call: Call) -> None:
    """Products of 8-bit numbers are cuBLASLt's (Blas.cpp, ScaledBlas.cpp)."""
    call.use_blas(is_lt=True)


@after_results("_grouped_mm")
def _product_of_groups(call: Call) -> None:
    """Pointers, sizes and strides of each group, and descriptors (GroupMM.cu, CUTLASS)."""
    tensor, offsets = call.args[0], call.argument("offs")
    facts = session.current().facts
    if tensor.dtype is torch.bfloat16 and facts.compute == HOPPER:
        n = tensor.shape[0] if offsets is None else offsets.shape[0]
        call.take(GROUP_BYTES * n, DESCRIPTOR_BYTES * facts.n_multiprocessors)


def _adds_bias(call: Call) -> bool:
    """Return whether cuBLASLt adds the bias (``useLtInterface`` in ``native/cuda/Blas.cpp``)."""
    if not call.op.name().startswith("aten::addmm"):
        return False
    bias, _, matrix = call.args[:3]
    return bool(bias.dim() == 1 and bias.shape[0] == matrix.shape[1] and min(matrix.shape) > 1)


def _fits_blas(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2 or not tensor.numel():
        return True
    (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


SIZES: Final = ("1d", "2d", "3d")
NEAREST: Final = (
    *(f"upsample_nearest{n}" for n in SIZES), *(f"_upsample_nearest_exact{n}" for n in SIZES)
)  # fmt: skip
NEAREST_IN_3D: Final = ("upsample_nearest3d", "_upsample_nearest_exact3d")
SMOOTH: Final = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
)
ANTIALIASED: Final = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
POOLS: Final = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
REFLECTED: Final = ("reflection_pad1d", "reflection_pad2d")


def _backward(*names: str) -> list[str]:
    return [f"{name}_backward" for name in names]


def _copy_batch(call: Call, tensor: torch.Tensor) -> None:
    """A single volume is read where it is (AdaptiveMaxPooling3d.cu)."""
    if tensor.dim() > IMAGE:
        call.copy(tensor)


def _copy_alike(call: Call, *tensors: torch.Tensor) -> None:
    """Take the copies of what does not lie as the first suggests: as usual, or channels-last."""
    is_image = tensors[0].dim() == IMAGE
    layout = suggest_memory_format(tensors[0]) if is_image else torch.contiguous_format
    call.take(*(n_bytes(t) for t in tensors if not t.is_contiguous(memory_format=layout)))


# The first argument is copied: the input, or the gradient of the result.
copied_after(
    *NEAREST, *POOLS,
    *_backward(*NEAREST, *SMOOTH, "max_pool3d_with_indices", "avg_pool3d"),
    copy=_copy_alike,
)  # fmt: skip
copied_after(*_backward("max_pool2d_with_indices", "avg_pool2d"), places=(1, 0), copy=_copy_alike)
copied_after("adaptive_max_pool3d", copy=_copy_batch)
copied_before("_adaptive_avg_pool2d", copy=_copy_alike)
copied_after(
    *REFLECTED,
    *_backward(*REFLECTED, *ANTIALIASED, "adaptive_max_pool3d", "_adaptive_avg_pool3d"),
    "reflection_pad3d",
    "upsample_bicubic2d_backward",  # knows the usual order only, unlike the other ones
)


@after_results("_adaptive_avg_pool2d_backward")
def _averages_backward(call: Call) -> None:
    """Channels-last gradients are read where they are (AdaptiveAveragePooling.cu)."""
    gradient, tensor = call.args
    if suggest_memory_format(tensor) is torch.contiguous_format:
        call.copy(gradient)


@after_results(*ANTIALIASED, *NEAREST_IN_3D, "adaptive_max_pool2d", "adaptive_max_pool2d_backward")
def _worked_on_in_order(call: Call) -> None:
    """Kernels that only know the usual order: channels-last tensors are copied."""
    results = [out.n_bytes for out in call.outs if out.has_other_order]
    is_backward = call.op.name().endswith("_backward")
    call.take(*(() if is_backward else results))
    call.copy(*call.args[::2])
    call.take(*(results if is_backward else ()))


def _make_resized(call: Call, *copied: torch.Tensor) -> None:
    """The result is first allocated in the size of the input, and resized if it is larger."""
    size = n_bytes(call.args[0])
    if size >= call.outs[0].n_bytes:
        call.outs[0].n_bytes = size
        call.make(0)
        call.copy(call.args[0], *copied)
        return
    first = call.take(size)
    call.copy(call.args[0], *copied)
    call.make(0)
    call.free(*first)


rule("im2col", "col2im")(_make_resized)


@after_results("unfold_backward")
def _windows_backward(call: Call) -> None:
    """Windows that overlap are found by their positions (``UnfoldBackward.h``)."""
    gradient, shape, dim, size, step = call.args
    if step < size:
        call.take(min(shape[dim], (gradient.shape[dim] - 1) * step + size) * 8)
