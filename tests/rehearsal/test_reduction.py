"""Buffers of reductions, against sizes that PyTorch 2.12 asked its own allocator for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fragdoctor.model.gpus import gpu_of
from fragdoctor.rehearsal.engine.kernels.reduction import reduction_bytes

H100 = gpu_of("h100")
BFLOAT16 = 2
IN_FLOAT = 4


@pytest.mark.parametrize(
    ("shape", "axes", "buffers"),
    [
        ((4096, 512), (0,), [(16777216, 16)]),
        ((4096, 2048), (0,), [(67108864, 64)]),
        ((4096, 1536), (0,), [(50331648, 48)]),
        ((64, 512), (0,), []),
        ((4096, 512), (1,), []),
        ((0, 512), (0,), []),
    ],
)
def test_reduction_takes_the_buffers_that_were_recorded(
    shape: tuple[int, int], axes: tuple[int, ...], buffers: list[tuple[int, int]]
) -> None:
    found = reduction_bytes(shape, (shape[1], 1), axes, IN_FLOAT, BFLOAT16, H100)

    assert found == buffers


def test_reduction_over_batch_and_pixels_of_channels_last_images() -> None:
    shape, strides = (32, 128, 27, 27), (128 * 27 * 27, 1, 128 * 27, 128)

    found = reduction_bytes(shape, strides, (0, 2, 3), IN_FLOAT, BFLOAT16, H100)

    assert found == [(23920640, 4)]


@pytest.mark.parametrize(
    ("gpu", "n_bytes"),
    [("h100", 138412032), ("rtx-4090", 100663296), ("t4", 20971520), ("rtx-5090", 134217728)],
)
def test_buffer_follows_the_threads_and_number_of_multiprocessors(gpu: str, n_bytes: int) -> None:
    """A multiprocessor of an RTX 4090 or 5090 holds 1,536 threads, of a T4 1,024."""
    facts = gpu_of(gpu)

    ((partial, _),) = reduction_bytes((8192, 4096), (4096, 1), (0,), IN_FLOAT, BFLOAT16, facts)

    assert partial == n_bytes
