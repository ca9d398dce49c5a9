"""Factorizations and solvers: what they copy for cuSOLVER, which works in place.

The rules are those of ``aten/src/ATen/native/cuda/linalg`` (BatchLinearAlgebra.cpp). What cuSOLVER
itself requests depends on its version and is not included.
"""

from __future__ import annotations

from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.scratch import Call, after_results, n_bytes, rule

INFO_BYTES: Final = 4
INDEX_BYTES: Final = 8
POWERS, SUMS, OTHERS = 5, 5, 3  # matrices for a Taylor polynomial of degree 18 and others


def _noted(matrix: torch.Tensor) -> int:
    """Return the bytes of a matrix, or of a batch of them, and note what is not counted."""
    session.note("The workspaces of cuSOLVER were not counted.")
    return n_bytes(matrix)


def _rows(matrix: torch.Tensor) -> int:
    return matrix.numel() // max(1, matrix.shape[-1])


def _solve(call: Call, right_bytes: int) -> None:
    """Solve by a factorization: pivots become a permutation of the right-hand side's rows."""
    call.take(*[_rows(call.args[0]) * INDEX_BYTES] * 3, right_bytes)
    call.use_blas()


@after_results("_cholesky_solve_helper")
def _cholesky_solve(call: Call) -> None:
    call.take(INFO_BYTES, _noted(call.args[1]))


@after_results("cholesky_inverse")
def _cholesky_inverse(call: Call) -> None:
    size = _noted(call.args[0])
    call.take(size, INFO_BYTES, size)


after_results("linalg_solve_triangular")(Call.use_blas)


@after_results("_linalg_solve_ex")
def _solution(call: Call) -> None:
    _noted(call.args[0])
    _solve(call, n_bytes(call.args[1]))


@after_results("linalg_inv_ex")
def _inverse(call: Call) -> None:
    matrix = call.args[0]
    call.take(_noted(matrix), _rows(matrix) * INFO_BYTES)
    _solve(call, n_bytes(matrix))


@rule("_linalg_svd")
def _singular_values(call: Call) -> None:
    matrix = call.args[0]
    size = _noted(matrix)
    call.make(0, 2, 1)
    call.take(INFO_BYTES, size)
    if not call.argument("compute_uv"):
        call.take(*(size // max(1, *matrix.shape[-2:]) * length for length in matrix.shape[-2:]))


@after_results("linalg_lstsq")
def _least_squares(call: Call) -> None:
    matrix = call.args[0]
    call.take(_noted(matrix), _rows(matrix.mT) * matrix.element_size())
    call.use_blas()


@after_results("linalg_matrix_exp")
def _exponential(call: Call) -> None:
    """The polynomial depends on the norms, which are not known and are assumed to be large."""
    call.take(*(n * n_bytes(call.args[0]) for n in (POWERS, SUMS, *[1] * OTHERS)))
