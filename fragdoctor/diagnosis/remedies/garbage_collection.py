"""``garbage_collection_threshold``: works only under a memory fraction."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.gates import is_too_new, version_caveats
from fragdoctor.diagnosis.remedies.plan import MAY_HELP, Plan, Proposal, propose, reject
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence

CODE = "garbage-collection-threshold"
KEY = "garbage_collection_threshold"
TITLE = "Return old unused segments early"


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it near a limit; say that it does nothing without one."""
    if not plan.is_allocator_case or not plan.supports(Cause.FRAGMENTATION, Cause.MEMORY_LIMIT):
        return
    is_set = plan.settings is not None and plan.settings.garbage_collection_threshold > 0
    if not plan.has_fraction:
        yield reject(
            CODE,
            TITLE,
            confidence=Confidence.PROVEN,
            setting=plan.variable(f"{KEY}:0.8"),
            why="Without a memory fraction below 1 the allocator never looks at it"
            f"{': it is set here and had no effect' if is_set else ''}.",
        )
        return
    if is_set or plan.expandable_is_on or is_too_new(plan, KEY):
        return
    if plan.cause is not Cause.FRAGMENTATION:
        return
    yield propose(
        CODE,
        TITLE,
        weight=MAY_HELP - 10,
        confidence=Confidence.POSSIBLE,
        setting=plan.variable(plan.with_present(f"{KEY}:0.8")),
        why="A memory fraction is set: above four fifths of it, whole free segments that were not "
        "used for long are returned before the limit is reached.",
        cost="Returned segments must be allocated anew.",
        caveats=(
            "It returns whole free segments only; pinned ones stay.",
            *version_caveats(plan, KEY),
        ),
        verify="Reserved memory stays below the threshold; num_alloc_retries falls.",
    )
