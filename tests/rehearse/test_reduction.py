"""Buffers of reductions, against sizes seen in recordings of PyTorch 2.12 on an H100."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fragdoctor.rehearse.engine.kernels.reduction import Kind, reduction_bytes

H100 = 132
BFLOAT16 = 2
IN_FLOAT = Kind(accumulator_bytes=4)


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
