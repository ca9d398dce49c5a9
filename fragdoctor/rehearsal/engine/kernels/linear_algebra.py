"""Factorizations and solvers: what they copy for cuSOLVER, which works in place.

The rules are those of ``aten/src/ATen/native/cuda/linalg`` (BatchLinearAlgebra.cpp). What cuSOLVER
itself requests depends on its version and is not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    Out,
    Step,
    Temp,
    UseBlas,
    after_results,
    n_bytes,
    rule,
)

INFO_BYTES: Final = 4
INDEX_BYTES: Final = 8
POWERS, SUMS, OTHERS = 5, 5, 3  # matrices for a Taylor polynomial of degree 18 and others


def _noted(matrix: torch.Tensor) -> int:
    """Return the bytes of a matrix, or of a batch of them, and note what is not counted."""
    session.note("The workspaces of cuSOLVER were not counted.")
    return n_bytes(matrix)


def _rows(matrix: torch.Tensor) -> int:
    return matrix.numel() // max(1, matrix.shape[-1])


def _solved(matrix: torch.Tensor, right_bytes: int) -> Iterable[Step]:
    """Solve by a factorization: pivots become a permutation of the right-hand side's rows."""
    for _ in range(3):
        yield Temp(_rows(matrix) * INDEX_BYTES)
    yield Temp(right_bytes)
    yield UseBlas()


@after_results("_cholesky_solve_helper")
def _cholesky_solve(call: Call) -> Iterable[Step]:
    yield Temp(INFO_BYTES)
    yield Temp(_noted(call.args[1]))


@after_results("cholesky_inverse")
def _cholesky_inverse(call: Call) -> Iterable[Step]:
    size = _noted(call.args[0])
    yield from (Temp(size), Temp(INFO_BYTES), Temp(size))


@after_results("linalg_solve_triangular")
def _solve_triangular(_: Call) -> Iterable[Step]:
    yield UseBlas()


@after_results("_linalg_solve_ex")
def _solve(call: Call) -> Iterable[Step]:
    _noted(call.args[0])
    return _solved(call.args[0], n_bytes(call.args[1]))


@after_results("linalg_inv_ex")
def _inverse(call: Call) -> Iterable[Step]:
    matrix = call.args[0]
    yield Temp(_noted(matrix))
    yield Temp(_rows(matrix) * INFO_BYTES)
    yield from _solved(matrix, n_bytes(matrix))


@rule("_linalg_svd")
def _singular_values(call: Call) -> Iterable[Step]:
    matrix = call.args[0]
    size = _noted(matrix)
    yield from (Out(0), Out(2), Out(1), Temp(INFO_BYTES), Temp(size))
    if not call.argument("compute_uv"):
        for length in matrix.shape[-2:]:
            yield Temp(size // max(1, *matrix.shape[-2:]) * length)


@after_results("linalg_lstsq")
def _least_squares(call: Call) -> Iterable[Step]:
    matrix = call.args[0]
    yield from (Temp(_noted(matrix)), Temp(_rows(matrix.mT) * matrix.element_size()), UseBlas())


@after_results("linalg_matrix_exp")
def _exponential(call: Call) -> Iterable[Step]:
    """The polynomial depends on the norms, which are not known and are assumed to be large."""
    return [Temp(n * n_bytes(call.args[0])) for n in (POWERS, SUMS, *[1] * OTHERS)]
