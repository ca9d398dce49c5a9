"""Marks of what a program does, in the form in which PyTorch's recorder notes them.

PyTorch notes the ranges of ``record_function``, which include each run of an optimizer
(``Optimizer.step#AdamW.step``). A rehearsal sees more, and notes it under names of its own.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from fragdoctor.model.marks import OURS

REPLAY: Final = "Optimizer.step#CUDAGraph.replay"
"""A replay of a graph that captured an optimizer, which is itself no longer called."""

_graph_task: Any = torch._C._current_graph_task_id
_NONE: Final = -1


def in_backward() -> bool:
    """Return whether a backward pass is running."""
    return bool(_graph_task() != _NONE)


class Marks:
    """The marks of a rehearsal, oldest first.

    Attributes:
        annotations: in the form of a snapshot's ``external_annotations``.
    """

    def __init__(self) -> None:
        self.annotations: list[dict[str, Any]] = []

    def note(self, stage: str, name: str, device: int) -> None:
        """Note the ``START`` or the ``END`` of something while a device is the current one."""
        # This is the clock of the events' times, which the library takes from C++'s system_clock.
        time_us = time.time_ns() // 1000
        self.annotations.append(
            {"stage": stage, "name": name, "device": device, "time_us": time_us}
        )

    def of_pytorch(self, first: int) -> list[dict[str, Any]]:
        """Return the marks that PyTorch makes itself, from a number on."""
        return [mark for mark in self.annotations[first:] if not mark["name"].startswith(OURS)]
