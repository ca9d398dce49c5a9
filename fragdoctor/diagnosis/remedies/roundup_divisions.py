"""``roundup_power2_divisions``: fewer distinct sizes, more reuse."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.gates import is_too_new, version_caveats
from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence

KEY = "roundup_power2_divisions"


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for fragmentation, strongly where sizes are seen to drift."""
    if not plan.is_allocator_case or plan.cause is not Cause.FRAGMENTATION:
        return
    if is_too_new(plan, KEY) or (plan.settings is not None and plan.settings.roundup_is_on):
        return
    sizes = plan.context.analysis.sizes if plan.context.analysis is not None else None
    if sizes is not None and not sizes.drifting:
        return
    drifting = sizes is not None
    why = "Sizes that differ a little become equal, so that a freed block fits the next request."
    if sizes is not None:
        why = (
            f"{sizes.n_distinct_large:,} different sizes in {sizes.n_large_allocs:,} large "
            f"requests; {why[0].lower()}{why[1:]}"
        )
    yield propose(
        "roundup-divisions",
        "Round sizes up to a quarter of a power of two",
        weight=HELPS - 10 if drifting else MAY_HELP - 5,
        confidence=Confidence.LIKELY if drifting else Confidence.POSSIBLE,
        setting=plan.variable(plan.with_present(f"{KEY}:4")),
        why=why,
        cost="Each block may be up to a quarter larger than asked.",
        caveats=(
            "Small sizes are not rounded (up to 512 times the divisions).",
            *version_caveats(plan, KEY),
        ),
        verify="Fewer distinct block sizes, fewer retries; allocated - requested grows.",
    )
