"""Outlooks: whether a run survives under a what-if, beyond the recorded failure.

If there is another recording of the program, it knows what comes next (``other_run.py``); else the
last period of steps repeats (``repetition.py``); else only experience with first steps says
anything. One number, the doubt, stands for what the recording leaves unexplained: the share by
which a coming step may differ from what is expected. It decides how certain the words for the
outcome are; ``tools/truth_table.py`` prints how often each of these words is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.future.passes import is_training_forward
from fragdoctor.future.repetition import LARGER, BoundedContainer, Repetition
from fragdoctor.future.steps import Steps
from fragdoctor.model.settings import Era
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.operations import Operations
from fragdoctor.trace.replay import Conditions
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_share, format_size, plural

MAX_STEPS: Final = 100
"""Steps to play if nobody asks for a number."""

FORESEEN_STEPS: Final = 10_000
"""Growth that continues evenly and ends the run within this many steps is reported as doing so. In
``tests/truth`` a tenth changes nothing, and without a limit one right answer becomes open."""

MAX_PLAYED: Final = 200_000
"""Operations to play after the recorded ones if nobody asks for a number of steps."""

PLAYED_OF_EDIT: Final = 20_000
"""The same limit for a changed program: advice tries a dozen changes."""

SURE: Final = 0.05
"""Doubt up to which the expected steps decide the outcome. With more doubt, a failure is likely if
it would happen even if the steps asked for that much less. Success is likely if the steps could ask
for as much more as they may come to (``AlignedSteps.may_exceed``). By ``tools/ablate.py``, a tenth
makes eleven certain answers wrong; a fiftieth leaves 56 likely ones open."""

ENOUGH: Final = 3
"""Complete steps from which on the outcome is said to be certain, not just likely. With two, two of
76 certain answers are wrong, and with one, 13 of 200 (``tools/ablate.py``)."""

FORWARD_TAKES: Final = 1.3
"""What a program needs at least if it failed in its first forward pass of training, as a multiple
of what it had and asked for then. The rest of the pass, gradients and optimizer come on top."""

BACKWARD_TAKES: Final = 1.1
"""The same multiple for a program that failed later in its first step."""

NO_STEP: Final = "the recording holds no complete step"
UNLIKE_ANY: Final = "the step that failed is unlike any that was recorded in full"


class Outlooks:
    """The futures of one list of requests; what comes next is worked out once for all what-ifs.

    Args:
        trace: trace of the device.
        operations: its requests, as recorded or edited.
        max_steps: how many whole steps to play after the current one. If None, play until the
            pattern repeats, up to ``MAX_STEPS``.
        is_edited: whether the requests differ from the recorded ones.
        recorded: the futures of the recorded requests, if known.
        container: a container with a limit that is filling up, if a census found one.
    """

    def __init__(  # noqa: PLR0913 - all that tells the future
        self,
        trace: Trace,
        operations: _ext.NativeOps,
        max_steps: int | None = None,
        *,
        is_edited: bool = False,
        recorded: Outlooks | None = None,
        container: BoundedContainer | None = None,
    ) -> None:
        self._trace = trace
        self._is_edited = is_edited
        self._operations = operations
        self._asked = max_steps
        known = None if recorded is None else recorded.repetition
        self.repetition: Repetition | None = Repetition.of(
            trace, Operations.of(operations), known, container
        )

    def replay(self, conditions: Conditions, *, remakes_start: bool) -> tuple[Any, Outlook]:
        """Return the native replay's result for the recorded part, and what comes after it."""
        known, limit = self.repetition, conditions.limit_bytes
        if known is None:
            raw = self._operations.replay(conditions.native(), False, remakes_start)
            return raw, _FAILED_BEFORE if not raw["fits"] else self._of_first_step(raw, limit)
        run = self._operations.play(conditions.native(), known.n_past, remakes_start)
        raw = run.recorded
        if not raw["fits"] or raw["is_cut_short"]:
            return raw, _FAILED_BEFORE
        expected = self._outcome(known, run, known.expected, limit)
        doubt, fails = known.doubt, expected.fails
        is_likely = is_sure = doubt <= SURE
        more = None if is_sure or fails else known.steps.may_exceed
        if more is not None or (fails and not is_sure):
            differ = max(1 - doubt, 0.0) if more is None else 1 + more
            other = self._outcome(known, run, known.play(differ), limit)
            is_likely = other.fails is fails
        unshown = self._unshown(known)
        is_likely = is_likely and not unshown
        is_known = is_likely and is_sure and known.n_complete >= ENOUGH and not self._trace.is_cut
        may_rise = known.steps.rises and not fails
        is_known = is_known and expected.likely is None and not may_rise
        reason = LARGER if may_rise else expected.reason if is_sure else known.reason
        if is_sure and known.n_complete < ENOUGH:
            reason = f"only {plural(known.n_complete, 'step')} recorded in full"
        return raw, replace(
            expected,
            state=expected.state if is_known else OutlookState.OPEN,
            likely=None if is_known or not is_likely else expected.likely or expected.state,
            basis=OutlookBasis.REPEATED if known.is_exact else OutlookBasis.SCALED,
            fails_after_steps=expected.fails_after_steps if is_likely else None,
            reason=unshown or reason,
            n_complete_steps=known.n_complete,
        )

    def _unshown(self, known: Repetition) -> str:
        """Return why the complete steps do not show what comes, or "" if they do."""
        if self._trace.is_cut and known.n_complete < ENOUGH:
            return (
                f"only {plural(known.n_complete, 'step')} recorded in full, and none from the start"
            )
        if not known.is_exact and not self._trace.stacks.roles.has_python:
            return "without stacks only steps of equal sizes show what comes"
        return ""

    def step_needs_bytes(self) -> int | None:
        """Return what must be live at once in the current step, or None if that is not known.

        No allocator can serve the step with noticeably less.
        """
        known = self.repetition
        if known is None:
            return None
        config = native_config(self._trace.settings, era=Era.ADDRESS)
        look = self._operations.play(config, known.n_past).look_on(known.expected, max_steps=0)
        return int(look["peak_allocated"][0]) if len(look["peak_allocated"]) else None

    def _outcome(
        self, known: Repetition, run: _ext.NativeRun, future: _ext.NativeFuture, limit: int | None
    ) -> Outlook:
        """Return the model's outcome for a future: it holds, or fails after this many steps.

        A failure that growth brings about later is only likely: a leak goes on, but a cache or a
        buffer fills up, and while it does so only a census tells them apart.
        """
        # Two rounds of steps that may differ show whether they grow; more rounds add nothing.
        most, n_filling = (MAX_STEPS if known.doubt <= SURE else 2 * known.period), known.n_filling
        max_played = PLAYED_OF_EDIT if self._is_edited else MAX_PLAYED
        look = run.look_on(
            future,
            max_steps=most + n_filling if self._asked is None else self._asked,
            max_ops=max_played if self._asked is None else 2**40,
            stops_at_repetition=self._asked is None and not (known.grows or n_filling),
        )
        n_done, repeats = int(look["n_done"]), bool(look["repeats"]) and not known.grows
        # Without splitting, larger requests take up the same blocks for a while.
        growth = max(_growth_of(known, look["allocated"]), known.growth_bytes)
        peak = max(
            int(look["peak_reserved"].max(initial=0)), int(run.recorded["peak_reserved_bytes"])
        )
        outlook = Outlook(
            OutlookState.FAILS, peak_reserved_bytes=peak, growth_bytes_per_step=growth
        )
        has_failed, after = bool(look["has_failed"]), n_done
        grows = has_failed and n_done and look["allocated"][-1] > look["allocated"][0]
        grows = grows and not n_filling  # a container with a limit is known to fill up so far
        if growth > 0 and not (has_failed or repeats or limit is None or self._asked is not None):
            after += max(limit - int(look["peak_allocated"].max(initial=0)), 0) // growth
            grows = after <= FORESEEN_STEPS
        if grows:
            outlook = replace(outlook, state=OutlookState.OPEN, likely=OutlookState.FAILS)
            by = f" by {format_size(growth)} a step" if growth else ""
            return replace(outlook, fails_after_steps=after, reason=f"if memory keeps growing{by}")
        if has_failed:
            reason = f"a request of {format_size(look['failed_bytes'])} fails"
            return replace(outlook, fails_after_steps=after, reason=reason)
        return replace(
            outlook,
            state=OutlookState.HOLDS,
            steps=max(n_done - int(known.counts_first), 0),
            reason="from there on the steps repeat" if repeats else "",
        )

    def _of_first_step(self, raw: Mapping[str, Any], limit: int | None) -> Outlook:
        """Return the outlook of a run without a complete step, or without one like the last."""
        if len(Steps.of(self._trace)) > 1:
            return Outlook(OutlookState.OPEN, reason=UNLIKE_ANY)
        least = int(raw["peak_allocated_bytes"])
        takes = self._first_step_takes
        if not takes:
            return Outlook(OutlookState.OPEN, reason=NO_STEP)
        fails = limit is not None and limit <= takes * least
        return Outlook(
            OutlookState.OPEN,
            OutlookBasis.LOWER_BOUND,
            likely=OutlookState.FAILS if fails else None,
            reason=f"{'with this change ' if self._is_edited else ''}its first step was cut off at "
            f"{format_size(least)}, and most first steps take at least "
            f"{format_share(takes - 1, 1)} more to complete",
        )

    @cached_property
    def _first_step_takes(self) -> float:
        """What a first step of training takes, as a multiple of what it had; 0 for other steps."""
        trace = self._trace
        if trace.is_cut or not trace.ends_in_failure or not len(trace.oom_rows):
            return 0.0
        if is_training_forward(trace, int(trace.oom_rows[-1])):
            return FORWARD_TAKES
        return BACKWARD_TAKES if trace.stacks.roles.trains else 0.0


def _growth_of(known: Repetition, allocated: Any) -> int:
    """Return by how many bytes a step allocated memory rises, if it does with every cycle."""
    after = np.asarray(allocated).astype(np.int64)[::-1][:: known.period]
    rises = -np.diff(after)
    return max(int(rises.min()), 0) // max(known.period_steps, 1) if len(rises) else 0


_FAILED_BEFORE: Final = Outlook(
    OutlookState.FAILS,
    OutlookBasis.COMPLETE,
    fails_after_steps=0,
    reason="a request of the recorded part fails",
)
