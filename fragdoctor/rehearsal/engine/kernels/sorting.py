"""Sorts, selections and prefix sums."""

from __future__ import annotations

from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels import cub
from fragdoctor.rehearsal.engine.kernels.reduction import accumulator_bytes, extremes
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    after_results,
    copied_after,
    copied_before,
    n_bytes,
    rule,
)

INDEX_BYTES: Final = 8
FEW_ROWS, OFTEN = 512, 30  # embeddings of few rows, each used often, are summed in place
SORT_IN_BLOCK: Final = 4096  # rows up to this length are sorted by one block each
SEGMENTED_FROM: Final = 128
ONE_BY_ONE_FROM: Final = 1_000_000
BLOCK_THREADS: Final = 256
MIN_ITEMS, MAX_ITEMS = 4, 64
REGISTERS_PER_BLOCK: Final = 40 * BLOCK_THREADS
REGISTERS: Final = 65536
# Number of slices up to -> least length from which several blocks share one (TensorTopK.cu).
_SHARED_FROM: Final = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000),
                       (4_000, 800))  # fmt: skip
_SHARED_OTHERWISE: Final = 400


copied_after("_cummax_helper", "_cummin_helper", "_logcumsumexp")
copied_before("kthvalue")


@rule("bucketize", "searchsorted")
def _searchsorted(call: Call) -> None:
    """A number becomes a tensor, an order is checked, and two types get one (Bucketization.cu)."""
    is_search = call.op.overloadpacket.__name__ == "searchsorted"
    bounds, looked_up = call.args[:2] if is_search else call.args[1::-1]
    if not isinstance(looked_up, torch.Tensor):
        looked_up = torch.tensor(looked_up, dtype=type(looked_up))  # type: ignore[arg-type]
        call.take(n_bytes(looked_up))
    order = call.argument("sorter")
    if order is not None:
        with call.scope():
            call.take(INDEX_BYTES, INDEX_BYTES)
            extremes(call, order, 2)
    call.make_all()
    call.copy(looked_up, bounds, order)
    common = torch.result_type(bounds, looked_up)
    call.take(*(t.numel() * common.itemsize for t in (looked_up, bounds) if t.dtype != common))


@after_results("mode")
def _mode(call: Call) -> None:
    """Each slice is sorted in one piece (TensorModeKernel.cpp)."""
    tensor: torch.Tensor = call.args[0]
    if tensor.dim():
        call.copy(tensor.transpose(call.argument("dim"), -1))


def _take_for_sort(call: Call, tensor: torch.Tensor, dim: int) -> None:
    """``sort_stable`` (Sort.cpp, SegmentedSort): rows in a block each, or segments in one array."""
    n = tensor.numel()
    if not n or not tensor.dim():
        return
    length = tensor.shape[dim]
    size = tensor.element_size()
    if length <= SORT_IN_BLOCK:
        call.take(length * INDEX_BYTES)
        return
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if tensor.stride(dim) != 1 or not is_dense:
        call.take(n * size)
        if tensor.stride(dim) != min(tensor.stride()):  # results are laid out otherwise
            call.take(n * size, n * INDEX_BYTES)
    n_segments = n // length
    if n_segments == 1 or length >= ONE_BY_ONE_FROM:
        call.take(length * INDEX_BYTES)
        for _ in range(n_segments):
            call.hold(cub.radix_sort(length, size, INDEX_BYTES))
    elif n_segments < SEGMENTED_FROM:
        # Everything is sorted by value, then by segment (``segmented_sort_pairs_by_full_sort``).
        *_, values = call.take(n * INDEX_BYTES, n * INDEX_BYTES, n * size)
        call.hold(cub.radix_sort(n, size, INDEX_BYTES))
        call.free(values)
        call.hold(cub.radix_sort_in_place(n))
    else:
        call.take(n * INDEX_BYTES, cub.buffers(n * size, n * INDEX_BYTES))


after_results("sort")(lambda call: _take_for_sort(call, call.args[0], call.argument("dim")))


@after_results("topk")
def _topk(call: Call) -> None:
    tensor: torch.Tensor = call.args[0]
    call.copy(tensor)
    dim = call.argument("dim")
    length = tensor.shape[dim] if tensor.dim() else 1
    with call.scope():
        _take_for_topk(call, tensor, length)
    k = call.args[1]
    if call.argument("sorted") and k > SORT_IN_BLOCK:
        # Selected values are sorted like any tensor; their indices are gathered (TensorTopK.cpp).
        n_slices = tensor.numel() // max(1, length)
        selected = torch.empty(n_slices, k, dtype=tensor.dtype, device="meta")
        call.take(n_slices * k * INDEX_BYTES, n_bytes(selected))
        with call.scope():
            _take_for_sort(call, selected, -1)
        call.take(n_slices * k * INDEX_BYTES)


