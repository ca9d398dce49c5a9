"""Factorizations and solvers: copies, because cuSOLVER works in place, and its workspaces.

The order is that of ``aten/src/ATen/native/cuda/linalg`` (BatchLinearAlgebra*.cpp). The sizes of
workspaces are cuSOLVER's own; the formulas here are fitted to what an H200 was asked for (PyTorch
2.11, CUDA 13.0; ``benchmarks/measured/operations_h200.tsv``). MAGMA's are not included.
"""

from __future__ import annotations

from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.scratch import Call, after_results, n_bytes, rule

INFO_BYTES: Final = 4
INDEX_BYTES: Final = 8
POINTER_BYTES: Final = 8
POWERS, SUMS, OTHERS = 5, 5, 3  # matrices for a Taylor polynomial of degree 18 and others
SMALL: Final = 32  # up to this size the matrices of a batch are worked on together
TINY: Final = 16
TRIANGLE: Final = 512  # up to this size a batch of triangles is solved together
PANEL: Final = 256
CHOLESKY_ITEMS: Final = 288


def _batch(matrix: torch.Tensor) -> int:
    """Return how many matrices there are for cuSOLVER."""
    session.current().libraries["cuSOLVER"] = 1
    return matrix.numel() // max(1, matrix.shape[-1] * matrix.shape[-2])


def _check(call: Call, n: int) -> None:
    """Look whether one of n codes reports a failure (``_linalg_check_errors``)."""
    call.hold(*[1] * (2 if n == 1 else 1))


def _hold_pointers(call: Call, n_batch: int, n: int = 1) -> None:
    """Take the addresses of a batch's matrices, of n operands."""
    if n_batch > 1:
        call.hold(*[POINTER_BYTES * n_batch] * n)


def _qr_bytes(columns: int, item_bytes: int) -> int:
    """Return the workspace of ``geqrf``."""
    return item_bytes * (1024 * max(columns, PANEL) + 2**19) + 128


def _reflectors_bytes(rows: int, columns: int, item_bytes: int) -> int:
    """Return the workspace of ``orgqr``."""
    return item_bytes * (128 * rows + 256 * columns + 16640)


@rule("_cholesky_solve_helper")
def _cholesky_solve(call: Call) -> None:
    """Since PyTorch 2.12 the result is made first, and a batch is not copied."""
    matrix, is_new = call.args[1], session.current().version >= (2, 12, 0)
    is_one = _batch(matrix) == 1
    if is_new:
        call.make_all()
    call.take(*[INFO_BYTES] * is_one)
    if not is_new:
        call.make_all()
    if is_one or not is_new:
        call.take(n_bytes(matrix))
    if not is_one:
        call.use_blas()


@after_results("cholesky_inverse")
def _cholesky_inverse(call: Call) -> None:
    matrix = call.args[0]
    call.take(n_bytes(matrix))
    if _batch(matrix) > 1:
        call.use_blas()
        return
    call.take(INFO_BYTES, *[n_bytes(matrix)] * (session.current().version >= (2, 12, 0)))


@after_results("linalg_cholesky_ex")
def _cholesky(call: Call) -> None:
    matrix = call.args[0]
    if _batch(matrix) == 1:
        call.hold(CHOLESKY_ITEMS * matrix.element_size())
    _hold_pointers(call, _batch(matrix))


@after_results("linalg_solve_triangular")
def _triangle(call: Call) -> None:
    if call.args[0].shape[-1] <= TRIANGLE:
        _hold_pointers(call, _batch(call.args[0]), 2)
    call.use_blas()


