"""Fourier transforms (SpectralOps.cpp), and what cuFFT's plans take besides.

CuFFT's sizes were read off an H200 (``benchmarks/measured/operations_h200.tsv``): a long transform
takes a copy of its data, and one with a large prime factor several times its data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.kernels.scratch import Call, n_bytes, rule

LONG, LARGE_PRIME, SMALL_PRIME, SHORT = 4096, 127, 7, 128
CHIRPS = 4.05
"""Copies of the data with which a transform of prime length becomes a convolution."""
MOST_DIMS = 3
"""The most dimensions that cuFFT transforms at once (``cufft_max_ndim``)."""


class _Stages:
    """Transforms in a row (``_exec_fft``), each of some dimensions.

    Attributes:
        dims: the dimensions that the call transforms.
        is_at_once: whether cuFFT transforms them together (``use_optimized_cufft_path``).
        item_bytes: size of an element of the call's input.
        sizes, strides: those of the last transform's result.
        copied_bytes: bytes that each transform copies first, if they cannot be seen as one batch.
        plan_bytes: what the plan of each takes.
    """

    def __init__(self, call: Call) -> None:
        session.current().libraries["cuFFT"] = 1
        tensor: torch.Tensor = call.args[0]
        self._call, self.item_bytes = call, tensor.element_size()
        self.dims = [dim % tensor.dim() for dim in call.argument("dim")]
        self.is_at_once = len(self.dims) <= MOST_DIMS and self.dims[:2] != [0, 1]
        self.sizes, self.strides = list(tensor.shape), list(tensor.stride())
        self.copied_bytes: list[int] = []
        self.plan_bytes: list[int] = []

    def transform(
        self,
        dims: Sequence[int],
        element_bytes: int,
        sizes: Sequence[int],
        real: int | None = None,
    ) -> None:
        """Transform some dimensions; the result has these sizes, and ``real`` is a real plan's."""
        batch = [d for d in range(len(self.sizes)) if d not in dims]
        batch.sort(key=lambda d: -self.strides[d])
        is_one = all(
            self.strides[outer] == self.sizes[inner] * self.strides[inner]
            for outer, inner in pairwise(d for d in batch if self.sizes[d] != 1)
        ) and all(self.strides[d] for d in dims)
        self.copied_bytes.append(0 if is_one else prod(self.sizes) * element_bytes)
        lengths = [self.sizes[d] for d in dims]
        plan = plan_bytes(lengths, prod(self.sizes) * element_bytes) if real is None else real
        self.plan_bytes.append(plan)
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

    def record(self, make_result: Callable[[], object], other_bytes: int) -> list[int]:
        """Let two buffers take turns, the last written one being the result; return the other."""
        other = []
        for i, copied in enumerate(self.copied_bytes):
            if i > 1:
                pass  # both exist
            elif (len(self.copied_bytes) - i) % 2:
                make_result()
            else:
                other = self._call.take(other_bytes)
            self._call.hold(*filter(None, (copied, self.plan_bytes[i])))
        return other


def plan_bytes(lengths: Sequence[int], data_bytes: int, *, is_real: bool = False) -> int:
    """Return what a plan takes besides its data, whose last dimension is real or none."""
    length = lengths[-1] if is_real else max(lengths, default=1)
    largest = _largest_prime(length)
    if length > LONG:
        return round(data_bytes * (CHIRPS + is_real)) if largest > LARGE_PRIME else data_bytes
    is_odd, is_alone = length % 2, len(lengths) == 1
    if is_real and largest > SMALL_PRIME and (length > SHORT or (is_alone and not is_odd)):
        return data_bytes * (1 + is_odd)
    return 0


def _largest_prime(n: int) -> int:
    """Return the largest prime factor of a number."""
    factor = 2
    while factor * factor <= n:
        if n % factor:
            factor += 1
        else:
            n //= factor
    return n


@rule("_fft_c2c")
def _complex(call: Call) -> None:
    stages = _Stages(call)
    if stages.dims:
        stages.transform_complex(stages.dims, stages.item_bytes)
        stages.record(call.make_all, n_bytes(call.args[0]))
    else:
        call.make_all()


@rule("_fft_r2c")
def _real_to_complex(call: Call) -> None:
    stages = _Stages(call)
    if not call.outs:
        return
    half, last = list(stages.sizes), stages.dims[-1]
    half[last] = half[last] // 2 + 1
    lengths = [half[d] for d in stages.dims[:-1]] + [stages.sizes[last]]
    real = plan_bytes(lengths, n_bytes(call.args[0]), is_real=True)
    if stages.is_at_once:
        stages.transform(stages.dims, stages.item_bytes, half, real)
    else:
        stages.transform([last], stages.item_bytes, half, real)
        stages.transform_complex(stages.dims[:-1], 2 * stages.item_bytes)
    stages.record(call.make_all, call.outs[0].n_bytes)


@rule("_fft_c2r")
def _complex_to_real(call: Call) -> None:
    """This transform overwrites its input: a copy, or the result of the other dimensions."""
    stages = _Stages(call)
    size, out = n_bytes(call.args[0]), call.outs[0]
    real = plan_bytes([out.shape[d] for d in stages.dims], out.n_bytes, is_real=True)
    call.make_all()
    if stages.is_at_once or len(stages.dims) == 1:
        call.take(size)
        call.hold(*[real] * bool(real))
        return
    stages.transform_complex(stages.dims[:-1], stages.item_bytes)
    call.free(*stages.record(lambda: call.take(size), size))
    stages.transform(stages.dims[-1:], stages.item_bytes, stages.sizes, real)
    call.take(*filter(None, (stages.copied_bytes[-1], real)))
