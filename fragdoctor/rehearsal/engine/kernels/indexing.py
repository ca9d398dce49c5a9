"""Gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from math import ceil, log, log2, prod
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import session, values
from fragdoctor.rehearsal.engine.dispatch import Handler, of_cpu, special
from fragdoctor.rehearsal.engine.kernels import cub
from fragdoctor.rehearsal.engine.kernels.scratch import Call, after_results, in_order, n_bytes, rule
from fragdoctor.rehearsal.engine.kernels.sorting import take_for_embedding
from fragdoctor.rehearsal.engine.tensors import new, scratch

UNSORTED: Final = 3072  # up to this many indices, an embedding's gradient needs no sort
INDEX_BYTES: Final = 8
MAXIMUM: Final = 2  # mode of an embedding bag
MASKS: Final = (torch.bool, torch.uint8)

in_order("_embedding_bag", "_embedding_bag_forward_only", order=(2, 1, 0, 3))


@rule("roll")
def _roll(call: Call) -> None:
    """Each dimension in turn, from the result of the previous one (TensorTransformations.h)."""
    tensor, shifts = call.args[:2]
    copied = call.copy(tensor)
    for _ in shifts[1:]:
        call.take(n_bytes(tensor))
        call.free(*copied)
        copied = []
    call.make_all()
    call.free(*copied)


@after_results("index_reduce", "index_reduce_")
def _counted(call: Call) -> None:
    """A mean is a sum over how often each element was added to (Indexing.cu)."""
    if call.argument("reduce") == "mean":
        call.take(n_bytes(call.args[0]))
        call.hold(n_bytes(call.argument("source")))
        call.take(call.args[0].numel())


@rule("masked_scatter", "masked_scatter_")
def _masked_scatter(call: Call) -> None:
    """A prefix sum of the mask says which element each one is taken from (IndexKernel.cpp)."""
    tensor, mask, source = call.args[:3]
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    n = shape.numel()
    call.make_all()
    if not n:
        return
    call.take(n * INDEX_BYTES)
    call.copy(mask.expand(shape))
    call.hold(cub.scan(n, INDEX_BYTES))
    call.copy(source)


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> None:
    gradient, indices, n_rows, _, by_frequency = call.args
    call.copy(indices, gradient)
    is_sorted = indices.numel() > UNSORTED or by_frequency
    _gradient(call, n_rows, by_frequency=by_frequency, is_sorted=is_sorted)


@rule("_embedding_bag_dense_backward")
def _embedding_bag_backward(call: Call) -> None:
    """Sums and means are an embedding's gradient per bag; maxima are scattered (EmbeddingBag)."""
    n_rows, by_frequency, mode = (call.args[i] for i in (5, 6, 7))
    call.copy(call.args[0])
    _gradient(call, n_rows, by_frequency=by_frequency, is_sorted=mode != MAXIMUM)


def _gradient(call: Call, n_rows: int, *, by_frequency: bool, is_sorted: bool) -> None:
    if is_sorted and call.args[1].numel():
        take_for_embedding(call, int(n_rows), by_frequency=bool(by_frequency))
    else:
        call.make(0)


@special("aten::index.Tensor_out")
def index_into(_op: Any, _self: torch.Tensor, _indices: Any, *, out: torch.Tensor) -> torch.Tensor:
    """The kernel behind ``x[i, mask]``, whose indices are ready."""
    return out


