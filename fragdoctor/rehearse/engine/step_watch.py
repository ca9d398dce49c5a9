"""Steps of a program: where one ends, whether the next asks for the same memory, when to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from itertools import takewhile
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as optimizers

from fragdoctor.rehearse.engine import put
from fragdoctor.rehearse.engine.session import Session
from fragdoctor.rehearse.engine.skipping import CHEAP_EVENTS, EQUAL_ROUNDS, MANY_EQUAL_ROUNDS


@dataclass(frozen=True, slots=True)
class Step:
    """What a step asked for.

    Attributes:
        number: from 1.
        n_events: of each device, at its end.
        digests: of the sizes asked for, by device.
        allocated_bytes: at its end, by device.
        reserved_bytes: at its end, by device.
    """

    number: int
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
    """Counts the steps of a program.

    A step is a round of the user's own loop in which the optimizer is called
    (:class:`~fragdoctor.rehearse.engine.rounds.Rounds`). Where a library has the loop it ends with
    a call of the optimizer; several optimizers that take turns (a generator and a discriminator)
    make one step together: as many are complete as the one that has made the fewest.

    Attributes:
        now: the rehearsal.
        limit: steps after which to stop; None = when their memory repeats.
        most: steps after which to stop whatever they do; None = never.
        on_step: told after each.
        on_stop: called when it is enough, with the reason.
        found: steps in which the optimizer was called.
    """

    now: Session
    limit: int | None
    most: int | None
    on_step: Callable[[int], None]
    on_stop: Callable[[str], None]
    found: list[Step] = field(default_factory=list)
    _reason: str = ""
    _by_optimizer: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    _n_of_library: int = 0
    _is_due: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def install(self, undo: ExitStack) -> None:
        """Listen to optimizers and loops until ``undo`` is closed."""
        undo.callback(optimizers.register_optimizer_step_post_hook(self._after_optimizer).remove)
        undo.enter_context(self._undo)
        self.now.steps_before = lambda: self.n_before
        self.now.mark_step = self.mark
        rounds = self.now.rounds
        rounds.on_end, rounds.on_begin = self._after_round, self._before_round
        made = torch.optim.Optimizer.__init__

        @wraps(made)
        def make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            rounds.uncalled.add(optimizer)

        put(undo, torch.optim.Optimizer, "__init__", make)

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self.now.is_started:
            return
        if self.now.captures:  # the replays are the steps
            self.now.captures[-1].has_steps = True
            return
        if self.mark(sys._getframe(1), optimizer):
            return
        self._by_optimizer[optimizer] = self._by_optimizer.get(optimizer, 0) + 1
        n_complete = min(self._by_optimizer.values())
        if n_complete <= self._n_of_library:
            return
        self._n_of_library = n_complete
        self._settle(n_complete)
        if self._reason:
            self._undo.callback(register_module_forward_pre_hook(self._before_forward).remove)

    def _before_forward(self, _module: Any, _args: Any) -> None:
        if torch.is_grad_enabled():  # else what follows the optimizer still goes on: an evaluation
            self._before_round()

    def mark(self, frame: FrameType | None, optimizer: object = None) -> bool:
        """Note that an optimizer works here; whether in a loop of the user's own."""
        self._is_due = self.now.rounds.mark(frame, optimizer) or self._is_due
        return self._is_due

    def _after_round(self) -> None:
        n_complete = self.n_before
        if self._is_due:
            self._is_due = False
            self._settle(n_complete, is_of_user=self.now.rounds.skipping.is_on)
        elif self.limit is not None and n_complete >= self.limit:
            self._reason = self._enough(n_complete)

    def _before_round(self) -> None:
        if self._reason:
            self.on_stop(self._reason)

    def _settle(self, number: int, *, is_of_user: bool = False) -> None:
        self.found.append(self._step(number))
        self.on_step(number)
        if self._reason:
            self.on_stop(self._reason)
        if not is_of_user:  # else the loop goes on with the rounds that may show something new
            self._reason = self._enough(number)

    @property
    def n_before(self) -> int:
        """Steps that were complete before what runs now."""
        rounds = self.now.rounds
        if self._n_of_library and not rounds.n_taken:
            return self._n_of_library
        return rounds.n_complete(sys._getframe(1))

    @property
    def n_taken(self) -> int:
        """Steps so far, with one that goes on."""
        return self.now.rounds.n_taken or self._n_of_library

    def _step(self, number: int) -> Step:
        gpus, devices = self.now.gpus, range(self.now.n_devices)
        before = self.found[-1].n_events if self.found else (0,) * self.now.n_devices
        figures = [gpus.figures(d) for d in devices]
        ends = tuple(f["events"] for f in figures)
        return Step(
            number,
            ends,
            tuple(gpus.digest(d, before[d], ends[d]) for d in devices),
            tuple(f["allocated"] for f in figures),
            tuple(f["reserved"] for f in figures),
        )

    def _enough(self, n: int) -> str:
        if self.limit is not None:
            return f"{n} steps were asked for" if n >= self.limit else ""
        equal = list(takewhile(self.found[-1].repeats, reversed(self.found))) if self.found else []
        if len(equal) >= EQUAL_ROUNDS:
            n_events = sum(equal[0].n_events) - sum(equal[-1].n_events)
            if len(equal) >= MANY_EQUAL_ROUNDS or n_events >= CHEAP_EVENTS:
                return f"steps {equal[-1].number} to {n} asked for the same memory"
        if self.most is not None and n >= self.most:
            return f"{n} steps did not repeat in memory"
        return ""
