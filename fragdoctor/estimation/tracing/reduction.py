"""The buffer that a reduction takes where several thread blocks share one output.

Follows ``setReduceConfig`` of PyTorch's ``aten/src/ATen/native/cuda/Reduce.cuh``: how the block is
shaped, how the input is divided, and ``global_memory_size`` / ``semaphore_size`` of the result.
Sums over the batch, as for the gradient of a bias, are where it grows large: up to 64 MiB for a
gradient of a few KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import torch

MAX_THREADS: Final = 512
WARP: Final = 32
MAX_VECTOR: Final = 4
VECTORIZE_FROM: Final = 128
MIN_VALUES, MAX_VALUES = 16, 256
N_MULTIPROCESSORS: Final = 132
THREADS_PER_MULTIPROCESSOR: Final = 2048
ACCUMULATOR_BYTES: Final = 4


@dataclass(slots=True)
class _Work:
    """How the work is divided: inputs and outputs each thread steps over."""

    n_inputs: int
    step_input: int = 1
    step_output: int = 1

    @property
    def values_per_thread(self) -> int:
        return -(-self.n_inputs // self.step_input)


def reduction_bytes(tensor: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the buffers, in bytes, that reducing a dense tensor over ``dims`` takes; or ()."""
    n_inputs = prod(tensor.shape[d] for d in dims)
    n_outputs = tensor.numel() // max(1, n_inputs)
    if not n_inputs or not n_outputs:
        return ()
    sized = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    fastest = min(sized, key=tensor.stride, default=0)
    along_input = n_outputs == 1 or fastest in dims
    contiguous = bool(sized) and tensor.stride(fastest) == 1
    vector = 1
    width, height = (n_inputs, n_outputs) if along_input else (n_outputs, n_inputs)
    if contiguous and along_input and n_outputs == 1 and width > VECTORIZE_FROM:
        width //= MAX_VECTOR
    elif contiguous and not along_input:
        while vector < MAX_VECTOR and tensor.shape[fastest] % (2 * vector) == 0:
            vector *= 2
        width //= vector
    return _buffers(n_inputs, n_outputs, width, height, along_input=along_input, vector=vector)


def _buffers(
    n_inputs: int, n_outputs: int, width: int, height: int, *, along_input: bool, vector: int
) -> tuple[int, ...]:
    block_width, block_height = _block(width, height, MAX_THREADS // vector)
    work = _Work(n_inputs)
    if along_input:
        work.step_input *= block_width
    else:
        work.step_output *= block_width
    across_warps = work.values_per_thread >= min(block_height * MIN_VALUES, MAX_VALUES)
    if across_warps:
        work.step_input *= block_height
    else:
        work.step_output *= block_height
    grid = -(-(n_outputs // vector) // work.step_output)
    per_multiprocessor = THREADS_PER_MULTIPROCESSOR // (block_width * block_height)
    target = N_MULTIPROCESSORS * per_multiprocessor
    values = work.values_per_thread
    if not across_warps or values < MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return ()
    size = ACCUMULATOR_BYTES * n_outputs * blocks
    if not along_input:
        size *= block_width * vector
    return size, 4 * grid


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the block's width and height in threads."""
    first, second = _power_of_two(width, most), _power_of_two(height, most)
    block_width = min(first, WARP)
    block_height = min(second, most // block_width)
    return min(first, most // block_height), block_height


def _power_of_two(n: int, most: int) -> int:
    return most if n >= most else 1 << (max(1, n).bit_length() - 1)
