"""``max_split_size_mb``: keeps large blocks whole. A last resort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.gates import is_too_new, version_caveats
from fragdoctor.diagnosis.remedies.plan import MAY_HELP, Plan, Proposal, propose, reject
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.fragmentation.holes import find_holes
from fragdoctor.units import MIB, format_size

CODE = "max-split-size"
KEY = "max_split_size_mb"
TITLE = "Keep large blocks whole"

LARGEST_MB: Final = 128
SMALLEST_MB: Final = 32
"""The setting's own minimum is 20 or 21 MiB; just above it every second tensor counts as large."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for fragmentation by a large request, never beside expandable segments."""
    if not plan.is_allocator_case or plan.cause is not Cause.FRAGMENTATION:
        return
    megabytes = _limit_mb(plan)
    setting = plan.variable(plan.with_present(f"{KEY}:{megabytes}"))
    if plan.expandable_is_on:
        yield reject(
            CODE,
            TITLE,
            confidence=Confidence.PROVEN,
            setting=setting,
            why="Expandable segments are on: they split regardless of it, and both together can "
            "make reserved memory grow without bound.",
        )
        return
    if is_too_new(plan, KEY) or (plan.settings and plan.settings.max_split_bytes is not None):
        return
    r = plan.refusal
    if r is not None and r.requested_bytes < SMALLEST_MB * MIB:
        return
    too_small = _only_small_segments(plan, megabytes)
    if too_small:
        yield reject(CODE, TITLE, confidence=Confidence.LIKELY, setting=setting, why=too_small)
        return
    request = "" if r is None else f" such as the {format_size(r.requested_bytes)} here"
    yield propose(
        CODE,
        TITLE,
        weight=MAY_HELP + 5,
        confidence=Confidence.POSSIBLE,
        setting=setting,
        why=f"Blocks of {megabytes} MiB and more are then never split for smaller requests, so "
        f"that they stay whole for large ones{request} and can be returned.",
        cost="More calls of cudaMalloc and cudaFree, which are slow.",
        caveats=(
            "A last resort by PyTorch's own documentation; a smaller number acts stronger.",
            "Do not combine it with expandable_segments.",
            *version_caveats(plan, KEY),
        ),
        verify="inactive_split_bytes at the peak shrinks; watch num_device_alloc for thrashing.",
    )


def _only_small_segments(plan: Plan, megabytes: int) -> str:
    """Segments below the limit are split as before."""
    snapshot, device = plan.context.snapshot, plan.context.device
    if snapshot is None or device is None or plan.context.analysis is None:
        return ""
    holes = find_holes(snapshot, device)
    inside = holes.in_segments_from(megabytes * MIB)
    if inside * 2 >= holes.free_bytes:
        return ""
    part = f"Only {format_size(inside)}" if inside else "Nothing"
    return (
        f"{part} of {format_size(holes.free_bytes)} free cache lies in segments "
        f"of {megabytes} MiB or more; smaller ones are split as before."
    )


def _limit_mb(plan: Plan) -> int:
    """Return a limit well below the request: a power of two, at most a quarter of it."""
    if plan.refusal is None:
        return LARGEST_MB
    quarter = plan.refusal.requested_bytes // (4 * MIB)
    limit = SMALLEST_MB
    while limit * 2 <= quarter and limit < LARGEST_MB:
        limit *= 2
    return limit