def _take_for_topk(call: Call, tensor: torch.Tensor, length: int) -> None:
    """Several blocks may share a slice (``mbtopk``)."""
    n_slices = tensor.numel() // max(1, length)
    least = next((least for most, least in _SHARED_FROM if n_slices <= most), _SHARED_OTHERWISE)
    if length < least:
        return
    processors = session.current().facts.n_multiprocessors
    threads = processors * (REGISTERS // REGISTERS_PER_BLOCK) * BLOCK_THREADS
    items = min(max(-(-n_slices * length // threads), MIN_ITEMS), MAX_ITEMS)
    blocks = n_slices * -(-length // (items * BLOCK_THREADS))
    call.take(n_slices * tensor.element_size(), n_slices * 8, n_slices * 8)
    call.take(
        blocks * cub.RADIX_DIGITS * 2, n_slices * cub.RADIX_DIGITS * 4, blocks * 4, blocks * 4
    )
    for _ in range(2):
        call.hold(cub.buffers((-(-blocks // 1024) + cub.EXTRA_TILES) * 16, 1))


@after_results("cumsum", "cumprod", "cumsum_", "cumprod_")
def _cumulate(call: Call) -> None:
    """A prefix sum along one dimension; only that of a flat tensor uses CUB."""
    tensor: torch.Tensor = call.args[0]
    n, dtype = tensor.numel(), call.out_dtype
    is_flat = tensor.dim() <= 1 or max(tensor.shape) == n
    if tensor.dtype != dtype:
        call.take(n * dtype.itemsize)
    elif not is_flat:
        call.copy(tensor)
    if is_flat and n:
        call.take(cub.scan(n, dtype.itemsize))


@rule("median", "nanmedian")
def _median(call: Call) -> None:
    """The median of a whole tensor: sorted, then picked (``median_impl`` in Sorting.cpp)."""
    tensor: torch.Tensor = call.args[0]
    if call.argument("dim") is not None:
        call.copy(tensor)
        call.make_all()
        return
    n = tensor.numel()
    _, indices = call.take(n_bytes(tensor), n * INDEX_BYTES)
    strides, dtype = tensor.stride(), tensor.dtype
    flat = torch.empty_strided(tensor.shape, strides, dtype=dtype, device="meta").reshape(-1)
    with call.scope():
        if flat.is_contiguous():
            call.copy(tensor)
        _take_for_sort(call, flat, 0)
    call.free(indices)
    missing = call.take(1)
    call.make(0)
    call.free(*missing)


def take_for_embedding(call: Call, n_rows: int, *, by_frequency: bool) -> None:
    """An embedding's gradient by sorted indices (Embedding*.cu).

    The number of runs of equal indices is not known before the sort; PyTorch uses the largest
    possible number.
    """
    gradient, indices = call.args[:2]
    n, index_bytes = indices.numel(), indices.element_size()
    *_, numbers = call.take(*[n * index_bytes] * 3)  # after the order and the sorted indices
    call.hold(cub.radix_sort(n, index_bytes, index_bytes))
    call.free(numbers)
    if by_frequency:
        call.take(n * index_bytes)
        for _ in range(2):
            call.hold(cub.buffers((n // 2304 + 1 + cub.EXTRA_TILES) * 16, 1))
    call.make(0)
    segments = min(n, n_rows)
    *_, dummy = call.take(n * index_bytes, 8, n * index_bytes)
    call.hold(cub.unique_by_key(n, index_bytes))
    call.free(dummy)
    call.take(segments * index_bytes, segments * index_bytes)
    call.hold(cub.scan(segments, index_bytes))
    n_parts = n // 10 + segments
    call.take(8, n_parts * index_bytes)
    item = accumulator_bytes(gradient.dtype)
    row_bytes = gradient.shape[-1] * item
    if n_rows <= FEW_ROWS and n >= OFTEN * n_rows:
        call.take(n_parts * index_bytes)
        if gradient.element_size() < item:
            call.take(n_rows * row_bytes)
    else:
        call.take(n_parts * row_bytes)
