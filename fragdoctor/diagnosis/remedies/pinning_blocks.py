"""Moving or freeing the few live blocks that pin free memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.rules.context import place
from fragdoctor.units import format_size, plural

MIN_SHARE: Final = 0.1
"""A group that pins less than a tenth of the pinned memory is not worth a change of the code."""

MAX_GROUPS: Final = 3
"""More places than these nobody changes at once."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to keep long-lived blocks out of the way, group by group."""
    analysis, r = plan.context.analysis, plan.refusal
    if analysis is None or r is None or plan.cause is not Cause.FRAGMENTATION:
        return
    pinned = analysis.free_space.pinned_free_bytes
    missing = r.requested_bytes - (r.free_bytes or 0)
    large = [p for p in analysis.pins if p.pinned_bytes >= MIN_SHARE * pinned > 0]
    for pin in large[:MAX_GROUPS]:
        line = plan.context.user_line(pin.stack)
        freed = pin.pinned_bytes + pin.block_bytes
        solves = freed >= missing
        proposal = propose(
            "move-pinning-blocks",
            f"Keep the blocks of {place(line)} out of the way",
            weight=HELPS + 5 if solves else MAY_HELP,
            confidence=Confidence.LIKELY if solves else Confidence.POSSIBLE,
            change="free them before the large request, allocate them before everything that is "
            "short-lived, or clone() what must stay after the step has freed its memory",
            why=f"{plural(pin.n_blocks, 'live block')} of {format_size(pin.block_bytes)} "
            f"{'keeps' if pin.n_blocks == 1 else 'keep'} {format_size(pin.pinned_bytes)} of free "
            f"memory in {plural(pin.n_segments, 'segment')} from being returned.",
            locations=plan.context.python_stack(pin.stack),
            predicted=Predicted(fits=True, method="arithmetic") if solves else None,
            cost="A change of the code; clone() needs both copies for a moment.",
            verify="These blocks no longer head the list of pins.",
            evidence=(Evidence("pinned", pin.pinned_bytes, "bytes", "snapshot"),),
            saves_bytes=pin.pinned_bytes,
        )
        yield replace(proposal, addresses=tuple(pin.addresses))
