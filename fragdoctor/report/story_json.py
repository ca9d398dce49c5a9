"""The story of a log as JSON: ``story`` in the documents of ``analyze`` and ``oom``."""

from __future__ import annotations

from typing import Any

from fragdoctor.model.story import LogStory, StoryEvent, Trend, Trial

Json = dict[str, Any]


def story_document(story: LogStory | None) -> Json | None:
    """Return a story as JSON; None where a log tells none."""
    if story is None:
        return None
    return {
        "is_by_time": story.is_by_time,
        "duration_s": story.duration_s,
        "n_ooms": story.n_ooms,
        "n_consequences": story.n_consequences,
        "n_retries": story.n_retries,
        "n_restarts": story.n_restarts,
        "n_parallel": story.n_parallel,
        "events": [_event(e) for e in story.events],
        "trials": [_trial(t) for t in story.trials],
        "trends": [_trend(t) for t in story.trends],
    }


def _event(event: StoryEvent) -> Json:
    return {
        "kind": event.kind.value,
        "line": event.line,
        "time_s": event.time_s,
        "rank": event.rank,
        "pid": event.pid,
        "trial": event.trial or None,
        "message": event.message,
        "place": event.place or None,
        "count": event.count,
        "n_lines": event.n_lines,
        "caused_by": event.caused_by,
        "confidence": None if event.confidence is None else event.confidence.value,
        "reason": event.reason,
        "text": event.text,
    }


def _trial(trial: Trial) -> Json:
    return {
        "name": trial.name,
        "first_line": trial.first_line,
        "last_line": trial.last_line,
        "outcome": trial.outcome.value,
        "n_ooms": trial.n_ooms,
        "baseline_bytes": trial.baseline_bytes,
        "baseline_of": trial.baseline_of or None,
    }


def _trend(trend: Trend) -> Json:
    return {
        "figure": trend.figure,
        "over": trend.over,
        "label": trend.label or None,
        "rank": trend.rank,
        "points_bytes": list(trend.points),
        "lines": list(trend.lines),
        "slope_bytes": _rounded(trend.slope_bytes),
        "low_bytes": _rounded(trend.low_bytes),
        "high_bytes": _rounded(trend.high_bytes),
        "direction": trend.direction.value,
        "confidence": None if trend.confidence is None else trend.confidence.value,
    }


def _rounded(n_bytes: float | None) -> int | None:
    return None if n_bytes is None else round(n_bytes)
