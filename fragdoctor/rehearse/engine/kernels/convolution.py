"""Convolutions and products: which backend PyTorch takes, and copies into the layout it wants.

PyTorch's own code chooses the backend (``select_conv_backend``) and calls the forward kernels one
by one; the backward pass calls its kernels past the dispatcher and is written out here, after
``convolution_backward`` in ``aten/src/ATen/native/Convolution.cpp`` and ``cudnn/ConvShared.cpp``.
Workspaces of cuDNN are not known without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from fragdoctor.rehearse.engine.dispatch import special
from fragdoctor.rehearse.engine.kernels.steps import Call, Step, Temp, UseBlas, n_bytes, rule
from fragdoctor.rehearse.engine.memory import dense_strides
from fragdoctor.rehearse.engine.tensors import like_format

BACKEND: Final = torch._C._ConvBackend  # type: ignore[attr-defined]
ATEN: Final = torch.ops.aten
IMAGE: Final = 4


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
    input_: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], layout: torch.memory_format
) -> torch.Tensor:
    out = like_format(input_, shape, layout)
    if out.numel():
        dense_weight = _dense(weight, layout)
        dense_input = _dense(input_, layout)
        del dense_input, dense_weight
    return out


@special("aten::cudnn_convolution")
def cudnn_convolution(
    _op: Any,
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """CuDNN's convolution."""
    layout = _format(self, weight, BACKEND.Cudnn)
    geometry = (padding, [0] * len(padding), stride, dilation, groups)
    return _forward(self, weight, _size(self, weight, geometry, transposed=False), layout)


@special("aten::cudnn_convolution_transpose")
def cudnn_convolution_transpose(
    _op: Any,
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """CuDNN's transposed convolution: the gradient of the inputs of the ordinary one."""
    layout = _format(self, weight, BACKEND.CudnnTranspose)
    geometry = (padding, output_padding, stride, dilation, groups)
    return _forward(self, weight, _size(self, weight, geometry, transposed=True), layout)


@special("aten::_conv_depthwise2d", "aten::conv_depthwise3d")
def conv_depthwise(
    _op: Any,
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """PyTorch's own kernels for one filter a channel (DepthwiseConv2d.cu)."""
    del kernel_size, bias
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
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a convolution, by the backend of its forward pass."""
    n_dims = weight.dim()
    backend = torch._C._select_conv_backend(
        _seen_dense(input) if n_dims == IMAGE - 1 else input, weight, None, stride, padding,
        dilation, transposed, output_padding, groups, bias_sizes,
    )  # fmt: skip
    if n_dims == IMAGE - 1:  # one dimension is worked on as two
        input = input.contiguous().unsqueeze(2)  # noqa: A001
        grad_output, weight = grad_output.unsqueeze(2), weight.unsqueeze(2)
    layout = _format(input, weight, backend)
    if backend in {BACKEND.Cudnn, BACKEND.CudnnTranspose}:
        gradient = grad_output
        if backend == BACKEND.CudnnTranspose:  # of others each of both results copies what has gaps
            gradient = gradient.contiguous(memory_format=_suggested(input))
        first, second = _cudnn_backward(gradient, input, weight, output_mask, layout)
        del gradient
    elif backend in {BACKEND.CudaDepthwise2d, BACKEND.CudaDepthwise3d}:
        first, second = _depthwise_backward(grad_output, input, weight, output_mask)
    else:
        first = like_format(input, input.shape, layout) if output_mask[0] else None
        second = like_format(weight, weight.shape, layout) if output_mask[1] else None
    if n_dims == IMAGE - 1:
        first = None if first is None else first.squeeze(2)
        second = None if second is None else second.squeeze(2)
    bias = None
    if output_mask[2]:
        bias = grad_output.sum([0, *range(2, grad_output.dim())])
    return first, second, bias


def _seen_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of a tensor's memory; the choice of a backend would copy it."""
    if (
        tensor.is_contiguous()
        or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
    ):
        return tensor
    return tensor.as_strided(tensor.shape, dense_strides(tensor.shape), 0)


def _cudnn_backward(
    grad_output: torch.Tensor,
    input_: torch.Tensor,
    weight: torch.Tensor,
    mask: Sequence[bool],
    layout: torch.memory_format,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    held = input_.contiguous(memory_format=layout) if mask[1] else input_
    gradient, layout = grad_output, _suggested(held)
    if _suggested(gradient) is not layout:
        gradient = gradient.contiguous(memory_format=layout)
    first = second = None
    if mask[0]:
        wanted = _format(gradient, weight, BACKEND.Cudnn)
        first = like_format(input_, input_.shape, wanted)
        dense_weight = _dense(weight, wanted)
        dense_gradient = _dense(gradient, wanted)
        del dense_gradient, dense_weight
    if mask[1]:
        wanted = _format(held, gradient, BACKEND.Cudnn)
        dense_gradient = _dense(gradient, wanted)
        dense_input = _dense(held, wanted)
        second = like_format(weight, weight.shape, wanted)
        del dense_input, dense_gradient
    del gradient, held
    return first, second


def _suggested(tensor: torch.Tensor) -> torch.memory_format:
    """Return the layout that PyTorch sees in a tensor: channels last where it is told apart."""
    if tensor.dim() == IMAGE and tensor.is_contiguous(memory_format=torch.channels_last):
        return (
            torch.contiguous_format
            if tensor.is_contiguous() and tensor.shape[1] == 1
            else torch.channels_last
            if not tensor.is_contiguous()
            else torch.contiguous_format
        )
    if (
        tensor.dim() == IMAGE + 1
        and tensor.is_contiguous(memory_format=torch.channels_last_3d)
        and not tensor.is_contiguous()
    ):
        return torch.channels_last_3d
    return torch.contiguous_format


def _depthwise_backward(
    grad_output: torch.Tensor, input_: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    first = second = None
    plain = torch.contiguous_format
    held = [_dense(grad_output, plain), _dense(weight, plain), _dense(input_, plain)]
    if mask[1]:
        second = like_format(weight, weight.shape, plain)
    if mask[0]:
        first = like_format(input_, input_.shape, plain)
    while held:
        held.pop()
    return first, second


@rule("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "dot", "vdot")
def _product(call: Call) -> Iterable[Step]:
    """Copies of matrices that cuBLAS cannot take as they lie (``prepare_matrix_for_cublas``)."""
    yield from call.results
    for tensor in call.args:
        if isinstance(tensor, torch.Tensor) and not _fits_blas(tensor):
            yield Temp(n_bytes(tensor))
    yield UseBlas()


def _fits_blas(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2 or not tensor.numel():
        return True
    (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
