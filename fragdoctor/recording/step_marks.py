"""Marks of the optimizer's runs, for PyTorch versions that write none themselves (before 2.6).

From 2.6 on, the recorder notes ``record_function`` ranges as it goes, and every optimizer runs in
one (``Optimizer.step#AdamW.step``). Here, hooks on all optimizers note the same, in the form of a
snapshot's ``external_annotations``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from functools import partial
from typing import Any


class StepMarks:
    """Notes when an optimizer starts and finishes running, in every thread.

    Args:
        torch: the program's own.
        max_entries: marks kept; the oldest are dropped first, as with events.

    Attributes:
        marks: the marks so far, oldest first.
    """

    def __init__(self, torch: Any, max_entries: int) -> None:
        self._device = torch.cuda.current_device
        self.marks: deque[dict[str, Any]] = deque(maxlen=max_entries)
        optimizers = sys.modules[torch.optim.Optimizer.__module__]
        self._hooks = [
            optimizers.register_optimizer_step_pre_hook(partial(self._mark, "START")),
            optimizers.register_optimizer_step_post_hook(partial(self._mark, "END")),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _mark(self, stage: str, optimizer: Any, *_: Any) -> None:
        self.marks.append(
            {
                "stage": stage,
                "name": f"Optimizer.step#{type(optimizer).__name__}.step",
                "device": self._device(),
                "time_us": time.time_ns() // 1000,
            }
        )
