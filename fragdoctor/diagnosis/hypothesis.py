"""What a failed is read as, and the sentences with their two numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.units import format_share, format_size


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One cause that the figures support, with its sentence."""

    cause: Cause
    confidence: Confidence
    summary: str
    decider: str = ""


def some_fragmentation() -> Hypothesis:
    """Return fragmentation as a secondary hypothesis: it took part, it did not decide."""
    return Hypothesis(Cause.FRAGMENTATION, Confidence.POSSIBLE, "")


def fragmentation(r: FailedRequest, where: str) -> Hypothesis:
    """Return the hypothesis that holes were in the way; ``where`` ends its sentence."""
    largest = r.largest_free_block_bytes
    proven = largest is not None and largest < (r.block_bytes or r.requested_bytes)
    holes = (
        f"{format_size(r.unallocated_bytes)} of it in holes of at most {format_size(largest)} that "
        "live blocks pin"
        if proven
        else f"{format_size(r.unallocated_bytes)} of it cached by PyTorch but unallocated"
    )
    free = (r.cache_bytes or 0) + (r.free_bytes or 0)
    outside = f", {format_size(r.free_bytes)} on the device" if r.free_bytes is not None else ""
    return Hypothesis(
        Cause.FRAGMENTATION,
        Confidence.PROVEN if proven else Confidence.LIKELY,
        f"The {r.request_text} failed although {format_size(free)} were "
        f"free: {holes}{outside}{', ' + where if where else ''}.",
        "" if proven else "A snapshot taken at the OOM shows the holes and who pins them.",
    )


def simply_full(r: FailedRequest) -> Hypothesis:
    """Return the hypothesis that live memory fills the device."""
    if r.has_real_holes:
        return Hypothesis(
            Cause.CAPACITY,
            Confidence.LIKELY,
            f"{live_and_request(r)} leave {format_size(r.margin_bytes)} of the "
            f"{format_size(r.available_bytes)} that PyTorch could have: packed perfectly it would "
            "just fit, so the device is as good as full.",
        )
    return Hypothesis(
        Cause.CAPACITY,
        Confidence.LIKELY,
        f"{format_size(r.live_bytes)} of {format_size(r.available_bytes)} are live "
        f"({format_share(r.live_bytes or 0, r.available_bytes or 0)}): the device is full, and the "
        f"{r.request_text} is only the last straw.",
    )


def undecided(r: FailedRequest) -> Hypothesis:
    """Return the hypothesis for figures that fit no row."""
    return Hypothesis(
        Cause.UNKNOWN,
        Confidence.POSSIBLE,
        f"A {r.request_text} failed; the figures do not say why{_usage(r)}.",
        "A snapshot, or memory_stats() before the failing step, would decide.",
    )


def _usage(r: FailedRequest) -> str:
    if r.reserved_bytes is None or r.total_bytes is None:
        return ""
    return f": {format_size(r.reserved_bytes)} of {format_size(r.total_bytes)} are reserved"


def although_free(r: FailedRequest) -> str:
    """Return the clause about driver-free memory that covers the request, or ""."""
    if not r.is_covered_by_free:
        return ""
    return f", although {format_size(r.free_bytes)} are free on the device"


def live_and_request(r: FailedRequest) -> str:
    """Return the subject of a sentence about live memory and the request."""
    return f"Live {format_size(r.live_bytes)} and the {r.request_text}"
