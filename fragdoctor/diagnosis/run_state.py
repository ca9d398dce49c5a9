"""The state of the run at the end of the input."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.case import NO_FAILURE
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.rule import Context

LITTLE_TO_SPARE: Final = 0.05
"""A peak of live memory that leaves less than this share of the capacity is near the limit."""


def run_state(context: Context, cause: Cause) -> RunState:
    """Return the state of the run on the verdict's device, given the verdict's cause."""
    n_ooms = context.stats[-1].n_ooms if context.stats else None
    if context.analysis is not None and context.analysis.ooms and cause is Cause.HEALTHY:
        # The program caught its failures and resumed its work; a search for a batch that fits has
        # settled if it leaves enough to spare.
        return RunState.FITS if _has_settled(context, context.analysis) else RunState.NEAR_LIMIT
    if _has_failure(context) or n_ooms:
        return RunState.FAILED
    analysis = context.analysis
    if analysis is not None and not analysis.capture.has_trace:
        is_empty = not analysis.reserved_bytes
        return RunState.EMPTY if is_empty else RunState.NO_HISTORY
    was_retried = context.message is not None and context.message.is_warning
    if was_retried or (context.retries and context.retries[0]) or _is_full(context, analysis):
        return RunState.NEAR_LIMIT
    return RunState.FITS if analysis is not None or n_ooms == 0 else RunState.UNKNOWN


class BackOff(Struct, frozen=True):
    """A line whose request failed and that asked for less from then on.

    Attributes:
        failed_bytes: size of its last request that failed.
        served_bytes: size of its largest request served since.
        peak_bytes: peak of live memory since.
        stack: stack of these requests.
    """

    failed_bytes: int
    served_bytes: int
    peak_bytes: int
    stack: int


def backed_off(analysis: DeviceAnalysis) -> BackOff | None:
    """Return how a program recovered from its last failure; None if it did not ask for less."""
    if not analysis.ooms or analysis.timeline is None:
        return None
    last, trace = analysis.ooms[-1], analysis.trace
    row = last.row - trace.first_row
    events = trace.events
    if last.stack < 0:
        return None
    same = np.isin(events.stack[row + 1 :], trace.stacks.same_to_user_line(last.stack))
    same &= events.action[row + 1 :] == Action.ALLOC
    served = int(events.size_bytes[row + 1 :][same].max(initial=0))
    if not 0 < served < last.rounded_bytes:
        return None
    peak = int(analysis.timeline.active_bytes[row + 1 :].max(initial=0))
    return BackOff(last.rounded_bytes, served, peak, last.stack)


def _has_settled(context: Context, analysis: DeviceAnalysis) -> bool:
    found, failed = backed_off(analysis), context.failed_request
    capacity = context.total_bytes or (failed.available_bytes if failed is not None else None)
    if found is None or not capacity:
        return False
    return capacity - found.peak_bytes >= LITTLE_TO_SPARE * capacity


def _has_failure(context: Context) -> bool:
    if context.analysis is not None and context.analysis.ooms:
        return True
    message = context.message
    return message is not None and message.sub_kind != NO_FAILURE and not message.is_warning


def _is_full(context: Context, analysis: DeviceAnalysis | None) -> bool:
    """Return whether the peak of live memory came close to what PyTorch could have."""
    capacity = context.total_bytes
    if analysis is None or analysis.timeline is None or not capacity:
        return False
    peak = analysis.timeline.peak_active_bytes
    return capacity - peak < LITTLE_TO_SPARE * capacity
