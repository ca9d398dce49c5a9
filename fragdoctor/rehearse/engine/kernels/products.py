"""Products of matrices (Blas.cpp)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fragdoctor.rehearse.engine.kernels.steps import Call, Step, Temp, UseBlas, n_bytes, rule


@rule("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "dot", "vdot")
def _product(call: Call) -> Iterable[Step]:
    """Copies of matrices that cuBLAS cannot take as they lie (``prepare_matrix_for_cublas``)."""
    yield from call.results
    for tensor in call.args:
        if isinstance(tensor, torch.Tensor) and not _fits_blas(tensor):
            yield Temp(n_bytes(tensor))
    yield UseBlas()


def _fits_blas(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2 or not tensor.numel():
        return True
    (rows, columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
