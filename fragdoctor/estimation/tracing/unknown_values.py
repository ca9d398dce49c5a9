"""What a fake tensor answers when the program asks for its value."""

from __future__ import annotations

from types import FrameType

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.tracing.request_log import shown


def stand_in(
    tensor: torch.Tensor, frame: FrameType | None, warnings: dict[str, None]
) -> float | bool:
    """Return a value for ``item()`` of a tensor that has none, and note that it was made up.

    A loss that is logged may be anything, but a branch may depend on it. The gradient scaler asks
    whether gradients are infinite: they are not. Truth values are usually checks for bad data: no.

    Raises:
        ConfigError: a whole number is read; sizes may depend on it.
    """
    where = "PyTorch" if frame is None else f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        if frame is not None:  # PyTorch's own questions are the scaler's
            warnings[
                f"The model read a value (.item()) at {where}; a trace has no values, 0.0 was "
                "taken: branches that depend on it may differ."
            ] = None
        return 0.0
    if tensor.dtype == torch.bool:
        warnings[f"A condition on the GPU's data at {where} counted as false."] = None
        return False
    raise ConfigError(
        f"The model reads a whole number from the GPU at {where}, and sizes may depend on it.",
        hint="Fake tensors have no values: pass the number from Python, or leave that part out.",
    )
