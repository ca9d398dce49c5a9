"""``expandable_segments:True``: the first setting to try against fragmentation, and only that."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.gates import is_too_new, version_caveats
from fragdoctor.diagnosis.remedies.plan import CURES, MAY_HELP, Plan, Proposal, propose, reject
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size

CODE = "expandable-segments"
KEY = "expandable_segments"
TITLE = "Use expandable segments"
CONF = "expandable_segments:True"


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for fragmentation; say why not where people would try it all the same."""
    if not plan.is_allocator_case:
        return
    setting = plan.variable(plan.with_present(CONF))
    reason = _against(plan)
    if reason:
        yield reject(CODE, TITLE, confidence=Confidence.PROVEN, why=reason, setting=setting)
        return
    is_main = plan.cause is Cause.FRAGMENTATION
    if not is_main and not plan.supports(Cause.FRAGMENTATION):
        return
    r = plan.refusal
    holes = (
        f"{format_size(r.unallocated_bytes)} are free in holes that the request of "
        f"{format_size(r.requested_bytes)} does not fit"
        if r is not None
        else "free cache is pinned in segments that live blocks keep"
    )
    yield propose(
        CODE,
        TITLE,
        # Without a trace nobody knows the holes; it is still the cheapest thing to try.
        weight=CURES - 5 if is_main else MAY_HELP,
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        setting=setting,
        why=f"{holes}; expandable segments grow page by page instead of making new segments.",
        cost="One environment variable; mapping pages is a little slower at first touch.",
        caveats=_caveats(plan),
        verify="reserved - allocated at the peak shrinks; num_alloc_retries stays 0.",
    )


def _against(plan: Plan) -> str:
    if plan.expandable_is_on:
        return "It is on already."
    if is_too_new(plan, KEY):
        return "The PyTorch of this input does not know it (2.1 or later does)."
    r = plan.refusal
    if r is None:
        return ""
    if plan.cause is Cause.FRAGMENTATION and r.largest_free_block_bytes is not None:
        if r.largest_free_block_bytes < r.page_bytes:
            return (
                f"The largest hole has {format_size(r.largest_free_block_bytes)}, less than one "
                f"page of {format_size(r.page_bytes)}: live neighbours pin the pages just as they "
                "pin segments."
            )
    if plan.supports(Cause.FRAGMENTATION):
        return ""
    if r.margin_bytes is not None and r.margin_bytes < 0:
        return (
            f"Even without any hole {format_size(-r.margin_bytes)} would be missing: live memory "
            "and the request exceed what PyTorch could have."
        )
    return ""


def _caveats(plan: Plan) -> tuple[str, ...]:
    caveats = [*version_caveats(plan, KEY), "Not on Windows."]
    if plan.backend == "rocm":
        caveats.append("On ROCm it does nothing before builds of the ROCm 7 era.")
    if plan.settings is not None and plan.settings.max_split_bytes is not None:
        caveats.append(
            "Remove max_split_size_mb: together they can make reserved memory grow without bound."
        )
    caveats.append("Older versions cannot share its tensors between processes (CUDA IPC).")
    return tuple(caveats)
