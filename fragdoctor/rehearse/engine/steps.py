"""Steps of a program: where one ends, whether the next asks for the same memory, when to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch.optim import optimizer as optimizers

from fragdoctor.rehearse.engine.loop import Loop
from fragdoctor.rehearse.engine.session import Session

EQUAL_STEPS: Final = 3
"""Steps in a row that ask for the same memory, after which more of them would show nothing new."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step asked for.

    Attributes:
        n_events: of each device, at its end.
        digests: of the sizes asked for, by device.
        allocated_bytes: at its end, by device.
        reserved_bytes: at its end, by device.
    """

    n_events: tuple[int, ...]
    digests: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]

    def repeats(self, other: Step) -> bool:
        """Whether the other asked for the same and left the same."""
        return (
            self.digests == other.digests
            and self.allocated_bytes == other.allocated_bytes
            and self.reserved_bytes == other.reserved_bytes
        )


@dataclass(slots=True)
class Steps:
    """Counts the steps of a program: those of its optimizers.

    Several optimizers that take turns (a generator and a discriminator) make one step together: as
    many are complete as the one that has made the fewest.

    Attributes:
        now: the rehearsal.
        limit: steps after which to stop; None = when their memory repeats.
        most: steps after which to stop whatever they do; None = never.
        on_step: told after each.
        on_stop: called when it is enough, with the reason.
    """

    now: Session
    limit: int | None
    most: int | None
    on_step: Callable[[int], None]
    on_stop: Callable[[str], None]
    found: list[Step] = field(default_factory=list)
    optimizer: str = ""
    _loop: Loop = field(default_factory=Loop)
    _reason: str = ""
    _by_optimizer: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)

    def install(self, undo: ExitStack) -> None:
        """Listen to optimizers until ``undo`` is closed."""
        hook = optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        undo.callback(hook.remove)
        self.now.steps_before = lambda: self.n_before

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.now.is_started:
            self._by_optimizer[optimizer] = self._by_optimizer.get(optimizer, 0) + 1
            self.optimizer = self.optimizer or type(optimizer).__name__
            self._settle(min(self._by_optimizer.values()))

    def _settle(self, n_complete: int) -> None:
        if n_complete <= len(self.found):
            return
        self.found.append(self._step())
        self.on_step(len(self.found))
        loop = self._loop
        loop.move_on(sys._getframe(2))
        reason = self._enough()
        if reason and self._reason:
            self.on_stop(self._reason)
        elif reason:
            self._reason = reason
            loop.at_its_end(lambda: self.on_stop(reason))

    @property
    def n_before(self) -> int:
        """Steps that were complete before what runs now: a step lasts to the end of its loop."""
        return len(self.found) - (1 if self.found and self._loop.is_in_same_round() else 0)

    def _step(self) -> Step:
        gpus, devices = self.now.gpus, range(self.now.n_devices)
        before = self.found[-1].n_events if self.found else (0,) * self.now.n_devices
        figures = [gpus.figures(d) for d in devices]
        ends = tuple(f["events"] for f in figures)
        return Step(
            ends,
            tuple(gpus.digest(d, before[d], ends[d]) for d in devices),
            tuple(f["allocated"] for f in figures),
            tuple(f["reserved"] for f in figures),
        )

    def _enough(self) -> str:
        n = len(self.found)
        if self.limit is not None:
            return f"{n} steps were asked for" if n >= self.limit else ""
        last = self.found[-EQUAL_STEPS:]
        if len(last) == EQUAL_STEPS and all(step.repeats(last[0]) for step in last):
            return f"steps {n - EQUAL_STEPS + 1} to {n} asked for the same memory"
        if self.most is not None and n >= self.most:
            return f"{n} steps did not repeat in memory"
        return ""
