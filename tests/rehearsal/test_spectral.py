"""Fourier transforms, beside what they asked PyTorch 2.12's own allocator for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from rehearsal_stage import Stage

PEAK_AND_ALL_ASKED = {
    "fft(x)": (33554432, 33554432),
    "rfft(x, dim=2)": (34078720, 34078720),
    "rfft2(x, dim=(0, 1))": (41943040, 58720256),
    "rfftn(x)": (53477376, 53477376),
    "fftn(z)": (67108864, 67108864),
    "fftn(z, dim=(1, 2, 3, 4))": (100663296, 100663296),
    "fft2(z.transpose(1, 4))": (67108864, 67108864),
    "fft2(z[:, ::2])": (33554432, 33554432),
    "ifft2(z)": (33554432, 33554432),
    "irfft2(z)": (66060288, 66060288),
    "irfft2(z, dim=(0, 1))": (62914560, 62914560),
    "irfftn(z)": (99614720, 133169152),
    "hfft(z)": (99614720, 99614720),
}
"""Bytes asked for at the peak, above what was there, and in all; of plans without a workspace."""


def test_transforms_ask_for_what_the_real_ones_do(stage: Stage) -> None:
    stage.must_pass(
        f"""
    import torch

    x = torch.zeros(4, 8, 64, 64, 32, device="cuda")
    z = torch.zeros(4, 8, 64, 64, 32, dtype=torch.cfloat, device="cuda")
    wanted = {PEAK_AND_ALL_ASKED}
    found = {{}}
    for call in wanted:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        eval("torch.fft." + call)
        after = torch.cuda.memory_stats()
        found[call] = (
            after["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
            after["requested_bytes.all.allocated"] - before["requested_bytes.all.allocated"],
        )
    assert found == wanted, found
    """
    )
