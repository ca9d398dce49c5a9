"""Long sweeps in one process: start afresh between trials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.plan import MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence

LONG_RUN_EVENTS: Final = 5_000
"""A trace this long, or cut, comes from a run in which history can have piled up."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose a restart where damage piles up over a long run."""
    if not plan.is_allocator_case or plan.cause not in (Cause.FRAGMENTATION, Cause.LEAK):
        return
    analysis = plan.context.analysis
    if analysis is not None:
        is_long = analysis.n_events >= LONG_RUN_EVENTS or analysis.capture.is_truncated
        if not is_long:
            return
    yield propose(
        "restart-trials",
        "Restart the process between trials of a sweep",
        weight=MAY_HELP - 15,
        confidence=Confidence.POSSIBLE,
        change="one process per trial (subprocess, or the sweep tool's own process isolation)",
        why="A new process starts with an empty cache; what piled up is gone.",
        cost="Start-up time per trial.",
        caveats=("A workaround: it postpones the failure within one trial, no more.",),
        verify="Later trials fail no sooner than the first.",
    )
