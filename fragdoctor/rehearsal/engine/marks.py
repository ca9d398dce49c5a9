"""Marks of what a program does, in the form in which PyTorch's recorder notes them.

PyTorch notes the ranges of ``record_function``, and with them each run of an optimizer
(``Optimizer.step#AdamW.step``). A rehearsal sees more, and says it under names of its own.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from fragdoctor.model.marks import OURS

REPLAY: Final = "Optimizer.step#CUDAGraph.replay"
"""A replay of a graph in which an optimizer was captured: no optimizer is called any more."""

_graph_task: Any = torch._C._current_graph_task_id
_NONE: Final = -1


def in_backward() -> bool:
    """Whether a backward pass goes on."""
    return bool(_graph_task() != _NONE)


class Marks:
    """The marks of a rehearsal, oldest first.

    Attributes:
        annotations: as a snapshot's ``external_annotations`` has them.
    """

    def __init__(self) -> None:
        self.annotations: list[dict[str, Any]] = []

    def begin(self, name: str, device: int) -> None:
        """Note that something begins while a device is the current one."""
        self._add("START", name, device)

    def end(self, name: str, device: int) -> None:
        """Note that it has ended."""
        self._add("END", name, device)

    def of_pytorch(self, first: int) -> list[dict[str, Any]]:
        """Return those that PyTorch makes itself, from a number on."""
        return [mark for mark in self.annotations[first:] if not mark["name"].startswith(OURS)]

    def _add(self, stage: str, name: str, device: int) -> None:
        # The clock of the events' times, which the library takes from C++'s system_clock.
        time_us = time.time_ns() // 1000
        self.annotations.append(
            {"stage": stage, "name": name, "device": device, "time_us": time_us}
        )


class StepProgress:
    """Told what the program does; how many of its steps are complete."""

    @property
    def n_complete(self) -> int:
        """Steps that are over."""
        return 0

    def begin_backward(self) -> None:
        """Note that a backward pass begins, none of another's."""

    def end_backward(self) -> None:
        """Note that it is over, or failed."""

    def begin_call(self, model: Any, *, keeps: bool) -> None:
        """Note that a model is called from outside of any; whether what it makes is kept."""

    def replayed(self, graph: Any) -> None:
        """Note that a graph in which an optimizer was captured is replayed."""

    def end_range(self) -> None:
        """Note that a range of ``record_function`` has ended, an optimizer's run among them."""
