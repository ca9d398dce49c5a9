"""The one measurement that would settle what is open."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import ASKS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence

CLOSED = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.SIZE_BUG, Cause.HEALTHY)


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose a snapshot where none was given and the case is PyTorch's."""
    if plan.context.analysis is not None or plan.cause in CLOSED or not plan.is_allocator_case:
        return
    if plan.verdict.confidence is Confidence.PROVEN and not plan.verdict.decider:
        reason = "A snapshot shows which lines hold the memory."
    else:
        reason = plan.verdict.decider or "A snapshot shows which lines hold and pin the memory."
    yield propose(
        "record-snapshot",
        "Record a memory snapshot at the failure",
        weight=ASKS,
        confidence=Confidence.LIKELY,
        change="fragdoctor run train.py; or, where it cannot be installed, "
        "torch.cuda.memory._record_memory_history(max_entries=100000) at start and "
        "torch.cuda.memory._dump_snapshot('oom.pickle') on the error",
        why=reason,
        cost="A few microseconds per allocation.",
        verify="It diagnoses by itself; otherwise: fragdoctor analyze oom.pickle",
    )
