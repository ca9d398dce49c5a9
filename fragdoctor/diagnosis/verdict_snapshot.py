"""The verdict on a snapshot, alone or with a message and statistics beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.analysis.result import DeviceAnalysis, KeptMemory, KeptPattern
from fragdoctor.diagnosis.decision import Hypothesis, decide
from fragdoctor.diagnosis.run_state import backed_off
from fragdoctor.diagnosis.verdict_message import verdict_of
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import ACTIVE, LIVE_AT_FAILURE, Confidence, Evidence
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.capacity.optimizer_state import fails_in_optimizer
from fragdoctor.rules.capacity.transient_peak import find_transient
from fragdoctor.rules.failed_request import FULL_SLACK_SHARE, FailedRequest
from fragdoctor.rules.growth.growing_line import gathered_text, kept_text, maker_text
from fragdoctor.rules.request_sources import is_one_of_several
from fragdoctor.rules.rule import Context
from fragdoctor.units import GIB, format_count, format_size, plural

SMALLEST_GPU_BYTES: Final = 2 * GIB
"""No GPU that a PyTorch of today supports has less memory: what is missing to it is held outside.
A snapshot does not record the size of the device, so that this stays a hint."""

LEAKS_INTO: Final = (Cause.CAPACITY, Cause.MEMORY_LIMIT, Cause.FRAGMENTATION)
"""Readings that a leak brings about sooner or later."""

SURE_STEPS: Final = 6
"""Steps of growth after which it is no window that fills; whatever failed first, it goes on."""

RESUMED_REQUESTS: Final = 100
"""Requests after a caught failure that show a program at work, not one that reports and ends."""

RESUMED_SHARE: Final = 0.5
"""Of the memory that was live before the failure; a program that resumes needs about as much."""


def verdict_on_snapshot(context: Context) -> Verdict:
    """Return the verdict on one device of a snapshot."""
    analysis = context.analysis
    assert analysis is not None  # noqa: S101 - the caller chose this verdict for it
    failed = context.failed_request
    if failed is None:
        hypotheses = _without_failure(context, analysis)
        return verdict_of(hypotheses, context.device, _evidence(analysis, None))
    if failed.source == "user" and _would_be_served(failed):
        return verdict_of([_served(failed)], context.device, _evidence(analysis, failed))
    hypotheses = decide(failed)
    hypotheses = explain_live_memory(context, analysis, failed, hypotheses)
    if failed.is_caught:
        hypotheses = _caught(context, analysis, hypotheses)
    hypotheses = _unknown_device(failed, hypotheses)
    return verdict_of(hypotheses, context.device, _evidence(analysis, failed))


def explain_live_memory(
    context: Context, analysis: DeviceAnalysis, failed: FailedRequest, hypotheses: list[Hypothesis]
) -> list[Hypothesis]:
    """Ask, for a capacity or limit verdict, what made live memory so large.

    Growth comes first where it was seen long enough, or took more than lies free in the cache: what
    never ends explains any lack, and holes between what leaked are its consequence. Where free
    memory was enough and all that was kept is less than the request, the holes are the matter.
    """
    first = hypotheses[0]
    kept = analysis.kept
    if kept is not None:
        is_sure = kept.n_steps >= SURE_STEPS or kept.survivor_bytes >= (failed.cache_bytes or 0)
        is_small = kept.survivor_bytes < failed.requested_bytes
        if first.cause is Cause.FRAGMENTATION and is_small:
            is_sure = False
        if first.cause in LEAKS_INTO and is_sure:
            leak = _leak(context, kept, f", until the {failed.request_text} failed")
            return [leak, *hypotheses]
        return [*hypotheses, _leak(context, kept, "")]
    if analysis.gathered is not None and first.cause in LEAKS_INTO:
        peak = _gathered(context, analysis.gathered, failed)
        is_first = first.cause is Cause.CAPACITY and not _alone_too_large(failed)
        return [peak, *hypotheses] if is_first else [*hypotheses, peak]
    if first.cause is not Cause.CAPACITY:
        return hypotheses
    spike = find_transient(analysis)
    if spike is not None and not _alone_too_large(failed):
        text = (
            f"Live memory rose to {format_size(spike.peak_bytes)} for the failing step, "
            f"against {format_size(spike.usual_bytes)} at the peaks before; the "
            f"{failed.request_text} no longer fit."
        )
        return [Hypothesis(Cause.TRANSIENT_PEAK, Confidence.LIKELY, text), *hypotheses]
    if fails_in_optimizer(context, analysis):
        hypotheses = [*hypotheses, Hypothesis(Cause.TRANSIENT_PEAK, Confidence.POSSIBLE, "")]
    return hypotheses


def _unknown_device(failed: FailedRequest, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Say what a snapshot alone cannot: whether others hold the rest of the device."""
    available = failed.available_bytes
    if (
        hypotheses[0].cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK)
        or failed.total_bytes is not None
        or available is None
    ):
        return hypotheses
    decider = (
        f"Compare {format_size(available)} with the size of the GPU (or give the OOM message or "
        "--capacity): the difference is held outside this PyTorch."
    )
    if available >= SMALLEST_GPU_BYTES:
        return [replace(hypotheses[0], decider=decider), *hypotheses[1:]]
    first = replace(
        hypotheses[0],
        decider="Give the OOM message or the size of the GPU (--capacity): if it has more, others "
        "hold the rest.",
    )
    other = Hypothesis(Cause.OTHER_PROCESS, Confidence.POSSIBLE, "")
    return [
        first,
        *hypotheses[1:],
        other,
        Hypothesis(Cause.NON_PYTORCH_MEMORY, Confidence.POSSIBLE, ""),
    ]


