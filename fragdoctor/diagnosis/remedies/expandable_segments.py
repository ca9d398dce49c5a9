"""``expandable_segments:True``: the first setting to try against fragmentation, and only that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.gates import is_too_new, version_caveats
from fragdoctor.diagnosis.remedies.plan import (
    CURES,
    HELPS,
    MAY_HELP,
    Plan,
    Proposal,
    propose,
    reject,
)
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.fragmentation.holes import find_holes
from fragdoctor.units import format_size

CODE = "expandable-segments"
KEY = "expandable_segments"
TITLE = "Use expandable segments"
CONF = "expandable_segments:True"

MOSTLY: Final = 0.9
"""Nine tenths of the free bytes: the rest would not make the difference."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for fragmentation; say why not where people would try it all the same."""
    if not plan.is_allocator_case or plan.cause is Cause.HEALTHY:
        return
    setting = plan.variable(plan.with_present(CONF))
    needs_upgrade = is_too_new(plan, KEY)
    reason = _against(plan)
    if reason:
        yield reject(CODE, TITLE, confidence=Confidence.PROVEN, why=reason, setting=setting)
        return
    reason = _small_holes(plan)
    if reason:
        yield reject(CODE, TITLE, confidence=Confidence.LIKELY, why=reason, setting=setting)
        return
    is_main = plan.cause is Cause.FRAGMENTATION
    if not is_main and not (plan.cause is Cause.CAPACITY and plan.supports(Cause.FRAGMENTATION)):
        return
    r = plan.refusal
    holes = (
        f"{format_size(r.unallocated_bytes)} are free in holes that the request of "
        f"{format_size(r.requested_bytes)} does not fit"
        if r is not None
        else "Free cache is pinned in segments that live blocks keep"
    )
    yield propose(
        CODE,
        f"Upgrade to PyTorch 2.1 or later and {TITLE[0].lower()}{TITLE[1:]}"
        if needs_upgrade
        else TITLE,
        # Without a trace nobody knows the holes; it is still the cheapest thing to try.
        weight=_weight(is_main=is_main, needs_upgrade=needs_upgrade),
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        setting=setting,
        why=f"{holes}; expandable segments grow page by page instead of making new segments.",
        cost="One environment variable; mapping pages is a little slower at first touch.",
        caveats=_caveats(plan),
        verify="reserved - allocated at the peak shrinks; num_alloc_retries stays 0.",
    )


def _weight(*, is_main: bool, needs_upgrade: bool) -> int:
    if not is_main:
        return MAY_HELP
    return HELPS if needs_upgrade else CURES - 5


def _against(plan: Plan) -> str:
    if plan.expandable_is_on:
        return "It is on already."
    return _beyond_holes(plan)


def _beyond_holes(plan: Plan) -> str:
    r = plan.refusal
    if r is None or r.margin_bytes is None or plan.supports(Cause.FRAGMENTATION):
        return ""
    if r.is_beyond_settings:
        return (
            f"Even without any hole {format_size(-r.margin_bytes)} would be missing: live memory "
            "and the request exceed what PyTorch could have."
        )
    return ""


def _small_holes(plan: Plan) -> str:
    """Freed holes below a page between live blocks stay holes under expandable segments.

    Tails that were never used do not: the next block would follow directly.
    """
    r, snapshot = plan.refusal, plan.context.snapshot
    if r is None or snapshot is None or plan.context.device is None:
        return ""
    if plan.cause is not Cause.FRAGMENTATION:
        return ""
    holes = find_holes(snapshot, plan.context.device)
    if not holes.free_bytes or holes.used_before_bytes < MOSTLY * holes.free_bytes:
        return ""
    if holes.largest_used_before_bytes >= r.page_bytes:
        return ""
    return (
        f"{format_size(holes.used_before_bytes)} of free cache are freed blocks of at most "
        f"{format_size(holes.largest_used_before_bytes)} between live ones, less than a page of "
        f"{format_size(r.page_bytes)}: the live ones would pin pages just as they pin segments."
    )


def _caveats(plan: Plan) -> tuple[str, ...]:
    caveats = [*version_caveats(plan, KEY), "Not on Windows."]
    if plan.backend == "rocm":
        caveats.append("On ROCm it does nothing before builds of the ROCm 7 era.")
    if plan.settings is not None and plan.settings.max_split_bytes is not None:
        caveats.append(
            "Remove max_split_size_mb: together they can make reserved memory grow without bound."
        )
    if plan.settings is not None and plan.settings.garbage_collection_threshold:
        caveats.append("garbage_collection_threshold does not act on expandable segments.")
    caveats.append("Older versions cannot share its tensors between processes (CUDA IPC).")
    return tuple(caveats)