@after_results("linalg_lu_factor_ex")
def _factorize(call: Call) -> None:
    """Pointers of small matrices, or cuSOLVER's workspace."""
    matrix = call.args[0]
    n, n_batch = matrix.shape[-1], _batch(matrix)
    if n_batch == 1:
        call.hold(matrix.element_size() * (6 * n + n * n // 250))
        return
    if n <= TINY:
        _hold_pointers(call, n_batch)
    call.use_blas()


@after_results("linalg_lu_solve")
def _solve(call: Call) -> None:
    """Pivots become a permutation of the right-hand side's rows, or the inverse of one."""
    matrix = call.args[0]
    n, n_batch, is_inverse = matrix.shape[-1], _batch(matrix), not call.argument("adjoint")
    if n_batch > 1 and n <= TINY:
        _hold_pointers(call, n_batch, 2)
        return
    if n_batch == 1:
        call.take(*[n * INDEX_BYTES] * (3 if is_inverse else 1))
    else:
        for left in reversed(range(1 + is_inverse)):
            numbers, _ = call.take(n * INDEX_BYTES, n_batch * n * INDEX_BYTES)
            if left or not is_inverse:
                call.free(numbers)
    call.take(n_bytes(call.args[2]))
    if n <= TRIANGLE:
        for _ in range(2):
            _hold_pointers(call, n_batch, 2)
    call.use_blas()


@rule("_linalg_eigh")
def _eigenvalues(call: Call) -> None:
    """Eigenvectors take the place of the matrix; without them a copy of it does."""
    matrix = call.args[0]
    n_batch, has_vectors = _batch(matrix), call.argument("compute_v")
    call.make(*([1, 0] if has_vectors else [0, 1]))
    call.take(*[n_bytes(matrix)] * (not has_vectors), INFO_BYTES * n_batch)
    size, is_together = _eigh_bytes(matrix, n_batch)
    for _ in range(1 if is_together else n_batch):
        call.hold(size)
    _check(call, n_batch)


def _eigh_bytes(matrix: torch.Tensor, n_batch: int) -> tuple[int, bool]:
    """Return the workspace, and whether it serves the whole batch (``linalg_eigh_cusolver``)."""
    n, item = matrix.shape[-1], matrix.element_size()
    if n_batch > 1 and n <= SMALL:
        return n_batch * 93157 * item, True
    if matrix.dtype is torch.float32 and SMALL <= n <= TRIANGLE:  # Jacobi's method
        return item * (n * n + 36 * n + 528), False
    return item * (4 * n * n + 105 * n + 76000), False


@rule("_linalg_svd")
def _singular_values(call: Call) -> None:
    """Both factors are made, also if only the singular values are asked for."""
    matrix = call.args[0]
    size, n_batch = n_bytes(matrix), _batch(matrix)
    call.make(0, 2, 1)
    call.take(INFO_BYTES * n_batch)
    others = call.take(size)
    if not call.argument("compute_uv"):
        n = size // max(1, *matrix.shape[-2:])
        others += call.take(*(n * length for length in matrix.shape[-2:]))
    call.hold(_svd_bytes(matrix, n_batch))
    call.free(*reversed(others))
    _check(call, n_batch)


def _svd_bytes(matrix: torch.Tensor, n_batch: int) -> int:
    """Return the workspace of Jacobi's method; a matrix that is not square is reduced first."""
    longer, n = sorted(matrix.shape[-2:], reverse=True)
    item = matrix.element_size()
    if n_batch > 1 and longer <= SMALL:
        return 3968
    square = item * (2 * n * n + 70 * n)
    if longer == n:
        return square
    is_wide = matrix.shape[-1] > matrix.shape[-2]
    turned = n * longer * item if is_wide else 0
    return max(square, _qr_bytes(n, item)) + turned + item * n + 128


@after_results("linalg_qr")
def _qr(call: Call) -> None:
    """The reflectors are found, and multiplied if the first factor is asked for."""
    matrix: torch.Tensor = call.args[0]
    item, n_batch = matrix.element_size(), _batch(matrix)
    rows, columns = matrix.shape[-2:]
    n = min(rows, columns)
    call.take(n * item * n_batch)
    passes = [_qr_bytes(columns, item)]
    if call.argument("mode") != "r":
        passes.append(_reflectors_bytes(rows, n, item))
    for size in passes:
        info = call.take(INFO_BYTES)
        for _ in range(n_batch):
            call.hold(size)
        call.free(*info)


@after_results("linalg_householder_product", "geqrf")
def _reflectors(call: Call) -> None:
    matrix: torch.Tensor = call.args[0]
    rows, columns = matrix.shape[-2:]
    item, is_found = matrix.element_size(), call.op.name().startswith("aten::geqrf")
    call.take(INFO_BYTES)
    call.hold(_qr_bytes(columns, item) if is_found else _reflectors_bytes(rows, columns, item))


@after_results("linalg_lstsq")
def _least_squares(call: Call) -> None:
    matrix = call.args[0]
    call.take(n_bytes(matrix), n_bytes(matrix) // max(1, matrix.shape[-2]))
    call.use_blas()


@after_results("linalg_matrix_exp")
def _exponential(call: Call) -> None:
    """The polynomial depends on the norms, which are not known and are assumed to be large."""
    call.take(*(n * n_bytes(call.args[0]) for n in (POWERS, SUMS, *[1] * OTHERS)))
