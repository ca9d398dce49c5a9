"""Gradients that are let go instead of set to zero."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from fragdoctor.rehearsal.engine import put


def set_to_none(_: str, undo: ExitStack) -> None:
    """Let ``zero_grad`` free gradients, whatever it was asked for."""
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        _without_zeros(kind, undo)


def _without_zeros(kind: Any, undo: ExitStack) -> None:
    zero = kind.zero_grad

    @wraps(zero)
    def free(self: Any, *_: Any, **__: Any) -> None:
        zero(self, set_to_none=True)

    put(undo, kind, "zero_grad", free)
