"""Memory that kernels take for themselves: outputs of no operation, invisible to fake tensors.

Each entry says what it is and where PyTorch allocates it. What is not here was looked for in
recordings of real runs and not found, or cannot be known without the library that decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from fragdoctor.estimation.tracing.reduction import reduction_bytes

FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class Scratch:
    """A buffer that lives as long as its kernel.

    Attributes:
        comes_first: whether it is allocated before the outputs; that decides where they lie.
    """

    n_bytes: int
    reason: str
    comes_first: bool = False


Arguments = tuple[Any, ...]
Rule = Callable[[Arguments, dict[str, Any]], Iterable[Scratch]]


def _reduction(args: Arguments, kwargs: dict[str, Any]) -> Iterator[Scratch]:
    """Partial results of a reduction over several thread blocks (Reduce.cuh)."""
    tensor = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        dims = range(tensor.dim())
    axes = tuple(d % max(1, tensor.dim()) for d in dims)
    for n_bytes in reduction_bytes(tensor, axes):
        yield Scratch(n_bytes, "partial sums of a reduction")


def _cudnn_attention_backward(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
    """The gradient of the queries in float, and the row sums (cuDNN's workspace)."""
    query = args[1]
    rows = prod(query.shape[:-1])
    yield Scratch(rows * (query.shape[-1] + 1) * FLOAT, "workspace of cuDNN attention backward")


def _embedding_backward(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
    """Sorted indices, their segments, and a partial sum for each segment (Embedding.cu).

    Up to 3072 indices without padding a kernel without buffers is taken. The number of segments is
    not known before the sort; PyTorch takes its upper bound.
    """
    gradient, indices, n_rows = args[0], args[1], int(args[2])
    n = indices.numel()
    if n <= EMBEDDING_UNSORTED and (len(args) < 4 or args[3] < 0):
        return
    for _number in range(EMBEDDING_INDEX_BUFFERS):
        yield Scratch(n * indices.element_size(), "sorted indices of an embedding's gradient")
    segments = n // EMBEDDING_ROWS + min(n, n_rows)
    yield Scratch(segments * gradient.shape[-1] * FLOAT, "partial sums of an embedding's gradient")


def _convolution(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
    """Copies into the layout that cuDNN takes: channels last if input or weight has it."""
    yield from _relaid(args[0], args[1])


def _convolution_backward(args: Arguments, kwargs: dict[str, Any]) -> Iterator[Scratch]:
    """The copies of the forward pass again, and the sum for the bias over batch and pixels."""
    gradient, inputs, weight = args[:3]
    yield from _relaid(inputs, weight)
    mask = kwargs.get("output_mask", args[-1])
    if isinstance(mask, list | tuple) and mask[-1]:
        axes = tuple(d for d in range(gradient.dim()) if d != 1)
        for n_bytes in reduction_bytes(gradient, axes):
            yield Scratch(n_bytes, "partial sums of a bias gradient")


def _relaid(inputs: torch.Tensor, weight: torch.Tensor) -> Iterator[Scratch]:
    layouts = [suggest_memory_format(t) for t in (inputs, weight)]
    wanted = torch.channels_last if torch.channels_last in layouts else torch.contiguous_format
    for tensor in (inputs, weight):
        if tensor.dim() == IMAGE_DIMENSIONS and not tensor.is_contiguous(memory_format=wanted):
            yield Scratch(tensor.numel() * tensor.element_size(), "copy to cuDNN's layout")


def _dense_copies(*positions: int) -> Rule:
    """Kernels that call ``contiguous()`` on what they are given."""

    def rule(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
        for position in positions:
            tensor = args[position] if position < len(args) else None
            if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
                yield Scratch(tensor.numel() * tensor.element_size(), "dense copy for a kernel")

    return rule


def _product(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
    """Copies of matrices that cuBLAS cannot take as they lie (prepare_matrix_for_cublas)."""
    for tensor in args:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
        fits = (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
        if not fits and tensor.numel():
            yield Scratch(tensor.numel() * tensor.element_size(), "dense copy for cuBLAS")


def _softmax_backward(args: Arguments, kwargs: dict[str, Any]) -> Iterator[Scratch]:
    """The product of gradient and output (SoftMax.cu)."""
    yield from _dense_copies(0, 1)(args, kwargs)
    yield Scratch(args[0].numel() * args[0].element_size(), "product of gradient and softmax")


def _safe_softmax(args: Arguments, _: dict[str, Any]) -> Iterator[Scratch]:
    """The plain softmax, and where all of a row is masked, before the two are put together."""
    tensor = args[0]
    plain = tensor.numel() * tensor.element_size()
    yield Scratch(plain, "softmax before masked rows are cleared", comes_first=True)
    yield Scratch(tensor.numel(), "which scores are masked", comes_first=True)


def _pointwise_loss(args: Arguments, kwargs: dict[str, Any]) -> Iterator[Scratch]:
    """The loss of each element, once to find the shape and once to sum (PointwiseOps, Loss.cu)."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction:
        tensor = args[0]
        for _ in range(2):
            yield Scratch(tensor.numel() * tensor.element_size(), "loss of each element")


IMAGE_DIMENSIONS: Final = 4
EMBEDDING_UNSORTED: Final = 3072
EMBEDDING_ROWS: Final = 10
EMBEDDING_INDEX_BUFFERS: Final = 7

RULES: Final[dict[str, Rule]] = {
    "sum": _reduction,
    "mean": _reduction,
    "amax": _reduction,
    "_softmax": _dense_copies(0),
    "_log_softmax": _dense_copies(0),
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "native_layer_norm": _dense_copies(0),
    "native_layer_norm_backward": _dense_copies(0, 1),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(
        (
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
            "upsample_nearest3d_backward",
        ),
        _dense_copies(0),
    ),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mse_loss": _pointwise_loss,
    "smooth_l1_loss": _pointwise_loss,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
}


def scratch_of(name: str, args: Arguments, kwargs: dict[str, Any]) -> Iterable[Scratch]:
    """Return what the kernel of an operation allocates beside its outputs."""
    rule = RULES.get(name)
    if rule is None or not args or not isinstance(args[0], torch.Tensor):
        return ()
    return rule(args, kwargs)
