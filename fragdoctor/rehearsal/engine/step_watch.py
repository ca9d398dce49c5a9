"""Steps of a program: where each ends, whether the next requests the same memory, when to stop.

A step of training lasts from one run of the optimizer to the next, with micro-batches inside.
Optimizers that run in a row with no backward pass in between are one run; if they take turns, as in
a GAN, a step lasts until all have had their turn (``fragdoctor.model.turns``). If no optimizer is
created, a step ends with a backward pass; if there is none either, it lasts from one outermost call
of the model to the next; of several models, the one called most often counts.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, islice, pairwise, takewhile
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import optimizer as optimizers

from fragdoctor.model.turns import period_of, whole_rounds
from fragdoctor.rehearsal.engine.calls import after_making
from fragdoctor.rehearsal.engine.memory_history import ALLOC
from fragdoctor.rehearsal.engine.session import Session
from fragdoctor.rehearsal.engine.skipping import (
    CHEAP_EVENTS,
    EQUAL_ROUNDS,
    MANY_EQUAL_ROUNDS,
    Moment,
    Round,
)

LITTLE_BYTES: Final = 2**20
"""What a program may ask for after its last step, such as for the mean of its losses."""
LIBRARY_S: Final = 10.0
"""How long a rehearsal continues at most when a library's loop repeats in memory."""
RUNS_BEFORE_A_TURN: Final = 5
"""After this many runs of others, an optimizer that was not called yet takes no turn: a WGAN
updates its critic five times before its generator (Gulrajani et al., 2017)."""


class Step(NamedTuple):
    """A completed step.

    Attributes:
        n_events: number of events of each device at its end.
        asked: what it requested, and what it left.
    """

    n_events: tuple[int, ...]
    asked: Round


class Run(NamedTuple):
    """A run of the optimizer, or of several with no backward pass in between.

    Attributes:
        turn: numbers of the optimizers, in the order of their calls.
        backward: number of backward passes that had begun before.
        end: the state when it was over.
    """

    turn: tuple[int, ...]
    backward: int
    end: Moment


class StopConditions(NamedTuple):
    """When a program has shown enough.

    Attributes:
        limit: steps after which to stop; None = when their memory repeats.
        most: steps after which to stop in any case; None = never.
        least: steps before which it does not stop because their memory repeats.
        known: steps after which all that follow are known to repeat; None = not known.
        fitting_bytes: how much it may allocate; None = any amount.
    """

    limit: int | None
    most: int | None
    least: int = 0
    known: int | None = None
    fitting_bytes: int | None = None


