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


EMBEDDING_UNSORTED: Final = 3072
EMBEDDING_ROWS: Final = 10
EMBEDDING_INDEX_BUFFERS: Final = 7

RULES: Final[dict[str, Rule]] = {
    "sum": _reduction,
    "mean": _reduction,
    "amax": _reduction,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
}


def scratch_of(name: str, args: Arguments, kwargs: dict[str, Any]) -> Iterable[Scratch]:
    """Return what the kernel of an operation allocates beside its outputs."""
    rule = RULES.get(name)
    if rule is None or not args or not isinstance(args[0], torch.Tensor):
        return ()
    return rule(args, kwargs)
