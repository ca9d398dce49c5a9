"""The state of the run at the end of the input."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.case import NO_FAILURE
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.rules.rule import Context

LITTLE_TO_SPARE: Final = 0.05
"""A peak of live memory that leaves less than this share of the capacity is near the limit."""


def run_state(context: Context, cause: Cause) -> RunState:
    """Return the state of the run on the verdict's device, given the verdict's cause."""
    n_ooms = context.stats[-1].n_ooms if context.stats else None
    if context.analysis is not None and context.analysis.ooms and cause is Cause.HEALTHY:
        return RunState.NEAR_LIMIT  # the program caught its failures and resumed its work
    analysis, message = context.analysis, context.message
    is_told = message is not None and message.sub_kind != NO_FAILURE and not message.is_warning
    if is_told or n_ooms or (analysis is not None and analysis.ooms):
        return RunState.FAILED
    if analysis is not None and not analysis.capture.has_trace:
        is_empty = not analysis.reserved_bytes
        return RunState.EMPTY if is_empty else RunState.NO_HISTORY
    was_retried = message is not None and message.is_warning
    if was_retried or (context.retries and context.retries[0]):
        return RunState.NEAR_LIMIT
    line, capacity = analysis and analysis.timeline, context.total_bytes
    if line and capacity and capacity - line.peak_active_bytes < LITTLE_TO_SPARE * capacity:
        return RunState.NEAR_LIMIT
    return RunState.FITS if analysis is not None or n_ooms == 0 else RunState.UNKNOWN
