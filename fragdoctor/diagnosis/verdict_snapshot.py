"""The verdict on a snapshot, alone or with a message and statistics beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis, Growth
from fragdoctor.diagnosis.decision import decide
from fragdoctor.diagnosis.readings import Reading
from fragdoctor.diagnosis.verdict_message import verdict_of
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.rules.context import Context, place
from fragdoctor.rules.growth.significance import leading_growth, total_growth
from fragdoctor.rules.optimizer import fails_in_optimizer
from fragdoctor.rules.refusal import FULL_SLACK_SHARE, Refusal
from fragdoctor.rules.transients import find_transient
from fragdoctor.units import GIB, format_count, format_size, plural

SMALLEST_GPU_BYTES: Final = 2 * GIB
"""No GPU that a PyTorch of today supports has less memory: what is missing to it is held outside.
A snapshot does not record the size of the device, so that this stays a hint."""

LEAKS_INTO: Final = (Cause.CAPACITY, Cause.MEMORY_LIMIT, Cause.FRAGMENTATION)
"""Readings that a leak brings about sooner or later."""


def verdict_on_snapshot(context: Context) -> Verdict:
    """Return the verdict on one device of a snapshot."""
    analysis = context.analysis
    assert analysis is not None  # noqa: S101 - the caller chose this verdict for it
    refusal = context.refusal
    if refusal is None:
        readings = _without_failure(context, analysis)
        return verdict_of(readings, context.device, _evidence(analysis, None))
    if refusal.source == "user" and _would_be_served(refusal):
        return verdict_of([_served(refusal)], context.device, _evidence(analysis, refusal))
    readings = decide(refusal)
    readings = explain_live_memory(context, analysis, refusal, readings)
    readings = _unknown_device(refusal, readings)
    if refusal.is_caught:
        readings = _caught(readings)
    return verdict_of(readings, context.device, _evidence(analysis, refusal))


def explain_live_memory(
    context: Context, analysis: DeviceAnalysis, refusal: Refusal, readings: list[Reading]
) -> list[Reading]:
    """Ask, for a capacity or limit verdict, what made live memory so large.

    Growth comes first where it took more than lies free in the cache: what never ends explains
    any lack, and holes between what leaked are its consequence.
    """
    first = readings[0]
    growth = leading_growth(context, analysis)
    outgrows = total_growth(analysis) >= (refusal.cache_bytes or 0)
    if growth is not None and first.cause in LEAKS_INTO and outgrows:
        leak = _leak(context, growth, f"until the request of {_request(refusal)} failed")
        return [leak, *readings]
    if growth is not None:
        return [*readings, _leak(context, growth, "")]
    if first.cause is not Cause.CAPACITY:
        return readings
    spike = find_transient(context, analysis)
    if spike is not None and not _alone_too_large(refusal):
        text = (
            f"Live memory rose to {format_size(spike.peak_bytes)} for the failing step, "
            f"against {format_size(spike.usual_bytes)} at the peaks before; the request of "
            f"{_request(refusal)} no longer fit."
        )
        return [Reading(Cause.TRANSIENT_PEAK, Confidence.LIKELY, text), *readings]
    if fails_in_optimizer(context, analysis):
        readings = [*readings, Reading(Cause.TRANSIENT_PEAK, Confidence.POSSIBLE, "")]
    return readings


def _unknown_device(refusal: Refusal, readings: list[Reading]) -> list[Reading]:
    """Say what a snapshot alone cannot: whether somebody else holds the rest of the device."""
    available = refusal.available_bytes
    if (
        readings[0].cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK)
        or refusal.total_bytes is not None
        or available is None
    ):
        return readings
    decider = (
        f"Compare {format_size(available)} with the size of the GPU (or give the OOM message or "
        "--capacity): the difference is held outside this PyTorch."
    )
    if available >= SMALLEST_GPU_BYTES:
        return [replace(readings[0], decider=decider), *readings[1:]]
    first = replace(
        readings[0],
        summary=f"{readings[0].summary} If the GPU is larger than "
        f"{format_size(available)}, another process or library holds the rest.",
        decider=decider,
    )
    other = Reading(Cause.OTHER_PROCESS, Confidence.POSSIBLE, "")
    return [first, *readings[1:], other, Reading(Cause.NON_PYTORCH_MEMORY, Confidence.POSSIBLE, "")]


def _caught(readings: list[Reading]) -> list[Reading]:
    """Say that the program caught the failure and went on."""
    first = replace(
        readings[0],
        summary=f"{readings[0].summary} The program caught the error and went on.",
    )
    return [first, *readings[1:], Reading(Cause.HEALTHY, Confidence.POSSIBLE, "")]


def _without_failure(context: Context, analysis: DeviceAnalysis) -> list[Reading]:
    """Judge a snapshot in which no request failed: growth, or healthy with what is worth saying."""
    growth = leading_growth(context, analysis)
    if growth is not None:
        return [
            _leak(context, growth, "; no request failed yet"),
            Reading(Cause.HEALTHY, Confidence.POSSIBLE, ""),
        ]
    space = analysis.free_space
    if not analysis.capture.has_trace:
        summary = (
            f"{format_size(analysis.allocated_bytes)} of {format_size(analysis.reserved_bytes)} "
            "reserved are allocated and nothing points to a problem; the file has no history, so "
            "that earlier failures and growth cannot be seen."
        )
        return _without_history(analysis, summary)
    retries = context.retries
    n_retries = retries[0] if retries else 0
    peak = analysis.timeline.peak_allocated_bytes if analysis.timeline else None
    summary = (
        f"No request failed; {format_size(space.free_cached_bytes)} of "
        f"{format_size(analysis.reserved_bytes)} reserved are free cache, of which "
        f"{format_size(space.releasable_bytes)} go back to the device on demand "
        f"(peak allocated {format_size(peak)})."
    )
    readings = [Reading(Cause.HEALTHY, Confidence.LIKELY, summary)]
    about = "about " if retries and retries[1] == "trace" else ""
    if n_retries:
        readings[0] = replace(
            readings[0],
            summary=f"No request failed, but {about}{format_count(n_retries)} "
            f"{'retry' if n_retries == 1 else 'retries'} had to flush the cache first: the run is "
            f"near its limit, with {format_size(space.pinned_free_bytes)} of free cache pinned.",
        )
        readings.append(Reading(Cause.FRAGMENTATION, Confidence.POSSIBLE, ""))
    return readings


def _without_history(analysis: DeviceAnalysis, summary: str) -> list[Reading]:
    """Without events nobody knows whether a request failed; a full cache says what it then was."""
    healthy = Reading(Cause.HEALTHY, Confidence.POSSIBLE, summary)
    free = analysis.free_space.free_cached_bytes
    if not analysis.reserved_bytes or free >= FULL_SLACK_SHARE * analysis.reserved_bytes:
        return [healthy]
    decider = (
        "If it was taken at an out-of-memory error, the device was simply full of live memory: "
        "give the message."
    )
    return [replace(healthy, decider=decider), Reading(Cause.CAPACITY, Confidence.POSSIBLE, "")]


def _leak(context: Context, growth: Growth, ending: str) -> Reading:
    where = place(context.frame(growth.frame) or context.user_line(growth.stack))
    verb = f" {ending}" if ending and not ending.startswith(";") else ending
    return Reading(
        Cause.LEAK,
        Confidence.LIKELY,
        f"Memory from {where} grows by {format_size(growth.slope_bytes)} a step and is not freed: "
        f"{plural(growth.n_survivors, 'survivor')} "
        f"{'holds' if growth.n_survivors == 1 else 'hold'} {format_size(growth.survivor_bytes)}"
        f"{verb}.",
        "Check whether this memory is kept on purpose: look for a list, a cache or a loss that "
        "keeps its graph.",
    )


def _would_be_served(refusal: Refusal) -> bool:
    largest = refusal.largest_free_block_bytes or 0
    return refusal.is_covered_by_free or largest >= refusal.requested_bytes


def _served(refusal: Refusal) -> Reading:
    return Reading(
        Cause.HEALTHY,
        Confidence.LIKELY,
        f"A request of {_request(refusal)} would be served: {format_size(refusal.free_bytes)} of "
        f"the device would be free after a flush, and the largest cached block has "
        f"{format_size(refusal.largest_free_block_bytes)}.",
    )


def _alone_too_large(refusal: Refusal) -> bool:
    available = refusal.available_bytes
    return available is not None and refusal.requested_bytes > available


def _request(refusal: Refusal) -> str:
    return format_size(refusal.requested_bytes)


def _evidence(analysis: DeviceAnalysis, refusal: Refusal | None) -> tuple[Evidence, ...]:
    source = "snapshot"
    items = [
        Evidence("reserved", analysis.reserved_bytes, "bytes", source),
        Evidence("active", analysis.active_bytes, "bytes", source),
        Evidence("pinned free", analysis.free_space.pinned_free_bytes, "bytes", source),
    ]
    if refusal is not None:
        source = refusal.source
        for name, value in (
            ("requested", refusal.requested_bytes),
            ("live at the failure", refusal.live_bytes),
            ("device free", refusal.free_bytes),
            ("available to PyTorch", refusal.available_bytes),
            ("device total", refusal.total_bytes),
        ):
            if value is not None:
                items.append(Evidence(name, value, "bytes", source))
    return tuple(items)
