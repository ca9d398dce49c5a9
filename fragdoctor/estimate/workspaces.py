"""cuBLAS workspaces: allocated through PyTorch's allocator once for each thread that multiplies."""

from __future__ import annotations

from typing import Final

from fragdoctor.units import KIB, MIB

WORKSPACE_SOURCE: Final = (
    "aten/src/ATen/cuda/CublasHandlePool.cpp: once a handle and stream; forward and autograd's "
    "thread have one each; CUBLAS_WORKSPACE_CONFIG changes it"
)
# PyTorch's default outside Hopper and Blackwell: ":4096:2:16:8".
_ORDINARY: Final = 2 * 4096 * KIB + 8 * 16 * KIB
_LARGE: Final = 32 * MIB
LARGE_ARCHITECTURES: Final = ("hopper", "blackwell", "")


def workspace_bytes(architecture: str) -> int:
    """Return the default workspace of one handle; of the largest kind where nothing is known."""
    return _LARGE if architecture in LARGE_ARCHITECTURES else _ORDINARY
