"""Evaluations without a graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from fragdoctor.rehearsal.engine.treatments.calls import around_models


def no_grad(_: str, undo: ExitStack) -> None:
    """Call models that are in evaluation mode without recording a graph."""

    def around(model: Any) -> AbstractContextManager[Any] | None:
        return None if model.training or not torch.is_grad_enabled() else torch.no_grad()

    around_models(around, undo)