def _caught(
    context: Context, analysis: DeviceAnalysis, hypotheses: list[Hypothesis]
) -> list[Hypothesis]:
    """Say that the program caught the failure and went on; healthy, if it then did its work."""
    first = hypotheses[0]
    n_after = _requests_after_failure(analysis)
    bundle = context.case.bundle
    ended_well = bundle is not None and bundle.reason == "exit" and not bundle.exception
    has_resumed = n_after >= RESUMED_REQUESTS or ended_well
    has_resumed |= bundle is None and is_one_of_several(analysis)
    if not has_resumed or first.cause is Cause.LEAK:
        first = replace(first, summary=f"{first.summary} The program caught the error and went on.")
        return [first, *hypotheses[1:], Hypothesis(Cause.HEALTHY, Confidence.POSSIBLE, "")]
    n = len(analysis.ooms)
    sizes = sorted(oom.rounded_bytes for oom in analysis.ooms)
    tried = (
        format_size(sizes[-1])
        if sizes[0] == sizes[-1]
        else (f"{format_size(sizes[0])} to {format_size(sizes[-1])}")
    )
    errors = "an out-of-memory error" if n == 1 else f"{n} out-of-memory errors"
    served = f": {format_count(n_after)} requests were served since, and none failed"
    summary = (
        f"The program caught {errors} ({'a request' if n == 1 else 'requests'} of {tried}) and "
        f"went on{', to its end' if ended_well else ''}{served if n_after else ''}"
        f"{'; it let go of its memory after the last' if not (n_after or ended_well) else ''}."
    )
    found = backed_off(analysis)
    if found is not None:
        where = context.user_line(found.stack)
        summary += (
            f" {'The line that failed' if where is None else where} asked for "
            f"{format_size(found.failed_bytes)} in vain and was served with "
            f"{format_size(found.served_bytes)} from then on, {format_size(found.peak_bytes)} live "
            "at the most."
        )
    healthy = Hypothesis(Cause.HEALTHY, Confidence.LIKELY, summary)
    return [healthy, *(replace(h, confidence=Confidence.POSSIBLE) for h in hypotheses)]


def _requests_after_failure(analysis: DeviceAnalysis) -> int:
    """Return how many requests were served after the last failure, 0 if they need far less."""
    trace, timeline = analysis.trace, analysis.timeline
    if timeline is None:
        return 0
    row = analysis.ooms[-1].row - trace.first_row
    active = timeline.active_bytes
    before, after = int(active[: row + 1].max()), int(active[row + 1 :].max(initial=0))
    n_after = int(np.count_nonzero(trace.events.action[row + 1 :] == Action.ALLOC))
    return n_after if after >= RESUMED_SHARE * before else 0


