"""Fourier transforms (SpectralOps.cpp), without the workspaces of cuFFT's plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.scratch import (
    Call,
    Free,
    Step,
    Temp,
    held_only,
    n_bytes,
    rule,
)

MOST_DIMS = 3
"""The most dimensions that cuFFT transforms at once (``cufft_max_ndim``)."""


@dataclass
class _Stages:
    """Transforms in a row (``_exec_fft``), each of some dimensions.

    Attributes:
        sizes, strides: those of the last transform's result.
        copied_bytes: bytes that each transform copies first, if they cannot be seen as one batch.
    """

    sizes: list[int]
    strides: list[int]
    copied_bytes: list[int]

    def transform(self, dims: Sequence[int], element_bytes: int, sizes: Sequence[int]) -> None:
        """Transform some dimensions; the result has these sizes."""
        batch = [d for d in range(len(self.sizes)) if d not in dims]
        batch.sort(key=lambda d: -self.strides[d])
        is_one = all(
            self.strides[outer] == self.sizes[inner] * self.strides[inner]
            for outer, inner in pairwise(d for d in batch if self.sizes[d] != 1)
        ) and all(self.strides[d] for d in dims)
        self.copied_bytes.append(0 if is_one else prod(self.sizes) * element_bytes)
        self.sizes, stride = list(sizes), 1
        for dim in reversed([*batch, *dims]):
            self.strides[dim], stride = stride, stride * self.sizes[dim]

    def transform_complex(self, dims: Sequence[int], element_bytes: int) -> None:
        """Transform dimensions of complex numbers, as many at once as possible."""
        left = list(dims)
        while left:
            left.sort(key=lambda d: -self.strides[d])
            self.transform(left[-MOST_DIMS:], element_bytes, self.sizes)
            del left[-MOST_DIMS:]

    def steps(self, result: Sequence[Step], other: Temp) -> Iterable[Step]:
        """Two buffers take turns; the one that is written last is the result."""
        first, second = (result, [other]) if len(self.copied_bytes) % 2 else ([other], result)
        for i, copied in enumerate(self.copied_bytes):
            yield from (first, second, ())[min(i, 2)]
            if copied:
                yield from held_only(copied)


@rule("_fft_c2c")
def _complex(call: Call) -> Iterable[Step]:
    tensor, dims, stages = _asked(call)
    if not dims:
        return call.results
    stages.transform_complex(dims, tensor.element_size())
    return stages.steps(call.results, Temp(n_bytes(tensor)))


@rule("_fft_r2c")
def _real_to_complex(call: Call) -> Iterable[Step]:
    tensor, dims, stages = _asked(call)
    if not call.outs:
        return ()
    half = list(tensor.shape)
    half[dims[-1]] = half[dims[-1]] // 2 + 1
    if _is_at_once(dims):
        stages.transform(dims, tensor.element_size(), half)
    else:
        stages.transform(dims[-1:], tensor.element_size(), half)
        stages.transform_complex(dims[:-1], 2 * tensor.element_size())
    return stages.steps(call.results, Temp(call.outs[0].n_bytes))


@rule("_fft_c2r")
def _complex_to_real(call: Call) -> Iterable[Step]:
    """This transform overwrites its input: a copy, or the result of the other dimensions."""
    tensor, dims, stages = _asked(call)
    yield from call.results
    read, other = Temp(n_bytes(tensor)), Temp(n_bytes(tensor))
    if _is_at_once(dims) or len(dims) == 1:
        yield read
        return
    stages.transform_complex(dims[:-1], tensor.element_size())
    yield from stages.steps([read], other)
    if len(stages.copied_bytes) > 1:
        yield Free(other)
    stages.transform(dims[-1:], tensor.element_size(), stages.sizes)
    if stages.copied_bytes[-1]:
        yield Temp(stages.copied_bytes[-1])


def _asked(call: Call) -> tuple[torch.Tensor, list[int], _Stages]:
    tensor: torch.Tensor = call.args[0]
    session.note(
        "The workspaces of cuFFT were not counted: most sizes with small prime factors need none, "
        "but others can need several times their data."
    )
    dims = [dim % tensor.dim() for dim in call.argument("dim")]
    return tensor, dims, _Stages(list(tensor.shape), list(tensor.stride()), [])


def _is_at_once(dims: Sequence[int]) -> bool:
    """``use_optimized_cufft_path``."""
    return len(dims) <= MOST_DIMS and list(dims[:2]) != [0, 1]
