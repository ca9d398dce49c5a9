"""A size that went wrong."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to look at the shape at the failing line."""
    if not plan.supports(Cause.SIZE_BUG):
        return
    is_main = plan.cause is Cause.SIZE_BUG
    yield propose(
        "fix-shape",
        "Print the shape at the failing line and correct it",
        weight=CURES if is_main else MAY_HELP,
        confidence=Confidence.PROVEN if is_main else Confidence.POSSIBLE,
        change="print(x.shape, x.dtype) before the call; check negative or NaN-derived sizes, "
        "num_classes of one_hot, and a checkpoint that is damaged",
        why=plan.verdict.summary,
        cost="None.",
        verify="The printed size is what was meant.",
    )