def _without_failure(context: Context, analysis: DeviceAnalysis) -> list[Hypothesis]:
    """Judge a snapshot in which no request failed: growth, or healthy with what is worth saying."""
    if analysis.kept is not None:
        return [
            _leak(context, analysis.kept, "; no request failed yet"),
            Hypothesis(Cause.HEALTHY, Confidence.POSSIBLE, ""),
        ]
    space = analysis.free_space
    if not analysis.capture.has_trace:
        held = (
            f"{format_size(analysis.allocated_bytes)} of {format_size(analysis.reserved_bytes)} "
            "reserved are allocated, and nothing points to a problem"
            if analysis.reserved_bytes
            else "The file holds no memory"
        )
        summary = f"{held}. It has no history, so earlier failures and growth cannot be seen."
        return _without_history(analysis, summary)
    retries = context.retries
    n_retries = retries[0] if retries else 0
    peak = analysis.timeline.peak_allocated_bytes if analysis.timeline else None
    cache = (
        f"; {format_size(space.free_cached_bytes)} of {format_size(analysis.reserved_bytes)} "
        "reserved are free cache"
    )
    if space.releasable_bytes:
        cache += f", of which {format_size(space.releasable_bytes)} go back to the device on demand"
    summary = (
        f"No request failed{cache if space.free_cached_bytes else ''} "
        f"(peak allocated {format_size(peak)})."
    )
    hypotheses = [Hypothesis(Cause.HEALTHY, Confidence.LIKELY, summary)]
    about = "about " if retries and retries[1] == "trace" else ""
    if n_retries:
        hypotheses[0] = replace(
            hypotheses[0],
            summary=f"No request failed, but {about}{format_count(n_retries)} "
            f"{'retry' if n_retries == 1 else 'retries'} had to flush the cache first: the run is "
            f"near its limit, with {format_size(space.pinned_free_bytes)} of free cache pinned.",
        )
        hypotheses.append(Hypothesis(Cause.FRAGMENTATION, Confidence.POSSIBLE, ""))
    return hypotheses


def _without_history(analysis: DeviceAnalysis, summary: str) -> list[Hypothesis]:
    """Judge a state without history: a full cache is all that it can show of a failure."""
    healthy = Hypothesis(Cause.HEALTHY, Confidence.POSSIBLE, summary)
    free = analysis.free_space.free_cached_bytes
    if not analysis.reserved_bytes or free >= FULL_SLACK_SHARE * analysis.reserved_bytes:
        return [healthy]
    decider = (
        "If it was taken at an out-of-memory error, the device was simply full of live memory: "
        "give the message."
    )
    return [replace(healthy, decider=decider), Hypothesis(Cause.CAPACITY, Confidence.POSSIBLE, "")]


def _leak(context: Context, kept: KeptMemory, ending: str) -> Hypothesis:
    if kept.pattern is KeptPattern.BUFFER:
        return Hypothesis(
            Cause.LEAK,
            Confidence.LIKELY,
            f"A buffer made at {maker_text(context, kept)} grows in every step of the training by "
            f"{format_size(kept.slope_bytes)}, to {format_size(kept.survivor_bytes)} after "
            f"{plural(kept.n_steps, 'step')}{ending}.",
            "Check whether anything bounds its length.",
        )
    return Hypothesis(
        Cause.LEAK,
        Confidence.LIKELY,
        f"{kept_text(context, kept)}{ending}.",
        "Check whether this memory is kept on purpose: look for a list, a cache or a loss that "
        "keeps its graph.",
    )


def _gathered(context: Context, kept: KeptMemory, failed: FailedRequest) -> Hypothesis:
    return Hypothesis(
        Cause.TRANSIENT_PEAK,
        Confidence.LIKELY,
        f"{gathered_text(context, kept)}; the {failed.request_text} no longer fit.",
        "If it is still there after the evaluation has ended, something leaks it.",
    )


def _would_be_served(failed: FailedRequest) -> bool:
    largest = failed.largest_free_block_bytes or 0
    return failed.is_covered_by_free or largest >= failed.requested_bytes


def _served(failed: FailedRequest) -> Hypothesis:
    return Hypothesis(
        Cause.HEALTHY,
        Confidence.LIKELY,
        f"A {failed.request_text} would be served: {format_size(failed.free_bytes)} of "
        f"the device would be free after a flush, and the largest cached block has "
        f"{format_size(failed.largest_free_block_bytes)}.",
    )


def _alone_too_large(failed: FailedRequest) -> bool:
    available = failed.available_bytes
    return available is not None and failed.requested_bytes > available


def _evidence(analysis: DeviceAnalysis, failed: FailedRequest | None) -> tuple[Evidence, ...]:
    source = "snapshot"
    items = [
        Evidence("reserved", analysis.reserved_bytes, "bytes", source),
        Evidence(ACTIVE, analysis.active_bytes, "bytes", source),
        Evidence("pinned free", analysis.free_space.pinned_free_bytes, "bytes", source),
    ]
    if failed is not None:
        source = failed.source
        is_block = failed.block_bytes in {None, failed.requested_bytes}
        for name, value in (
            ("requested", failed.requested_bytes if is_block else failed.block_bytes),
            ("segment for it", None if is_block else failed.requested_bytes),
            (LIVE_AT_FAILURE, failed.live_bytes),
            ("device free", failed.free_bytes),
            ("available to PyTorch", failed.available_bytes),
            ("device total", failed.total_bytes),
        ):
            if value is not None:
                items.append(Evidence(name, value, "bytes", source))
    return tuple(items)
