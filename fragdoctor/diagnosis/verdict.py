"""Which verdict answers which case."""

from __future__ import annotations

from typing import Final

from fragdoctor.diagnosis.decision import decide
from fragdoctor.diagnosis.verdict_message import (
    evidence_of_message,
    verdict_of,
    verdict_on_message,
    verdict_without_messages,
)
from fragdoctor.diagnosis.verdict_snapshot import explain_live_memory, verdict_on_snapshot
from fragdoctor.diagnosis.verdict_stats import verdict_on_stats
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence
from fragdoctor.model.oom import NO_FAILURE
from fragdoctor.rules.context import Context

NOT_A_SHORTAGE: Final = ("negative", "shared-memory")
"""Messages that say nothing about memory; a snapshot beside them is judged by itself."""


def find_verdict(context: Context) -> Verdict:
    """Return the verdict on a device from the input that says most about it.

    A snapshot with a failure, or with nothing to contradict it, comes first; a message about a
    failure that the snapshot does not hold comes before the snapshot's later, calmer state.
    """
    analysis, message = context.analysis, context.message
    is_silent = message is None or message.kind in NOT_A_SHORTAGE
    if analysis is not None and (analysis.ooms or is_silent):
        return verdict_on_snapshot(context)
    if message is not None and message.sub_kind != NO_FAILURE:
        if context.refusal is not None and not message.sub_kind:
            readings = decide(context.refusal)
            if analysis is not None:
                readings = explain_live_memory(context, analysis, context.refusal, readings)
            return verdict_of(readings, context.device, evidence_of_message(message))
        return verdict_on_message(message)
    if context.stats:
        return verdict_on_stats(context)
    if context.case.oom is not None:
        return verdict_without_messages(context.case.oom)
    return Verdict(Cause.UNKNOWN, Confidence.POSSIBLE, "There is no input to judge.")
