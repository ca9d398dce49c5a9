"""What the story of a log adds to the verdict on its first message."""

from __future__ import annotations

from dataclasses import replace

from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.story import FAILURES, LogStory, Trend
from fragdoctor.rules.growth.accumulating_trials import growth_sentence
from fragdoctor.story.trends import accumulation, growing_cache


def with_story(verdict: Verdict, story: LogStory | None) -> Verdict:
    """Return the verdict in the light of what came before and after the message.

    One message that says "too much live memory" cannot tell why there is so much. Where it grew
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
    """Tell whether memory grows from trial to trial in a log without any failure yet."""
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