class Steps:
    """Is told what a program does; counts its steps, and ends it when enough has been seen.

    If steps repeat, it ends with the optimizer's run. After a requested number of steps, or where
    all that follow are known, it ends as the next step begins to compute, so that what follows the
    optimizer without gradients, such as an evaluation or a log, is seen first.

    Args:
        now: the rehearsal.
        asked: when enough has been seen.
        on_step: called after each run of the optimizer that ends a step.
        on_stop: called with the reason when enough has been seen.

    Attributes:
        found: steps that end with a run of the optimizer.
    """

    def __init__(
        self,
        now: Session,
        asked: StopConditions,
        on_step: Callable[[int], None],
        on_stop: Callable[[str], None],
    ) -> None:
        self.now = now
        self.asked = asked
        self.on_step = on_step
        self.on_stop = on_stop
        self.found: list[Step] = []
        self._runs: list[Run] = []
        self._period = 1
        self._n_settled = 0  # runs
        self._is_in_users_loop = False  # then Skipping decides when to stop
        self._reason = ""
        self._began = time.monotonic()
        self._ends_at: float | None = None
        self._n_begun = 0  # backward passes
        self._n_backward = 0  # completed backward passes
        self._n_calls: Counter[int] = Counter()  # of each model
        self._has_optimizer = False
        self._uncalled: WeakSet[Any] = WeakSet()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next_number = count().__next__

    def install(self) -> None:
        """Listen to optimizers and to the session's events."""
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self.now.progress = self
        skipping = self.now.loops.skipping
        skipping.steps = lambda: 0 if self._has_optimizer and not self._runs else self.n_taken
        after_making(self._made_optimizer)

    def _made_optimizer(self, optimizer: Any) -> None:
        self._has_optimizer = True
        self._uncalled.add(optimizer)

    @property
    def n_complete(self) -> int:
        """Number of steps that were complete before what is running now."""
        waits = self._uncalled and len(self._runs) <= RUNS_BEFORE_A_TURN
        if self._has_optimizer and (waits or not self._runs):
            return 0  # the first step is not over
        is_inference = not (self._runs or self._n_backward)
        return max(self.n_taken - is_inference, 0)  # a call of the model begins a step

    @property
    def _n_skipped(self) -> int:
        return self.now.loops.skipping.n_steps

    @property
    def n_taken(self) -> int:
        """Number of steps that the program has taken, if nothing more comes."""
        if self._runs:
            return len(self._runs) // self._period + self._n_skipped
        if self._has_optimizer and self._n_backward:
            return 0  # gradients are accumulated for an update that has not come
        return (self._n_backward or max(self._n_calls.values(), default=0)) + self._n_skipped

    def begin_backward(self) -> None:
        """Note that a backward pass begins, with which a new step may begin to compute."""
        self._begin()
        self._n_begun += 1

    def end_backward(self) -> None:
        """Note the end of a backward pass, which is a step if there is no optimizer."""
        self._n_backward += 1

    def begin_call(self, model: Any, *, keeps: bool) -> None:
        """Note a call, with which a new step may begin; without training, it does."""
        if keeps or not self._n_begun:
            self._begin()
        self._n_calls[id(model)] += 1

    def replayed(self, graph: Any) -> None:
        """Note a replay, which is a run of its own and includes the backward pass."""
        self._begin()
        self._n_begun += 1
        self._note(graph)

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self.now.is_started:
            return
        self._uncalled.discard(optimizer)
        loops = self.now.loops
        self._is_in_users_loop = loops.takes_steps(sys._getframe(1)) and loops.skipping.is_on
        if self.now.captures:  # only replays count as runs
            self.now.captures[-1].has_steps = True
        else:
            self._note(optimizer)

    def _note(self, optimizer: Any) -> None:
        before = self.n_complete
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._next_number()
        turn: tuple[int, ...] = ()
        if self._runs and self._runs[-1].backward == self._n_begun:
            turn = self._runs[-1].turn
        if turn and number not in turn:
            self._runs.pop()
        else:
            turn = ()
        end = Moment.now(self.now.gpus, self.now.n_devices)
        if not self._runs:
            self.now.loops.skipping.n_steps = 0  # model calls before training were not steps
        self._runs.append(Run((*turn, number), self._n_begun, end))
        at = len(self._runs) - 1
        if at < self._period or self._runs[at - self._period].turn != self._runs[at].turn:
            period = period_of(whole_rounds([run.turn for run in self._runs]))
            if period != self._period:
                self._period = period
                self.found.clear()
        if self.n_complete > before:
            self.on_step(self.n_complete)
        # Like the run one period before, this run is over, with all optimizers that ran in a row.
        is_over = self._runs[at - self._period].turn == self._runs[at].turn
        if self.asked.limit is None and at >= self._period and is_over:
            self._reason = self._settled()

    def end_range(self) -> None:
        """End the program after the optimizer's range.

        If it is known that only equal steps follow, what the step lets go of is seen first.
        """
        if self._reason and self.asked.known is None:
            self.on_stop(self._reason)

    def _begin(self) -> None:
        """Note that the next step begins, or more of this one: stop if enough has been seen."""
        if not self._has_optimizer:
            if self.asked.limit is not None and self.n_taken >= self.asked.limit:
                self.on_stop(f"{self.asked.limit} steps were asked for")
        else:
            if len(self._runs) > self._n_settled:
                self._reason = self._settled()
            if self._reason:
                self.on_stop(self._reason)

    def _settled(self) -> str:
        """Note the completed steps; return why they are enough, "" if they are not."""
        self._n_settled = len(self._runs)
        ends = range(
            self._period - 1,
            (self.n_complete - self._n_skipped) * self._period,
            self._period,
        )
        for at in ends[len(self.found) :]:
            before = self.found[-1].n_events if self.found else (0,) * self.now.n_devices
            end = self._runs[at].end
            asked = end.round_since(self.now.gpus, before)
            self.found.append(Step(end.n_events, asked))
        return self._enough(self.n_complete)

    def _equal(self, most: int | None = None) -> list[Step]:
        """Return the last steps that asked for the same memory, the last one first."""
        steps = islice(reversed(self.found), most)
        return list(takewhile(lambda step: step.asked == self.found[-1].asked, steps))

    def traits(self, *, is_stopped: bool) -> dict[str, Any]:
        """Return what the search for a cure asks of the steps.

        How many backward passes precede an update, whether optimizers are updated in turn, and the
        step from which all are known to repeat.
        """
        passes = [0, *(run.backward for run in self._runs)]
        return {
            "n_passes": max((b - a for a, b in pairwise(passes)), default=0),
            "alternates": len({frozenset(run.turn) for run in self._runs}) > 1,
            "known_from": self._known_from(is_stopped=is_stopped),
        }

    def _known_from(self, *, is_stopped: bool) -> int | None:
        """Return the step from which all asked for the same memory, and nothing else followed.

        It is None in a loop of the user's own, whose end is always seen, and if the program asked
        for memory after its last step. Where it was stopped, what followed is not known anyhow.
        """
        if self._is_in_users_loop or not self._runs:
            return None
        self._settled()
        events = (
            event
            for device, first in enumerate(self._runs[-1].end.n_events)
            for event in self.now.gpus.trace(device, first)
        )
        asked_bytes = sum(event.size for event in events if event.action == ALLOC)
        is_quiet = is_stopped or asked_bytes <= LITTLE_BYTES
        return len(self.found) - len(self._equal()) + 1 if is_quiet else None

    def _enough(self, n: int) -> str:
        limit, most, least, *_ = self.asked
        if limit is not None:
            return f"{n} steps were asked for" if n >= limit else ""
        equal = self._equal(MANY_EQUAL_ROUNDS)
        repeats = len(equal) >= EQUAL_ROUNDS
        first = len(self.found) - len(equal) + 1
        reason = f"steps {first} to {n} asked for the same memory" if repeats else ""
        if repeats and self._shows_nothing_new(n):
            return reason
        if self._is_in_users_loop:
            return ""
        if repeats and n >= least:
            n_events = sum(equal[0].n_events) - sum(equal[-1].n_events)
            is_many = len(equal) >= MANY_EQUAL_ROUNDS or n_events >= CHEAP_EVENTS
            if is_many and self._has_gone_on():
                return reason
        if most is not None and n >= most:
            return f"{n} steps did not repeat in memory"
        return ""

    def _shows_nothing_new(self, n: int) -> bool:
        """Return whether the rest is known, or is of no use as the program already has too much."""
        known, fitting_bytes = self.asked.known, self.asked.fitting_bytes
        if known is not None and n >= known and not self._is_in_users_loop:
            return True
        figures = map(self.now.gpus.figures, range(self.now.n_devices))
        peak_bytes = max(one["peak_allocated"] for one in figures)
        return fitting_bytes is not None and peak_bytes > fitting_bytes

    def _has_gone_on(self) -> bool:
        """Return whether a library's loop, whose rounds cannot be skipped, ran for long enough.

        What comes after its epochs is seen if that takes no longer than everything before.
        """
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + min(LIBRARY_S, now - self._began)
        return now >= self._ends_at
