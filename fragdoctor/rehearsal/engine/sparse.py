"""Sparse tensors on a fake GPU: gradients of embeddings, and products with dense matrices.

PyTorch's code for their structure serves every device and is in any build, registered for the CPU,
so that code is run. Computations with them are written out here as in CUDA's kernels
(aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu, SparseCUDATensorMath.cu).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import values
from fragdoctor.rehearsal.engine.allocation import take_and_give
from fragdoctor.rehearsal.engine.dispatch import library_for, of_cpu
from fragdoctor.rehearsal.engine.kernels import cub

_SHARED: Final = (
    "_coalesced_", "_indices", "_nnz", "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors", "_values", "clone", "copy_sparse_to_sparse_",
    "dense_dim", "empty.memory_format", "indices", "is_coalesced", "sparse_dim",
    "sparse_resize_", "sparse_resize_and_clear_", "values", "zero_",
    "_to_dense", "add.Tensor", "add_.Tensor", "mm",
    "abs", "cat", "neg", "norm.ScalarOpt_dim", "pow.Tensor_Scalar", "relu", "sign", "sqrt", "tanh",
    "unsqueeze",
)  # fmt: skip
# The same for tensors compressed by rows or by columns (CSR and CSC).
_SHARED_COMPRESSED: Final = (
    "_nnz", "_to_sparse", "ccol_indices", "clone", "col_indices", "copy_", "crow_indices",
    "dense_dim", "empty.memory_format", "empty_like", "resize_as_sparse_", "row_indices",
    "sparse_dim", "values", "zero_",
    "mm",
    "abs", "mul.Scalar", "mul_.Scalar", "neg", "relu", "sqrt", "tanh",
)  # fmt: skip
_INDEX_BYTES: Final = 8


def _flat_indices(indices: torch.Tensor, *, is_copied: bool = False) -> torch.Tensor:
    """Return one index for each element."""
    if indices.shape[0] > 1:
        return indices.new_empty((indices.shape[1],))
    return indices.squeeze(0).clone() if is_copied else indices.squeeze(0)


def _made(like: torch.Tensor, indices: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        like.sparse_dim(), like.dense_dim(), like.shape, indices, elements,
        dtype=elements.dtype, layout=torch.sparse_coo, device=like.device,
    )  # fmt: skip
    return made


def _coalesce(self: torch.Tensor) -> torch.Tensor:
    """``coalesce_sparse_cuda``: indices are sorted, and equal ones are merged."""
    indices, elements = self._indices(), self._values()
    n = indices.shape[1]
    if n < 2:
        return _made(self, indices.clone(), elements.clone())._coalesced_(True)
    elements = elements.contiguous()
    flat = _flat_indices(indices, is_copied=True)
    origin, offsets = torch.empty_like(flat), torch.empty_like(flat)
    for n_bytes in (cub.merge_sort(n, _INDEX_BYTES, _INDEX_BYTES), cub.thrust_unique_by_key(n)):
        take_and_give(self.get_device(), n_bytes)
    n_kept = values.n_kept(flat, "unique")
    kept = elements.new_empty((n_kept, *elements.shape[1:]))
    if indices.shape[0] == 1:
        new_indices = flat[:n_kept].unsqueeze(0)
    else:
        new_indices = indices.new_empty((indices.shape[0], n_kept))
    del origin, offsets
    return _made(self, new_indices, kept)._coalesced_(True)


def _add_to_dense(sparse: torch.Tensor) -> None:
    """``add_out_dense_sparse_cuda``: requests nothing, unless indices have to be created."""
    if not sparse.is_coalesced() and sparse._nnz():
        _flat_indices(sparse._indices())


def _sum(self: torch.Tensor, other: torch.Tensor, alpha: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sum: those of both tensors, concatenated."""
    theirs = other._values()
    if alpha != 1:
        theirs = theirs.mul(alpha)
    indices = torch.cat((self._indices(), other._indices()), 1)
    return indices, torch.cat((self._values(), theirs), 0)


def _add_into(
    self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1, out: torch.Tensor
) -> torch.Tensor:
    """``add_out_sparse_cuda``, behind every form of ``add`` and ``_to_dense``."""
    if self.is_sparse:
        out.data = _made(self, *_sum(self, other, alpha))
        return out
    if out is not self:
        out.resize_(self.shape)
    _add_to_dense(other)
    return out


def _scaled(op: Any, self: torch.Tensor, by: Any, **kwargs: Any) -> torch.Tensor:
    """``mul`` and ``div`` by a number."""
    is_coalesced = self.is_coalesced()
    indices = self._indices().clone()
    return _made(self, indices, op(self._values(), by, **kwargs))._coalesced_(is_coalesced)


def _scaled_in_place(op: Any, self: torch.Tensor, by: Any) -> torch.Tensor:
    self.data = _scaled(op, self, by)
    return self


