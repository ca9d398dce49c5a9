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

from fragdoctor.estimate.tracing.reduction import reduction_bytes

FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class Scratch:
    """A buffer that lives as long as its kernel."""

    n_bytes: int
    reason: str


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
    if inputs.dim() != IMAGE_DIMENSIONS:
        return
    last = [t.is_contiguous(memory_format=torch.channels_last) for t in (inputs, weight)]
    if any(last) and not all(last):
        other = weight if last[0] else inputs
        if not other.is_contiguous() or other.shape[1] > 1:
            yield Scratch(other.numel() * other.element_size(), "copy to channels last for cuDNN")


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
