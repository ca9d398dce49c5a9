"""Which verdict answers which case."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.decision import Hypothesis, decide
from fragdoctor.diagnosis.verdict_message import (
    evidence_of_message,
    verdict_of,
    verdict_on_message,
    verdict_without_messages,
)
from fragdoctor.diagnosis.verdict_snapshot import explain_live_memory, verdict_on_snapshot
from fragdoctor.model.case import NO_FAILURE, MemoryStats
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.story import FAILURES, LogStory, Trend
from fragdoctor.rules.growth.accumulating_trials import growth_sentence
from fragdoctor.rules.growth.growing_statistics import climbs, count_rises, rise
from fragdoctor.rules.rule import Context
from fragdoctor.story.trends import accumulation, growing_cache
from fragdoctor.units import format_count, format_size

NOT_A_SHORTAGE: Final = ("negative", "shared-memory")
"""Messages that say nothing about memory; a snapshot beside them is judged by itself."""


def find_verdict(context: Context) -> Verdict:
    """Return the verdict on a device from the input that says most about it.

    A snapshot with a failure, or with nothing to contradict it, comes first; a message about a
    failure that the snapshot does not hold comes before the snapshot's later, calmer state.
    """
    analysis, message = context.analysis, context.message
    is_silent = message is None or message.kind in NOT_A_SHORTAGE
    if analysis is not None and (analysis.ooms or is_silent):
        return verdict_on_snapshot(context)
    if message is not None and message.sub_kind != NO_FAILURE:
        if context.failed_request is not None and not message.sub_kind:
            hypotheses = decide(context.failed_request)
            if analysis is not None:
                hypotheses = explain_live_memory(
                    context, analysis, context.failed_request, hypotheses
                )
            return verdict_of(hypotheses, context.device, evidence_of_message(message))
        return verdict_on_message(message)
    if context.stats:
        return verdict_on_stats(context)
    if context.case.oom is not None:
        return verdict_without_messages(context.case.oom)
    return Verdict(Cause.UNKNOWN, Confidence.POSSIBLE, "There is no input to judge.")


def with_story(verdict: Verdict, story: LogStory | None) -> Verdict:
    """Return the verdict in the light of what came before and after the message.

    One message that says "too much live memory" cannot say why there is so much. Where it grew
    from trial to trial, that is why: the verdict becomes a leak. A weaker sign is listed beside.
    """
    grown, cache = accumulation(story), growing_cache(story)
    if story is not None and grown is not None and _is_coming(verdict, story, grown):
        return _as_coming_leak(verdict, grown)
    if grown is not None:
        is_sure = grown.confidence is Confidence.LIKELY and grown.over != "oom"
        if verdict.cause is Cause.CAPACITY and is_sure:
            verdict = _as_leak(verdict, grown)
        else:
            verdict = _also(verdict, Cause.LEAK)
    if cache is not None:
        verdict = _also(verdict, Cause.FRAGMENTATION)
    return verdict


def _is_coming(verdict: Verdict, story: LogStory, grown: Trend) -> bool:
    """Return whether memory grows from trial to trial in a log without any failure yet."""
    has_failed = any(event.kind in FAILURES for event in story.events)
    is_sure = grown.confidence is Confidence.LIKELY and grown.over == "trial"
    return verdict.cause is Cause.NOT_MEMORY and not has_failed and is_sure


def _as_coming_leak(verdict: Verdict, grown: Trend) -> Verdict:
    return replace(
        verdict,
        cause=Cause.LEAK,
        confidence=Confidence.LIKELY,
        summary=f"{growth_sentence(grown)} {verdict.summary}",
        evidence=(
            *verdict.evidence,
            Evidence("growth", round(grown.slope_bytes or 0), "bytes", "log"),
        ),
        decider="",
    )


def _as_leak(verdict: Verdict, grown: Trend) -> Verdict:
    return replace(
        verdict,
        cause=Cause.LEAK,
        confidence=Confidence.LIKELY,
        summary=f"{growth_sentence(grown)} In the end: {verdict.summary}",
        also=(Cause.CAPACITY, *(c for c in verdict.also if c not in (Cause.LEAK, Cause.CAPACITY))),
        evidence=(
            *verdict.evidence,
            Evidence("growth", round(grown.slope_bytes or 0), "bytes", "log"),
        ),
    )


def _also(verdict: Verdict, cause: Cause) -> Verdict:
    is_about_memory = verdict.cause not in (Cause.NOT_MEMORY, Cause.HEALTHY, Cause.UNKNOWN)
    if not is_about_memory or cause is verdict.cause or cause in verdict.also:
        return verdict
    return replace(verdict, also=(*verdict.also, cause))


STATS: Final = "memory_stats"

REAL_HOLES_SHARE: Final = 0.1
"""``inactive_split_bytes`` of a tenth of reserved memory: well above the slack of any run."""


def verdict_on_stats(context: Context) -> Verdict:
    """Return the verdict on the statistics of one device."""
    last = context.stats[-1]
    hypotheses = _readings(context, last)
    return verdict_of(hypotheses, context.device, _evidence(last))


def _readings(context: Context, last: MemoryStats) -> list[Hypothesis]:
    n_ooms, n_retries = last.n_ooms or 0, last.n_alloc_retries or 0
    if context.is_series and climbs(context.stats, "allocated_bytes.all.current"):
        grown = rise(context.stats, "allocated_bytes.all.current")
        text = (
            f"Allocated memory rises from record to record, by {format_size(grown)} over "
            f"{format_count(len(context.stats))} of them."
        )
        return [
            Hypothesis(Cause.LEAK, Confidence.LIKELY, text, "A snapshot names the line."),
            Hypothesis(Cause.CAPACITY if n_ooms else Cause.HEALTHY, Confidence.POSSIBLE, ""),
        ]
    if n_ooms:
        return _after_ooms(last, n_ooms, n_retries)
    if n_retries:
        return _near_the_limit(context, last, n_retries)
    if last.n_ooms is None and last.n_alloc_retries is None:
        return [_no_counters()]
    peak = last.get("allocated_bytes.all.peak")
    return [
        Hypothesis(
            Cause.HEALTHY,
            Confidence.LIKELY,
            f"No request failed and none needed a retry; allocated memory peaked at "
            f"{format_size(peak)}, {format_size(last.reserved_bytes)} are reserved.",
        )
    ]


def _after_ooms(last: MemoryStats, n_ooms: int, n_retries: int) -> list[Hypothesis]:
    split, reserved = last.inactive_split_bytes or 0, last.reserved_bytes or 0
    counts = (
        f"{format_count(n_ooms)} {'request' if n_ooms == 1 else 'requests'} failed after "
        f"{format_count(n_retries)} {'retry' if n_retries == 1 else 'retries'}"
    )
    decider = "The OOM message or a snapshot has the size of the failed request."
    holes = Hypothesis(
        Cause.FRAGMENTATION,
        Confidence.POSSIBLE,
        f"{counts}, and {format_size(split)} of {format_size(reserved)} reserved are free but "
        "pinned by live blocks.",
        decider,
    )
    full = Hypothesis(
        Cause.CAPACITY,
        Confidence.POSSIBLE,
        f"{counts}, with {format_size(last.allocated_bytes)} of {format_size(reserved)} reserved "
        "allocated.",
        decider,
    )
    if reserved and split >= REAL_HOLES_SHARE * reserved:
        return [holes, full]
    return [full, holes]


def _near_the_limit(context: Context, last: MemoryStats, n_retries: int) -> list[Hypothesis]:
    climbing = context.is_series and count_rises(context.stats, "num_alloc_retries")
    text = (
        f"No request failed, but {format_count(n_retries)} "
        f"{'retry' if n_retries == 1 else 'retries'} had to flush the cache"
        f"{' and the counter climbs' if climbing else ''}: the run is near its limit, with "
        f"{format_size(last.inactive_split_bytes)} of free cache pinned."
    )
    return [
        Hypothesis(Cause.HEALTHY, Confidence.POSSIBLE, text, "A snapshot shows what is pinned."),
        Hypothesis(Cause.FRAGMENTATION, Confidence.POSSIBLE, ""),
        Hypothesis(Cause.CAPACITY, Confidence.POSSIBLE, ""),
    ]


def _no_counters() -> Hypothesis:
    return Hypothesis(
        Cause.UNKNOWN,
        Confidence.POSSIBLE,
        "The statistics hold neither the number of failures nor of retries.",
        "Give the whole output of torch.cuda.memory_stats().",
    )


def _evidence(last: MemoryStats) -> tuple[Evidence, ...]:
    figures = {
        "reserved": (last.reserved_bytes, "bytes"),
        "allocated": (last.allocated_bytes, "bytes"),
        "inactive split": (last.inactive_split_bytes, "bytes"),
        "retries": (last.n_alloc_retries, "count"),
        "failures": (last.n_ooms, "count"),
    }
    return tuple(
        Evidence(name, value, unit, last.origin)
        for name, (value, unit) in figures.items()
        if value is not None
    )
