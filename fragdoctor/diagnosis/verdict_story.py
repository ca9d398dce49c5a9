"""What the story of a log adds to the verdict on its first message."""

from __future__ import annotations

from dataclasses import replace

from fragdoctor.analysis.story.reading import accumulation, growing_cache
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.story import LogStory, Trend
from fragdoctor.rules.growth.accumulating_trials import growth_sentence


def with_story(verdict: Verdict, story: LogStory | None) -> Verdict:
    """Return the verdict in the light of what came before and after the message.

    One message that says "too much live memory" cannot tell why there is so much. Where it grew
    from trial to trial, that is why: the verdict becomes a leak. A weaker sign is listed beside.
    """
    grown, cache = accumulation(story), growing_cache(story)
    if grown is not None:
        is_sure = grown.confidence is Confidence.LIKELY and grown.over != "oom"
        if verdict.cause is Cause.CAPACITY and is_sure:
            verdict = _as_leak(verdict, grown)
        else:
            verdict = _also(verdict, Cause.LEAK)
    if cache is not None:
        verdict = _also(verdict, Cause.FRAGMENTATION)
    return verdict


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
