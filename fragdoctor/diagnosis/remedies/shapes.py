"""Shapes that vary: bucket them, and begin with the largest."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose steady shapes for fragmentation, unless a trace shows that they are steady."""
    if not plan.is_allocator_case or plan.cause is not Cause.FRAGMENTATION:
        return
    sizes = plan.context.analysis.sizes if plan.context.analysis is not None else None
    if sizes is not None and not sizes.drifting:
        return
    seen = sizes is not None
    why = (
        f"{sizes.n_distinct_large:,} different sizes in {sizes.n_large_allocs:,} large requests: "
        "a freed block rarely fits the next one."
        if sizes is not None
        else "Shapes that vary from step to step are the usual source of fragmentation; the "
        "message does not tell whether they do."
    )
    yield propose(
        "bucket-shapes",
        "Pad or bucket variable shapes",
        weight=HELPS if seen else MAY_HELP + 3,
        confidence=Confidence.LIKELY if seen else Confidence.POSSIBLE,
        change="pad sequence lengths to multiples of 64 or 128, or batch samples of like length",
        why=why,
        cost="Padding computes on nothing; buckets change the order of samples.",
        verify="Fewer distinct sizes of large requests in a snapshot.",
    )
    yield propose(
        "largest-first",
        "Run the largest batch first",
        weight=MAY_HELP + 4 if seen else MAY_HELP - 5,
        confidence=Confidence.POSSIBLE,
        change="sort the first epoch by length, longest first, or run one dummy step of the "
        "largest shape at start",
        why="The cache then holds blocks that fit everything that follows, and a lack shows at "
        "once rather than after hours.",
        cost="One step at start.",
        verify="Reserved memory stays level after the first step.",
    )
