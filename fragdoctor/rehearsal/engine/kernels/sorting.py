"""Sorts, selections and prefix sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels import cub
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
    n_bytes,
    returned_from,
    rule,
)

INDEX_BYTES: Final = 8
ACCUMULATOR_BYTES: Final = 4
FEW_ROWS, OFTEN = 512, 30  # embeddings of few rows, each used often, are summed in place
SORT_IN_BLOCK: Final = 4096  # rows up to this length are sorted by one block each
SEGMENTED_FROM: Final = 128
ONE_BY_ONE_FROM: Final = 1_000_000
RADIX_DIGITS: Final = 256
BLOCK_THREADS: Final = 256
MIN_ITEMS, MAX_ITEMS = 4, 64
REGISTERS_PER_BLOCK: Final = 40 * BLOCK_THREADS
REGISTERS: Final = 65536
# Number of slices up to -> least length from which several blocks share one (TensorTopK.cu).
_SHARED_FROM: Final = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000),
                       (4_000, 800))  # fmt: skip
_SHARED_OTHERWISE: Final = 400


copied_after("_cummax_helper", "_cummin_helper", "_logcumsumexp")
copied_after("bucketize", "searchsorted", places=(0, 1))
copied_before("kthvalue")


@after_results("mode")
def _mode(call: Call) -> Iterable[Step]:
    """Each slice is sorted in one piece (TensorModeKernel.cpp)."""
    tensor: torch.Tensor = call.args[0]
    if tensor.dim():
        yield from copied_unless_dense(tensor.transpose(call.argument("dim"), -1))


@rule("sort")
def _sort(call: Call) -> Iterable[Step]:
    """``sort_stable`` (Sort.cpp, SegmentedSort): rows in a block each, or segments in one array."""
    tensor: torch.Tensor = call.args[0]
    yield from call.results
    yield from sort_steps(tensor, call.argument("dim"))


def sort_steps(tensor: torch.Tensor, dim: int) -> Iterable[Step]:
    """Return the steps of a sort besides values and indices."""
    n = tensor.numel()
    if not n or not tensor.dim():
        return
    length = tensor.shape[dim]
    size = tensor.element_size()
    if length <= SORT_IN_BLOCK:
        yield Temp(length * INDEX_BYTES)
        return
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if tensor.stride(dim) != 1 or not is_dense:
        yield from (Temp(n * size), Temp(n * size), Temp(n * INDEX_BYTES))
    n_segments = n // length
    if n_segments == 1 or length >= ONE_BY_ONE_FROM:
        yield Temp(length * INDEX_BYTES)
        for _ in range(n_segments):
            yield from held_only(cub.radix_sort(length, size, INDEX_BYTES))
    elif n_segments < SEGMENTED_FROM:
        yield from _by_value_and_segment(n, size)
    else:
        yield Temp(n * INDEX_BYTES)
        yield Temp(cub.segmented_sort(n, size, INDEX_BYTES))


def _by_value_and_segment(n: int, size: int) -> Iterable[Step]:
    """Sort everything by value, then by segment (``segmented_sort_pairs_by_full_sort``)."""
    values = Temp(n * size)
    yield from (Temp(n * INDEX_BYTES), Temp(n * INDEX_BYTES), values)
    yield from held_only(cub.radix_sort(n, size, INDEX_BYTES))
    yield Free(values)
    yield from held_only(cub.radix_sort_in_place(n))


@after_results("topk")
def _topk(call: Call) -> Iterable[Step]:
    tensor: torch.Tensor = call.args[0]
    yield from copied_unless_dense(tensor)
    dim = call.argument("dim")
    length = tensor.shape[dim] if tensor.dim() else 1
    yield from returned_from(topk_steps(tensor, length))
    k = call.args[1]
    if call.argument("sorted") and k > SORT_IN_BLOCK:
        # Selected values are sorted like any tensor; their indices are gathered (TensorTopK.cpp).
        n_slices = tensor.numel() // max(1, length)
        selected = torch.empty(n_slices, k, dtype=tensor.dtype, device="meta")
        yield from (Temp(n_slices * k * INDEX_BYTES), Temp(n_bytes(selected)))
        yield from returned_from(sort_steps(selected, -1))
        yield Temp(n_slices * k * INDEX_BYTES)


def topk_steps(tensor: torch.Tensor, length: int) -> Iterable[Step]:
    """Return the steps of ``topk`` if several blocks share a slice (``mbtopk``)."""
    n_slices = tensor.numel() // max(1, length)
    least = next((least for most, least in _SHARED_FROM if n_slices <= most), _SHARED_OTHERWISE)
    if length < least:
        return
    processors = session.current().facts.n_multiprocessors
    threads = processors * (REGISTERS // REGISTERS_PER_BLOCK) * BLOCK_THREADS
    items = min(max(-(-n_slices * length // threads), MIN_ITEMS), MAX_ITEMS)
    blocks = n_slices * -(-length // (items * BLOCK_THREADS))
    yield Temp(n_slices * tensor.element_size())
    yield Temp(n_slices * 8)
    yield Temp(n_slices * 8)
    yield Temp(blocks * RADIX_DIGITS * 2)
    yield Temp(n_slices * RADIX_DIGITS * 4)
    yield Temp(blocks * 4)
    yield Temp(blocks * 4)
    for _ in range(2):
        yield from held_only(cub.buffers((-(-blocks // 1024) + cub.EXTRA_TILES) * 16, 1))


@after_results("cumsum", "cumprod", "cumsum_", "cumprod_")
def _cumulate(call: Call) -> Iterable[Step]:
    """A prefix sum along one dimension; only that of a flat tensor uses CUB."""
    tensor: torch.Tensor = call.args[0]
    n, dtype = tensor.numel(), call.out_dtype
    is_flat = tensor.dim() <= 1 or max(tensor.shape) == n
    if tensor.dtype != dtype:
        yield Temp(n * dtype.itemsize)
    elif not is_flat:
        yield from copied_unless_dense(tensor)
    if is_flat and n:
        yield Temp(cub.scan(n, dtype.itemsize))


@rule("median", "nanmedian")
def _median(call: Call) -> Iterable[Step]:
    """The median of a whole tensor: sorted, then picked (``median_impl`` in Sorting.cpp)."""
    tensor: torch.Tensor = call.args[0]
    if call.argument("dim") is not None:
        yield from (*copied_unless_dense(tensor), *call.results)
        return
    n = tensor.numel()
    values, indices = Temp(n_bytes(tensor)), Temp(n * INDEX_BYTES)
    yield from (values, indices)
    yield from returned_from(sort_steps(tensor.reshape(-1), 0) if n else ())
    yield Free(indices)
    missing = Temp(1)
    yield missing
    yield Out(0)
    yield Free(missing)


def embedding_steps(
    n: int,
    index_bytes: int,
    n_rows: int,
    gradient: torch.Tensor,
    *,
    by_frequency: bool,
    result: Step,
) -> Iterable[Step]:
    """Return the steps of an embedding's gradient by sorted indices (Embedding*.cu).

    The number of runs of equal indices is not known before the sort; PyTorch uses the largest
    possible number.
    """
    order, sorted_ = Temp(n * index_bytes), Temp(n * index_bytes)
    numbers = Temp(n * index_bytes)
    yield from (order, sorted_, numbers)
    yield from held_only(cub.radix_sort(n, index_bytes, index_bytes))
    yield Free(numbers)
    counts = Temp(n * index_bytes)
    if by_frequency:
        yield counts
        for _ in range(2):
            yield from held_only(cub.buffers((n // 2304 + 1 + cub.EXTRA_TILES) * 16, 1))
    yield result
    segments = min(n, n_rows)
    yield from (Temp(n * index_bytes), Temp(8))
    dummy = Temp(n * index_bytes)
    yield dummy
    yield from held_only(cub.unique_by_key(n, index_bytes))
    yield Free(dummy)
    yield from (Temp(segments * index_bytes), Temp(segments * index_bytes))
    yield from held_only(cub.scan(segments, index_bytes))
    n_parts = n // 10 + segments
    yield Temp(8)
    yield Temp(n_parts * index_bytes)
    row_bytes = gradient.shape[-1] * ACCUMULATOR_BYTES
    if n_rows <= FEW_ROWS and n >= OFTEN * n_rows:
        yield Temp(n_parts * index_bytes)
        if gradient.element_size() < ACCUMULATOR_BYTES:
            yield Temp(n_rows * row_bytes)
    else:
        yield Temp(n_parts * row_bytes)