@special("aten::_index_put_impl_")
def index_put(
    op: Any,
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """``x[i] = v``; if values accumulate, the indices are sorted first (Indexing.cu)."""
    if not (accumulate or torch.are_deterministic_algorithms_enabled()):
        return of_cpu("CPU", op, self, indices, values, accumulate, unsafe)  # type: ignore[no-any-return]
    _put_sorted(self, indices, values, is_checked=not unsafe)
    return self


def _put_sorted(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    *,
    is_checked: bool,
) -> None:
    """``index_put_with_sort_kernel``: one index for all dimensions is sorted."""
    places: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:  # as the positions that it keeps
            places += index.nonzero().unbind(1)
        else:
            places.append(None if index is None else index.to(self.device, torch.int64))
    given = torch.broadcast_tensors(*(t for t in places if t is not None))
    n = given[0].numel()
    linear = None
    for one in given:
        if is_checked and n:
            for extreme in (one.max, one.min):
                found = extreme()
                scratch(self, 1)  # it is compared with the size of the dimension
                del found
        wrapped, scaled = (scratch(self, n * INDEX_BYTES) for _ in range(2))
        del wrapped, one
        linear = scaled if linear is None else linear
        del scaled
    if not n:
        return
    first = next(i for i, t in enumerate(places) if t is not None)
    is_adjacent = all(t is not None for t in places[first : first + len(given)])
    n_before = self.shape[:first].numel() if is_adjacent else 1
    n_indexed = prod(n for n, i in zip(self.shape, places, strict=False) if i is not None)
    n_after = self.numel() // max(1, n_before * n_indexed)
    del places, given
    bits = max(1, self.numel() // max(1, n_after)).bit_length()
    needed = n * n_before * n_after
    is_ready = values.is_contiguous() and values.numel() >= needed
    copied = None if is_ready else scratch(self, needed * values.element_size())
    whole = None if is_adjacent and self.is_contiguous() else scratch(self, n_bytes(self))
    ordered, original, numbers = (scratch(self, n * INDEX_BYTES) for _ in range(3))
    scratch(self, cub.radix_sort(n, INDEX_BYTES, INDEX_BYTES, bits))
    del numbers, original, ordered, whole, copied, linear


def _or_out(handler: Handler) -> Handler:
    """Let a handler put a result whose size depends on values into ``out=``."""

    @wraps(handler)
    def put(op: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        made = handler(op, *args, **kwargs)
        if out is None:
            return made
        if out.shape != made.shape:
            torch.ops.aten.set_.source_Tensor(out, made)
        return out

    return put


@special("aten::nonzero")
@_or_out
def nonzero(_op: Any, self: torch.Tensor) -> torch.Tensor:
    """``nonzero``: the count would be read from the GPU, so it is assumed (Nonzero.cu)."""
    n = self.numel()
    found = values.n_kept(self, "nonzero")
    copied = None if self.is_contiguous() else scratch(self, n_bytes(self))
    number = scratch(self, 4)
    if n:
        scratch(self, cub.count(n, session.current().facts.n_multiprocessors))
    made = new((self.dim(), found), None, torch.int64, self.get_device())
    if n:
        scratch(self, cub.select(n))
    del number, copied
    return made.t()


@special("aten::masked_select")
@_or_out
def masked_select(_op: Any, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``masked_select``: indexing with a mask."""
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return self.expand(shape)[mask.expand(shape)]


@special("aten::bincount")
@_or_out
def bincount(
    _op: Any, self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """``bincount``: the least and the largest value are read from the GPU (SummaryOps.cu)."""
    n_bins = minlength
    if self.numel():
        self.min().item()
        n_bins = max(n_bins, int(self.max().item()) + 1)
    dtype = torch.int64
    if weights is not None:
        dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
    return new((n_bins,), None, dtype, self.get_device())


@special("aten::repeat_interleave.Tensor")
def repeat_interleave(
    _op: Any, repeats: torch.Tensor, output_size: int | None = None
) -> torch.Tensor:
    """``repeat_interleave``: the length of the result is read from the GPU (Repeat.cu)."""
    if not repeats.numel():
        return new((0,), None, repeats.dtype, repeats.get_device())
    sums = repeats.cumsum(0)
    n = output_size
    if n is None:
        n = values.n_repeated(repeats)
        (repeats >= 0).all()
    result = new((n,), None, repeats.dtype, repeats.get_device())
    del sums
    return result


@special("aten::_unique2")
def unique(
    _op: Any,
    self: torch.Tensor,
    _sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``unique``: the result keeps memory for as many values as went in (Unique.cu)."""
    n, size = self.numel(), self.element_size()
    found = values.n_kept(self, "unique")
    ordered, places = scratch(self, n * size), None
    if return_inverse or return_counts:
        places = scratch(self, n * INDEX_BYTES)
        numbers = scratch(self, n * INDEX_BYTES)
        scratch(self, cub.radix_sort(n, size, INDEX_BYTES))
        del numbers
    else:
        scratch(self, cub.radix_sort(n, size))
    where = _positions(self, self.shape if return_inverse else (0,))
    if return_inverse:
        mask = scratch(self, n * INDEX_BYTES)
        scratch(self, cub.scan(n, 4))
        del mask
    result = _selected(self, found, where, counts=return_counts)
    del places, ordered
    return result


@special("aten::isin.Tensor_Tensor")
def isin(_op: Any, elements: torch.Tensor, test_elements: torch.Tensor, **_: Any) -> torch.Tensor:
    """``isin``: few values are compared with each, many are sorted together (TensorCompare.cpp)."""
    result = new(elements.shape, None, torch.bool, elements.get_device())
    if test_elements.numel() < 10 * elements.numel() ** 0.145:
        same = elements.unsqueeze(-1).eq(test_elements.view(-1))
        whether = same.any(-1)
        del whether, same
    else:
        every = torch.cat([elements.ravel(), test_elements.ravel()])
        ordered, order = every.sort(stable=True, dim=0)
        is_double = ordered.bool()
        is_double[:-1].copy_(ordered[1:].eq(ordered[:-1]))
        torch.empty_like(is_double).index_copy_(0, order, is_double)
    return result


@special("aten::embedding_renorm_")
def embedding_renorm(_op: Any, self: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
    """The rows looked up are sorted, so that each is scaled once (Embedding.cu)."""
    ordered = indices.sort()[0].contiguous()
    _selected(ordered, ordered.numel(), ordered, counts=False)
    return self


@special("aten::unique_dim")
def unique_rows(
    _op: Any,
    self: torch.Tensor,
    dim: int,
    is_sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``unique`` along a dimension: numbers of slices are sorted and selected (Unique.cu)."""
    n = self.shape[dim]
    one_of_each = self.movedim(dim, 0)
    while one_of_each.dim() > 1:
        one_of_each = one_of_each.select(1, 0)
    found = values.n_kept(one_of_each, "unique")
    dense = self.movedim(dim, 0).contiguous()
    order = scratch(self, n * INDEX_BYTES)
    if is_sorted:
        scratch(self, cub.merge_sort(n, INDEX_BYTES, 0))
    where = _positions(self, (n if return_inverse else 0,))
    if return_inverse:
        places = scratch(self, n * INDEX_BYTES)
        scratch(self, cub.buffers())
        scratch(self, cub.scan(n, INDEX_BYTES))
        del places
    edges = scratch(self, (n + 1) * INDEX_BYTES) if return_counts else None
    scratch(self, cub.thrust_unique_by_key(n))
    counts = _positions(self, (found if return_counts else 0,))
    del edges
    result = new((found, *dense.shape[1:]), None, self.dtype, self.get_device())
    del dense, order
    return result.movedim(0, dim), where, counts


@special("aten::unique_consecutive")
def unique_consecutive(
    op: Any,
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``unique_consecutive``: like ``unique`` on sorted values."""
    if dim is not None:
        return unique_rows(  # type: ignore[no-any-return]
            op, self, dim, False, return_inverse, return_counts
        )
    where = _positions(self, self.shape if return_inverse else (0,))
    return _selected(self, values.n_kept(self, "unique"), where, counts=return_counts)


def _positions(self: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return new(shape, None, torch.int64, self.get_device())


def _selected(
    self: torch.Tensor, found: int, where: torch.Tensor, *, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values found in a sorted tensor, their positions, and the count of each."""
    n = self.numel()
    out = new((n,), None, self.dtype, self.get_device())[:found]
    length = scratch(self, INDEX_BYTES)
    how_many = _positions(self, (n if counts else 0,))[:found]
    scratch(self, cub.select(n))
    del length
    return out, where, how_many


@special("aten::randperm.generator_out", "aten::randperm.out")
def randperm(_op: Any, n: int, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    """``randperm``: random keys are sorted together with the numbers (Randperm.cu)."""
    out.resize_((n,))
    if n:
        squared = n - (6.0 * n * n + 1) / (12 * log(0.9))
        bits = min(64, ceil(log2(squared)))
        key_bytes = 4 if bits <= 32 else 8
        scratch(out, out.element_size())
        numbers = scratch(out, n * out.element_size())
        keys, ordered = scratch(out, n * key_bytes), scratch(out, n * key_bytes)
        scratch(out, cub.radix_sort(n, key_bytes, out.element_size(), bits))
        del ordered, keys, numbers
    return out