def _mask(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``sparse_mask`` of a dense tensor: its values where the mask has any, times ones."""
    one = mask._values().new_ones((1,))
    elements = self.index_select(0, mask._indices()[0])
    if mask._indices().shape[0] > 1:
        elements = mask._values().new_empty(mask._values().shape)
    indices = mask._indices().clone()
    return _made(mask, indices, elements.mul(one))._coalesced_(mask.is_coalesced())


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix in column-major order, as cuSPARSE takes it."""
    return matrix if matrix.t().is_contiguous() else matrix.t().contiguous().t()


def _addmm(
    self: torch.Tensor, sparse: torch.Tensor, dense: torch.Tensor, *, beta: Any = 1, **_: Any
) -> torch.Tensor:
    """``s_addmm_out_sparse_dense_cuda``, without the workspace of cuSPARSE."""
    sparse = sparse.coalesce()
    result = dense.new_empty((sparse.shape[0], dense.shape[1]))
    if sparse._nnz():
        rows, columns = sparse._indices()
        row_ends = rows.new_empty((sparse.shape[0] + 1,), dtype=torch.int32)
        rows.to(torch.int32)
        columns = columns.to(torch.int32)
        if beta:
            result.copy_(self.expand_as(result))
        by_columns = _by_columns(result)
        _by_columns(dense)
        del row_ends, columns, by_columns
    return result


def _index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Keep elements in proportion to the selected rows, which is right on average."""
    shape = list(self.shape)
    n = round(self._nnz() * index.numel() / max(shape[dim], 1))
    shape[dim] = index.numel()
    indices = self._indices().new_empty((self.sparse_dim(), n))
    elements = self._values().new_empty((n, *self._values().shape[1:]))
    made: torch.Tensor = torch.sparse_coo_tensor(indices, elements, shape, check_invariants=False)
    return made


def _by_rows(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """``sparse_compressed_to_flipped``: indices are expanded, and sorted in the other direction."""
    if self.layout is torch.sparse_csr:
        return self
    elements, n = self.values(), self._nnz()
    index = partial(elements.new_empty, dtype=torch.int64)
    batch, first = index(1), index(1)
    take_and_give(self.get_device(), cub.scan(1, _INDEX_BYTES))
    del first
    row_ends, counted = index(self.shape[0]), index(self.shape[0] + 1)
    del row_ends
    written_out = index(2, n)
    flat = [index(n), index(n)]
    del flat
    keys, places, ordered, origin = (index(n) for _ in range(4))
    take_and_give(self.get_device(), cub.radix_sort(n, _INDEX_BYTES, _INDEX_BYTES))
    del keys, places
    columns, kept = index(2, n)[1], elements.new_empty(n)
    rows, copied = index(self.shape[0] + 1), index(self.shape[0] + 1)
    index(self.shape[0])
    del copied, origin, ordered, written_out, counted, batch
    made: torch.Tensor = torch.sparse_csr_tensor(
        rows, columns, kept, self.shape, check_invariants=False
    )
    return made


def _addmm_compressed(
    self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, **_: Any
) -> torch.Tensor:
    """``addmm_out_sparse_compressed_cuda``, without the workspace of cuSPARSE."""
    if torch.strided not in {first.layout, second.layout}:
        raise NotImplementedError("Products of two sparse tensors (SparseCsrCUDA)")
    result = self.new_empty((first.shape[0], second.shape[1]))
    _by_rows(second.t() if first.layout is torch.strided else first)
    return result


def _mv_compressed(
    _: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, out: torch.Tensor, **__: Any
) -> torch.Tensor:
    """``addmv_out_sparse_compressed``."""
    out.resize_(matrix.shape[0])
    kept = _by_rows(matrix), vector.contiguous()
    del kept
    return out


def _scaled_compressed(self: torch.Tensor, by: Any) -> torch.Tensor:
    """``mul`` by a number."""
    if isinstance(by, torch.Tensor):
        raise NotImplementedError("Products of two sparse tensors (SparseCsrCUDA)")
    return self.clone()


_OWN: Final[dict[str, Callable[..., Any]]] = {
    "_coalesce": _coalesce,
    "add.out": _add_into,
    "mul.Tensor": partial(_scaled, torch.mul),
    "mul_.Tensor": partial(_scaled_in_place, torch.mul),
    "div.Tensor": partial(_scaled, torch.div),
    "div_.Tensor": partial(_scaled_in_place, torch.div),
    "sparse_mask": _mask,
    "addmm": _addmm,
    "index_select": _index_select,
}
_OWN_COMPRESSED: Final[dict[str, Callable[..., Any]]] = {
    "_to_sparse_csr": _by_rows,
    "addmm": _addmm_compressed,
    "addmv.out": _mv_compressed,
    "mul.Tensor": _scaled_compressed,
}


def install() -> None:
    """Serve sparse tensors."""
    library = library_for("aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels are replaced on purpose
        for kind, shared, own in (
            ("Sparse", (*_SHARED, "_to_sparse_csr"), _OWN),
            ("SparseCsr", _SHARED_COMPRESSED, _OWN_COMPRESSED),
        ):
            for name in shared:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, partial(of_cpu, f"{kind}CPU", op), f"{kind}CUDA")
            for name, kernel in own.items():
                library.impl(name, kernel, f"{kind}CUDA")
