"""The state of the run at the end of the input."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis.decision import SLIM_MARGIN_SHARE
from fragdoctor.model.arrays import is_among
from fragdoctor.model.case import NO_FAILURE
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.rule import Context


def run_state(context: Context, cause: Cause) -> RunState:
    """Return the state of the run on the verdict's device, given the verdict's cause."""
    if context.analysis is not None and context.analysis.ooms and cause is Cause.HEALTHY:
        # The program caught its failures and resumed its work; a search for a batch that fits has
        # settled if it leaves enough to spare.
        return RunState.FITS if _has_settled(context, context.analysis) else RunState.NEAR_LIMIT
    analysis, message = context.analysis, context.message
    is_told = message is not None and message.sub_kind != NO_FAILURE and not message.is_warning
    if is_told or context.n_ooms or (analysis is not None and analysis.ooms):
        return RunState.FAILED
    if analysis is not None and not analysis.capture.has_trace:
        is_empty = not analysis.reserved_bytes
        return RunState.EMPTY if is_empty else RunState.NO_HISTORY
    was_retried = message is not None and message.is_warning
    if was_retried or (context.retries and context.retries[0]):
        return RunState.NEAR_LIMIT
    line, capacity = analysis and analysis.timeline, context.total_bytes
    if line and capacity and capacity - line.peak_active_bytes < SLIM_MARGIN_SHARE * capacity:
        return RunState.NEAR_LIMIT
    return RunState.FITS if analysis is not None or context.n_ooms == 0 else RunState.UNKNOWN


class BackOff(NamedTuple):
    """What the line of the last failure was served with afterward, where it asked for less.

    Attributes:
        served_bytes: size of its largest request since.
        peak_bytes: peak of live memory since.
    """

    served_bytes: int
    peak_bytes: int


def backed_off(analysis: DeviceAnalysis) -> BackOff | None:
    """Return how a program recovered from its last failure; None if it did not ask for less."""
    if not analysis.ooms or analysis.ooms[-1].stack < 0 or analysis.timeline is None:
        return None
    last, trace = analysis.ooms[-1], analysis.trace
    stacks, line = trace.stacks.python, trace.stacks.lines[last.stack]

    def to_user_line(i: int) -> bytes:
        """Callers of the user's line may differ: a search for a batch, then the run itself."""
        frames = stacks.frames[stacks.offsets[i] : stacks.offsets[i + 1]]
        return frames[: int(np.flatnonzero(frames == line)[0]) + 1].tobytes()

    same = [last.stack]
    if line >= 0:
        alike = np.flatnonzero(trace.stacks.lines == line).tolist()
        same = [i for i in alike if to_user_line(i) == to_user_line(last.stack)]
    since = slice(last.row + 1, None)
    events = trace.events
    is_request = is_among(events.stack[since], same) & (events.action[since] == Action.ALLOC)
    served = int(events.size_bytes[since][is_request].max(initial=0))
    if not 0 < served < last.rounded_bytes:
        return None
    return BackOff(served, int(analysis.timeline.active_bytes[since].max(initial=0)))


def _has_settled(context: Context, analysis: DeviceAnalysis) -> bool:
    found, failed = backed_off(analysis), context.failed_request
    capacity = context.total_bytes or (failed.available_bytes if failed is not None else None)
    if found is None or not capacity:
        return False
    return capacity - found.peak_bytes >= SLIM_MARGIN_SHARE * capacity
