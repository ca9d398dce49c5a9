"""Reductions: copies in the dtype that is summed, and buffers of blocks that share an output.

Follows ``setReduceConfig`` of PyTorch's ``aten/src/ATen/native/cuda/Reduce.cuh`` and, for the shape
of the work, the sorting and merging of dimensions in ``aten/src/ATen/TensorIterator.cpp``. Sums
over the batch, as for the gradient of a bias, are where it grows large: up to 64 MiB for a gradient
of a few KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from fragdoctor.model.gpus import GpuModel
from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.allocation import dense_strides
from fragdoctor.rehearsal.engine.kernels.scratch import Call, after_results

MAX_THREADS: Final = 512
WARP: Final = 32
MAX_OUTPUT_VECTOR: Final = 4
INPUT_VECTOR: Final = 4  # values of a vectorized load
VECTORIZE_FROM: Final = 128
MIN_VALUES, MAX_VALUES = 16, 256
SEMAPHORE_BYTES: Final = 4
MAX_INT: Final = 2**31 - 1


LOADS: Final = 4
"""Loads that each thread of most reductions keeps in flight (``vt0``)."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the work: its size and the strides of input and output, in elements."""

    size: int
    input: int
    output: int


def dims_of(sizes: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> list[Dim]:
    """Return the dimensions in the iterator's form: reduced ones first, merged, fastest first."""
    kept = [n for i, n in enumerate(sizes) if i not in axes]
    steps = list(dense_strides(kept))
    dims = []
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        out = 0 if i in axes else steps.pop(0)
        dims.append(Dim(size, stride, out))
    return _merged(_ordered(dims))


def _ordered(dims: list[Dim]) -> list[Dim]:
    """Sort by insertion, as TensorIterator does, because its comparison is not a total order."""
    order = dims[::-1]
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            comparison = _comes_after(order[j], order[at])
            if comparison > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif comparison < 0:
                break
    return order


def _comes_after(first: Dim, second: Dim) -> int:
    if (first.output == 0) != (second.output == 0):
        return 1 if second.output == 0 else -1
    for one, other in ((first.output, second.output), (first.input, second.input)):
        if one == 0 or other == 0:
            continue
        if one != other:
            return 1 if one > other else -1
        if first.size > second.size:
            return 1
    return 0


def _merged(dims: list[Dim]) -> list[Dim]:
    merged: list[Dim] = []
    for dim in dims:
        last = merged[-1] if merged else Dim(0, 0, 0)
        follows = (last.size * last.input, last.size * last.output) == (dim.input, dim.output)
        if merged and (follows or 1 in {last.size, dim.size}):
            steps = dim if last.size == 1 else last
            merged[-1] = Dim(last.size * dim.size, steps.input, steps.output)
        else:
            merged.append(dim)
    return merged


def _halves(dims: Sequence[Dim]) -> list[list[Dim]]:
    """Split the dimension that reaches farthest; the first half is processed first."""
    longest = max(range(len(dims)), key=lambda i: (dims[i].size - 1) * max(dims[i].input, 1))
    size = dims[longest].size
    return [
        [Dim(n, d.input, d.output) if i == longest else d for i, d in enumerate(dims)]
        for n in (size - size // 2, size // 2)
    ]


def reduction_bytes(
    sizes: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[int],
    partial_bytes: int,
    item_bytes: int,
    facts: GpuModel,
    loads: int = LOADS,
) -> list[tuple[int, int]]:
    """Return the buffers, in bytes, that reducing over ``axes`` takes.

    There is a pair (partial results, semaphores) for each pass that needs them: an input too long
    for 32-bit offsets is cut in halves, which are reduced one after the other.

    Sizes, strides (in elements) and bytes of an element are those of the input. ``partial_bytes``
    is the size of one partial result.
    """
    if not all(sizes):
        return []
    found = []
    waiting = [dims_of(sizes, strides, axes)]
    while waiting:
        dims = waiting.pop()
        reach = 1 + sum((d.size - 1) * d.input for d in dims) * item_bytes
        if prod(d.size for d in dims) <= MAX_INT and reach <= MAX_INT:
            pair = _pass(dims, partial_bytes, facts, loads)
            if pair is not None:
                found.append(pair)
        else:
            waiting += _halves(dims)
    return found


def _pass(
    dims: Sequence[Dim], partial_bytes: int, facts: GpuModel, loads: int
) -> tuple[int, int] | None:
    n_inputs = prod(d.size for d in dims if d.output == 0)
    n_outputs = prod(d.size for d in dims if d.output != 0)
    n_reduced = sum(1 for d in dims if d.output == 0 and d.size > 1) or sum(
        d.output == 0 for d in dims
    )
    along_input = not dims or n_reduced == len(dims) or dims[0].input < dims[n_reduced].input
    width, height = (n_inputs, n_outputs) if along_input else (n_outputs, n_inputs)
    vector = 1
    if not dims or (dims[0] if along_input else dims[n_reduced]).input == 1:
        wide = width > VECTORIZE_FROM and len(dims) == 1 and loads >= INPUT_VECTOR
        if along_input and wide:
            width //= INPUT_VECTOR
        elif not along_input:
            vector = _output_vector(dims, n_reduced)
            width //= vector
    block_width, block_height = _block(width, height, MAX_THREADS // vector)
    step_input, step_output = (block_width, 1) if along_input else (1, block_width)
    if -(-n_inputs // step_input) < min(block_height * MIN_VALUES, MAX_VALUES):
        return None  # the warps of a block share no output, and neither do blocks
    values = -(-n_inputs // (step_input * block_height))  # of each thread
    if values < MAX_VALUES:
        return None
    grid = -(-(n_outputs // vector) // step_output)
    resident = facts.generation.threads_per_multiprocessor // (block_width * block_height)
    target = facts.n_multiprocessors * resident
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if grid > target or blocks <= 1:
        return None
    size = partial_bytes * n_outputs * blocks
    return size if along_input else size * block_width * vector, SEMAPHORE_BYTES * grid


def _output_vector(dims: Sequence[Dim], n_reduced: int) -> int:
    vector = MAX_OUTPUT_VECTOR
    steps = [dims[n_reduced].size, *(d.input for i, d in enumerate(dims) if i != n_reduced)]
    for step in steps:
        while step % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the block's width and height in threads."""
    first, second = power_of_two(width, most), power_of_two(height, most)
    block_width = min(first, WARP)
    block_height = min(second, most // block_width)
    return min(first, most // block_height), block_height


def power_of_two(n: int, most: int) -> int:
    """Return the largest power of two that exceeds neither ``n`` nor ``most``."""
    return most if n >= most else 1 << (max(1, n).bit_length() - 1)


_LOW: Final = (torch.float16, torch.bfloat16)
WELFORD_FLOAT, WELFORD_DOUBLE = 16, 32
INDEXED: Final = 16  # a value and where it was found


def reduced(
    call: Call,
    tensor: torch.Tensor,
    axes: Sequence[int] | None,
    partial_bytes: int,
    loads: int = LOADS,
) -> None:
    """Take the buffers of a reduction of a tensor over some of its dimensions; None = all."""
    n_dims = tensor.dim()
    if axes is None or not len(axes):
        axes = range(n_dims)
    wrapped = tuple(axis % max(1, n_dims) for axis in axes) if n_dims else ()
    facts = session.current().facts
    sizes, strides = tensor.shape, tensor.stride()
    item_bytes = tensor.element_size()
    for pair in reduction_bytes(sizes, strides, wrapped, partial_bytes, item_bytes, facts, loads):
        call.hold(*pair)


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the size of a sum of numbers of a dtype (``acc_type``)."""
    if dtype in _LOW:
        return 4
    if dtype.is_floating_point or dtype.is_complex:
        return dtype.itemsize
    return 8


def _axes(call: Call) -> Any:
    axes = call.argument("dim")
    return (axes,) if isinstance(axes, int) else axes


@after_results("sum", "nansum", "mean", "prod")
def _sum(call: Call) -> None:
    """``sum_out``: a tensor of another dtype than the sum is copied first (ReduceOpsUtils.h)."""
    tensor: torch.Tensor = call.args[0]
    out = call.out_dtype
    kept_low = tensor.dtype in _LOW and out is torch.float32
    if tensor.dtype is not out and not kept_low:
        call.take(tensor.numel() * out.itemsize)
        tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=out, device="meta")
    summed(call, tensor, _axes(call))


@after_results("max", "min", "aminmax")
def _extreme_or_indexed(call: Call) -> None:
    tensor, axes = call.args[0], _axes(call)
    n = 2 if call.op.overloadpacket is torch.ops.aten.aminmax else 1
    if axes is None:
        extremes(call, tensor, n)
    else:
        size = INDEXED if n == 1 else n * tensor.element_size()
        reduced(call, tensor, axes, size)


def extremes(call: Call, tensor: torch.Tensor, n: int) -> None:
    """The extremes of a whole tensor are looked for in one piece (ReduceAllOps.cpp)."""
    call.copy(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    reduced(call, whole, None, n * tensor.element_size())


def _reduces(*names: str, partial: Callable[[torch.Tensor], int]) -> None:
    """Register buffers for operations that reduce a tensor over ``dim``."""
    after_results(*names)(lambda c: reduced(c, c.args[0], _axes(c), partial(c.args[0])))


_reduces("amax", "amin", partial=lambda t: t.element_size())
_reduces("argmax", "argmin", partial=lambda _: INDEXED)
_reduces("linalg_vector_norm", partial=lambda t: 8 if t.dtype is torch.float64 else 4)
_reduces("norm", partial=lambda t: accumulator_bytes(t.dtype))


@after_results("var", "std", "var_mean", "std_mean")
def _variance(call: Call) -> None:
    tensor: torch.Tensor = call.args[0]
    size = WELFORD_DOUBLE if tensor.dtype is torch.float64 else WELFORD_FLOAT
    reduced(call, tensor, _axes(call), size, loads=2 if tensor.element_size() == 2 else LOADS)


@after_results("any", "all")
def _truth(call: Call) -> None:
    """A single number becomes a truth value and is copied (``allany_impl`` in ReduceOps.cpp)."""
    tensor = call.args[0]
    if tensor.numel() == 1 and tensor.dtype is not torch.bool:
        call.take(1)
    reduced(call, tensor, _axes(call), 1)


@after_results("histc")
def _histogram(call: Call) -> None:
    """Without limits the least and the largest value are found first (SummaryOps.cu)."""
    tensor: torch.Tensor = call.args[0]
    if call.argument("min") == call.argument("max") and tensor.numel():
        call.take(tensor.element_size(), tensor.element_size())
        extremes(call, tensor, 2)


def summed(call: Call, tensor: torch.Tensor, axes: Sequence[int] | None = None) -> None:
    """Take the buffers of summing a tensor over some of its dimensions; None = all."""
    reduced(call, tensor, axes, accumulator_bytes(tensor.dtype))
