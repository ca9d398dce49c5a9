"""What the program learns of values on the GPU: stand-ins, by stated assumptions."""

from __future__ import annotations

import torch


def n_kept(tensor: torch.Tensor, kind: str) -> int:
    """Return how many elements an operation keeps whose result depends on values."""
    import os

    if os.environ.get("FD_ZERO"):
        return 0
    del kind
    return tensor.numel()


def fill(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Put stand-ins into a tensor on the CPU that is copied from the GPU."""
    del source
    tensor.zero_()
