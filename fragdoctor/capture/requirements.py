"""What capture needs of the program's surroundings, said in one sentence where it lacks."""

from __future__ import annotations

import importlib
from typing import Any

from fragdoctor.errors import ConfigError


def need_cuda(what: str) -> Any:
    """Return torch with a usable GPU.

    Args:
        what: what is asked for, as the subject of the sentence.

    Raises:
        ConfigError: PyTorch is not installed, is built without CUDA, or finds no GPU.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as e:
        raise ConfigError(
            f"{what} needs PyTorch, which is not installed.", hint="pip install torch"
        ) from e
    if not (torch.version.cuda or getattr(torch.version, "hip", None)):
        raise ConfigError(
            f"{what} needs CUDA; PyTorch {torch.__version__} is built without it.",
            hint="Install a CUDA build: https://pytorch.org/get-started",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{what} needs a GPU, and PyTorch finds none.",
            hint="Check nvidia-smi and CUDA_VISIBLE_DEVICES.",
        )
    return torch
