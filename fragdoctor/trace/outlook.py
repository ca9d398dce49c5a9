"""Outlooks: whether a run survives under a what-if, looked at beyond the recorded failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from fragdoctor._native import _ext
from fragdoctor.model.arrays import is_among
from fragdoctor.model.settings import Era
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.trace import stacks
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.continuation import ENOUGH, GUESSED, Continuation, continuation_of
from fragdoctor.trace.first_step import are_layers, lower_bound_of
from fragdoctor.trace.foresight import believed_steps, growth_of, mismatch_of
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.made_once import KeptOnce
from fragdoctor.trace.operations import Operations
from fragdoctor.trace.passes import RoleRuns
from fragdoctor.trace.replay import Conditions
from fragdoctor.trace.steps import Steps
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size, plural

MAX_STEPS: Final = 100
"""Steps that are looked at where nobody asks for a number."""

FORESEEN_STEPS: Final = 10_000
"""Steps within which growth that goes on evenly is said to end the run."""

OPTIMIZER_TAKES: Final = 3
"""What an optimizer may make of its gradients, as a multiple of them: two states and, in passing,
one more list of tensors (Adam)."""

MAX_PLAYED: Final = 200_000
"""Operations played after the recorded ones, where nobody asks for a number of steps."""

PLAYED_OF_EDIT: Final = 20_000
"""The same for a changed program: advice tries a dozen changes."""

SETTLED: Final = 4
"""Complete steps from which on a failure in a later step is believed that no growth explains: it
hangs on where blocks come to lie."""

MOST_MISSED: Final = 0.25
"""Share by which it may differ at most: up to that an outcome must be clear with as much less or
more memory, beyond it nothing is said."""

KEPT_ONCE: Final = 0.02
"""Share of the peak that a first step may keep for good without being taken for one that leaks."""

ENDS: Final = "what its steps keep is made once for each parameter, and most have it"
NO_STEP: Final = "the recording holds no complete step"


class Outlooks:
    """The futures of one list of requests; the continuation is worked out once for all what-ifs.

    Args:
        trace: of the device.
        operations: its requests, as recorded or edited.
        max_steps: whole steps to play after the one under way; where None, until the pattern
            repeats, at most ``MAX_STEPS``.
        is_edited: the requests are not those of the recording.
    """

    def __init__(
        self,
        trace: Trace,
        operations: _ext.NativeOps,
        max_steps: int | None = None,
        *,
        is_edited: bool = False,
    ) -> None:
        self._trace = trace
        self._is_edited = is_edited
        self._operations = operations
        self._asked = max_steps
        self.continuation = continuation_of(trace, Operations.of(operations))
        self._lower_bound = lower_bound_of(trace) if self.continuation is None else None
        if self._lower_bound is not None and is_edited:
            self._lower_bound = self._lower_bound.of_edit(trace, Operations.of(operations))

    @cached_property
    def _unlimited(self) -> _ext.NativeRun:
        """The recorded part, played without a limit."""
        known = self.continuation
        assert known is not None  # noqa: S101 - asked before
        config = native_config(self._trace.settings, era=Era.ADDRESS)
        return self._operations.play(config, known.n_past)

    @cached_property
    def _mismatch(self) -> float:
        """By what share of the peak repeating the recorded steps misses what was recorded of them.

        Played without a limit, each must rise as far above its beginning as it did, and all of
        them together must keep as much. What rounds away is 0.
        """
        known = self.continuation
        assert known is not None  # noqa: S101 - asked before
        look = self._unlimited.look_on(known.again, MAX_STEPS, MAX_PLAYED // 2)
        return mismatch_of(self._trace, known, look)

    @cached_property
    def _awaiting_bytes(self) -> int:
        """Gradients of the first step that live on and that no optimizer has used yet, in bytes."""
        runs, rows, lives = RoleRuns.of(self._trace), Steps.of(self._trace).rows, self._trace.lives
        if runs is None or self._trace.is_late or len(rows) < 2:
            return 0
        if (runs.label == stacks.OPTIMIZER).any():
            return 0
        role = self._trace.stacks.roles.role[lives.stack]
        first = (lives.start >= rows[0]) & (lives.start < rows[1])
        first &= np.isin(role, (stacks.BACKWARD, stacks.SILENT)) & (lives.free == NEVER)
        older = lives.requested_bytes[lives.start < rows[0]]
        first &= is_among(lives.requested_bytes, older)
        return int(lives.size_bytes[first].sum())

    @cached_property
    def _kept_share(self) -> float:
        """Share of the peak that the only complete step keeps and every step may keep."""
        known = self.continuation
        assert known is not None  # noqa: S101 - asked before
        peak = int(self._trace.totals.envelope("allocated_bytes", [0]).high[0])
        return known.first_kept_bytes / max(peak, 1)

    @cached_property
    def _believed_steps(self) -> int:
        assert self.continuation is not None  # noqa: S101 - asked before
        return believed_steps(self._trace, self.continuation)

    @cached_property
    def _kept_once(self) -> KeptOnce | None:
        assert self.continuation is not None  # noqa: S101 - asked before
        return KeptOnce.of(self._trace, self.continuation.rows)

    @cached_property
    def _may_be_layers(self) -> bool:
        """Whether the steps may be layers."""
        return are_layers(self._trace)

    def replay(self, conditions: Conditions, *, remakes_start: bool) -> tuple[Any, Outlook]:
        """Return what the native replay of the recorded part said, and what comes after it."""
        known = self.continuation
        limit = _limit_of(conditions)
        if known is None:
            raw = self._operations.replay(conditions.native(), False, remakes_start)
            return raw, self._without_steps(raw, limit)
        run = self._played(conditions, remakes_start=remakes_start)
        raw, look = run.recorded, self._look(run, known.native)
        outlook = self._judged(known, raw, look, limit)
        if not raw["fits"]:
            return raw, outlook
        if limit is None and not known.grows and conditions.settings == self._trace.settings:
            # Played without a limit already.
            self.__dict__.setdefault("_mismatch", mismatch_of(self._trace, known, look))
        n_more, peak = outlook.fails_after_steps, outlook.peak_reserved_bytes or 0
        once = self._kept_once if n_more else None
        ends = bool(n_more and once and once.ends_within(n_more, int(KEPT_ONCE * peak)))
        if ends and not (known.is_new or known.is_evaluating or self._mismatch):
            return raw, replace(
                outlook,
                state=OutlookState.HOLDS,
                basis=OutlookBasis.SCALED,
                steps=n_more,
                fails_after_steps=None,
                reason=ENDS,
            )
        doubt = ENDS if ends else next(self._doubts(known, outlook, int(look["n_played"])), "")
        state = outlook.state
        # What is new or far away was never seen to end so; what fails by little as often holds.
        is_guess = known.is_new or known.is_evaluating or ends or self._is_far(outlook)
        if not doubt and not self._is_robust(
            known, state, run, conditions, remakes_start=remakes_start
        ):
            fails = state is OutlookState.FAILS
            if not self._is_settled(known) or (fails and known.n_complete == 1):
                doubt = _close(known, state)
                is_guess |= fails
            else:
                outlook = replace(outlook, is_fragile=not fails)
        awaiting = self._awaiting_bytes if state is OutlookState.HOLDS else 0
        if not doubt and awaiting and limit is not None:
            tighter = conditions.with_less(min(OPTIMIZER_TAKES * awaiting / limit, 1.0))
            if not self._still_holds(known.native, tighter, remakes_start=remakes_start):
                doubt = "gradients are gathered, and no step of an optimizer was recorded yet"
        if not doubt:
            return raw, outlook
        is_open = replace(outlook, state=OutlookState.OPEN, fails_after_steps=None, reason=doubt)
        return raw, replace(is_open, likely=None if is_guess else outlook.state)

    def _is_far(self, outlook: Outlook) -> bool:
        """Return whether a run fails later than growth is believed to go on."""
        return (outlook.fails_after_steps or 0) > self._believed_steps

    def _is_unproven(self, known: Continuation, outlook: Outlook) -> bool:
        """Return whether a run fails in a later step for no reason but where blocks lie.

        Where batches are alike, what they ask for is known: it is asked with a little less, then.
        """
        if known.grows or known.rises or not outlook.fails_after_steps:
            return False
        if not known.varies and (known.lower is not None or known.first is not None):
            return False
        return known.n_complete < (ENOUGH if outlook.growth_bytes_per_step else SETTLED)

    def _is_settled(self, known: Continuation) -> bool:
        """Return whether the steps to come ask for what the recorded ones did, as far as is known.

        The one under way began with the same sizes, and playing the recorded ones again gives what
        was recorded of them.
        """
        is_as_recorded = known.first is None and not self._is_edited
        is_even = not (known.varies or known.grows or known.rises)
        return is_as_recorded and is_even and not self._mismatch

    def _doubts(self, known: Continuation, outlook: Outlook, n_played: int) -> Iterator[str]:
        """Yield why the steps to come are not known well enough."""
        holds = outlook.state is OutlookState.HOLDS
        if known.is_evaluating and (n_played or holds):
            yield "an evaluation is under way, and the recording shows none to its end"
        if known.is_new and (n_played or holds):
            yield "the step under way does what no complete one did"
        if self._may_be_layers:
            yield "what repeats may be the layers of the model, of which not all have run"
        if not self._is_edited and self._mismatch > MOST_MISSED:
            yield "repeating the recorded steps does not give what was recorded of them"
        if holds and known.n_complete == 1 and self._kept_share > KEPT_ONCE:
            yield "what the one recorded step keeps may be kept in every step"
        if holds and known.rises and not known.grows:
            yield "steps become larger, by how much and how often is not known"
        if self._is_unproven(known, outlook):
            yield f"it would fail later, and only {plural(known.n_complete, 'step')} are known"
        if self._is_far(outlook):
            about = plural(outlook.fails_after_steps or 0, "step")
            yield f"it would fail after {about}, too far from the {known.n_complete} recorded"
        if holds and known.first is not None and not known.first.is_all_trained:
            yield "the first step was not finished, and parts of the model have no gradients yet"

    def _is_robust(
        self,
        known: Continuation,
        state: OutlookState,
        run: _ext.NativeRun,
        conditions: Conditions,
        *,
        remakes_start: bool,
    ) -> bool:
        """Return whether a state remains where the steps to come ask for a little more or less."""
        limit = _limit_of(conditions)
        missed = 0.0 if self._is_edited or limit is None else self._mismatch
        if missed:
            margin = missed if state is OutlookState.HOLDS else -missed
            far = self._played(conditions.with_less(margin), remakes_start=remakes_start)
            look = self._look(far, known.native)
            if self._judged(known, far.recorded, look, limit).state is not state:
                return False
        other = {OutlookState.HOLDS: known.higher, OutlookState.FAILS: known.lower}.get(state)
        if other is None or limit is None:
            return True
        is_same = self._judged(known, run.recorded, self._look(run, other), limit).state is state
        if is_same is (known.first is None):
            return is_same
        if state is OutlookState.FAILS:
            return False
        # Other sizes do not fit into what the recorded ones left free: a smaller device asks the
        # same without that, and more, since not all of a step grows with its batch.
        tighter = conditions.with_less(max(GUESSED, known.stretch))
        future = known.native if known.first is None else other
        return self._still_holds(future, tighter, remakes_start=remakes_start)

    def _still_holds(
        self, future: _ext.NativeFuture, conditions: Conditions, *, remakes_start: bool
    ) -> bool:
        """Return whether a run goes on as far as it is played."""
        run = self._played(conditions, remakes_start=remakes_start)
        raw, look = run.recorded, self._look(run, future)
        return bool(raw["fits"]) and not look["has_failed"] and not raw["is_cut_short"]

    @property
    def _max_played(self) -> int:
        if self._asked is not None:
            return 2**40
        return PLAYED_OF_EDIT if self._is_edited else MAX_PLAYED

    def _played(self, conditions: Conditions, *, remakes_start: bool) -> _ext.NativeRun:
        """Return the run after its recorded part, from where several futures may follow."""
        assert self.continuation is not None  # noqa: S101 - asked before
        return self._operations.play(conditions.native(), self.continuation.n_past, remakes_start)

    def _look(self, run: _ext.NativeRun, future: _ext.NativeFuture) -> dict[str, Any]:
        assert self.continuation is not None  # noqa: S101 - asked before
        return run.look_on(
            future,
            max_steps=MAX_STEPS if self._asked is None else self._asked,
            max_ops=self._max_played,
            stops_at_repetition=self._asked is None and not self.continuation.grows,
        )

    def step_needs_bytes(self) -> int | None:
        """Return what must be live at once in the step under way; None where that is not known.

        No allocator can serve it with noticeably less.
        """
        known = self.continuation
        if known is None:
            return None if self._lower_bound is None else self._lower_bound.needed_bytes
        look = self._unlimited.look_on(known.native, max_steps=0)
        return int(look["peak_allocated"][0]) if len(look["peak_allocated"]) else None

    def _without_steps(self, raw: Mapping[str, Any], limit_bytes: int | None) -> Outlook:
        """Return the outlook of a run of which no step is complete."""
        if not raw["fits"]:
            return _failed_before()
        bound = self._lower_bound
        if bound is None:
            return Outlook(OutlookState.OPEN, reason=NO_STEP)
        is_now = limit_bytes is not None and bound.needed_bytes > limit_bytes
        is_beyond = is_now or (limit_bytes is not None and bound.next_bytes > limit_bytes)
        is_known = not bound.trains and bound.more_bytes == bound.request_bytes
        likely = OutlookState.HOLDS if is_known else None
        if limit_bytes is not None and bound.likely_bytes > limit_bytes:
            likely = OutlookState.FAILS
        return Outlook(
            OutlookState.FAILS if is_beyond else OutlookState.OPEN,
            OutlookBasis.LOWER_BOUND,
            likely=None if is_beyond else likely,
            fails_after_steps=int(not is_now) if is_beyond else None,
            needs_bytes=(bound.needed_bytes if is_now else bound.next_bytes) if is_beyond else None,
            reason=" and needs ".join(x for x in ("its step was cut off", bound.text) if x),
        )

    def _judged(
        self,
        known: Continuation,
        raw: Mapping[str, Any],
        look: Mapping[str, Any],
        limit_bytes: int | None,
    ) -> Outlook:
        if not raw["fits"] or raw["is_cut_short"]:
            return _failed_before()
        n_done, repeats = look["n_done"], look["repeats"] and not known.grows
        growth = growth_of(known, look["allocated"])
        outlook = Outlook(
            OutlookState.HOLDS,
            OutlookBasis.REPEATED if known.is_exact else OutlookBasis.SCALED,
            steps=max(n_done - int(known.counts_first), 0),
            peak_reserved_bytes=max(
                int(look["peak_reserved"].max(initial=0)), raw["peak_reserved_bytes"]
            ),
            growth_bytes_per_step=growth,
            reason="from there on the steps repeat" if repeats else "",
            n_complete_steps=known.n_complete,
        )
        if look["has_failed"]:
            return replace(
                outlook,
                state=OutlookState.FAILS,
                fails_after_steps=n_done,
                reason=f"a request of {format_size(look['failed_bytes'])} fails"
                + (", as steps become larger" if known.rises else ""),
            )
        if growth <= 0 or repeats or limit_bytes is None or self._asked is not None:
            return outlook
        room = limit_bytes - int(look["peak_allocated"].max(initial=0))
        n_left = max(room, 0) // growth
        if n_done + n_left > FORESEEN_STEPS:
            return outlook
        if n_done >= MAX_STEPS and n_done + n_left > self._believed_steps:
            about = f"each step keeps {format_size(growth)} more, enough for about"
            return replace(outlook, reason=f"{about} {plural(n_done + n_left, 'step')}")
        return replace(
            outlook,
            state=OutlookState.FAILS,
            fails_after_steps=n_done + n_left,
            reason=f"each step keeps {format_size(growth)} more",
        )


def _limit_of(conditions: Conditions) -> int | None:
    """Return how much may be reserved at most; None where nothing limits it."""
    limits = (conditions.capacity_bytes, conditions.allowed_bytes)
    return min((b for b in limits if b is not None), default=None)


def _failed_before() -> Outlook:
    return Outlook(
        OutlookState.FAILS,
        OutlookBasis.COMPLETE,
        fails_after_steps=0,
        reason="a request of the recorded part fails",
    )


def _close(known: Continuation, state: OutlookState) -> str:
    """Return why an outcome is not certain."""
    if state is OutlookState.FAILS:
        return (
            "it fails if the steps to come are as expected, but not if they ask for a little less"
        )
    if known.varies:
        return "batches differ, and a larger one would not fit"
    return "it fits if the steps to come are as expected, but not if they ask for a little more"
