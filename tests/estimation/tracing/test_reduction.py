"""Buffers of reductions, against sizes seen in recordings of PyTorch 2.12."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from fragdoctor.estimation.tracing.reduction import reduction_bytes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "dims", "buffers"),
    [
        ((4096, 512), (0,), (16777216, 16)),
        ((4096, 2048), (0,), (67108864, 64)),
        ((4096, 1536), (0,), (50331648, 48)),
        ((64, 512), (0,), ()),
        ((4096, 512), (1,), ()),
        ((0, 512), (0,), ()),
    ],
)
def test_reduction_takes_the_buffers_that_were_recorded(
    shape: tuple[int, ...], dims: tuple[int, ...], buffers: tuple[int, ...]
) -> None:
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    assert reduction_bytes(tensor, dims) == buffers


def test_reduction_over_batch_and_pixels_of_channels_last_images() -> None:
    tensor = torch.empty((32, 128, 27, 27), dtype=torch.bfloat16, device="meta")
    images = tensor.to(memory_format=torch.channels_last)

    assert reduction_bytes(images, (0, 2, 3)) == (23920640, 4)
