"""What the trends of a story amount to."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import Direction, LogStory, SceneKind, StoryEvent, Trend

_OVER_TRIALS: Final = ("trial", "oom")
_RUN_RISE_SHARE: Final = 0.1
"""Within one run printed memory must rise by a tenth: steps differ more than trials."""


def memory_over_trials(story: LogStory) -> Trend | None:
    """Return the trend that tells whether memory accumulates; None where nothing tells.

    What is printed between trials says more than what was allocated when memory ran out, which the
    size of the trial decides as well.
    """
    printed = [t for t in story.trends if t.label and t.over == "trial" and _is_told(t)]
    for figure in ("allocated", "reserved", "used"):
        best = _best([t for t in printed if t.figure == figure])
        if best is not None:
            return best
    at_failures = [
        t for t in story.trends if not t.label and t.figure == "allocated" and _is_told(t)
    ]
    return _best(at_failures)


def accumulation(story: LogStory | None) -> Trend | None:
    """Return the trend of memory that grows over trials, failures, or the prints of one run.

    Where each trial has a process of its own nothing can pile up between them: whatever grows
    there, the trials ask for more.
    """
    if story is None:
        return None
    trend = memory_over_trials(story)
    if trend is not None and trend.has_process_each:
        return None
    if trend is not None:
        return trend if trend.direction is Direction.GROWS else None
    runs = [
        t
        for t in story.trends
        if t.over == "print"
        and t.figure == "allocated"
        and t.direction is Direction.GROWS
        and t.confidence is Confidence.LIKELY
        and rise_bytes(t) >= _RUN_RISE_SHARE * t.points[-1]
    ]
    return _best(runs)


def growing_cache(story: LogStory | None) -> Trend | None:
    """Return the trend of reserved but unallocated memory where that grows over failures."""
    if story is None:
        return None
    return _best(
        [t for t in story.trends if t.figure == "unallocated" and t.direction is Direction.GROWS]
    )


def rise_bytes(trend: Trend) -> int:
    """Return how much a figure rose from the first to the last point along its slope."""
    if trend.slope_bytes is None:
        return 0
    if trend.lines and trend.over == "print":
        return trend.points[-1] - trend.points[0]
    return round(trend.slope_bytes * (len(trend.points) - 1))


def first_oom(story: LogStory) -> StoryEvent | None:
    """Return the first OOM that is no consequence of another failure."""
    ooms = (e for e in story.events if e.kind is SceneKind.OOM and e.caused_by is None)
    return next(ooms, None)


def trials_before_failure(story: LogStory) -> int | None:
    """Return how many trials came before the first that ran out of memory; None if none did."""
    for n, trial in enumerate(story.trials):
        if trial.n_ooms:
            return n
    return None


def has_process_each(story: LogStory) -> bool:
    """Tell whether every trial whose process is printed ran in one of its own."""
    of_trial: dict[str, set[int]] = {}
    for event in story.events:
        if event.trial and event.pid is not None:
            of_trial.setdefault(event.trial, set()).add(event.pid)
    pids = [pid for group in of_trial.values() for pid in group]
    return len(of_trial) > 1 and len(pids) == len(set(pids))


def _is_told(trend: Trend) -> bool:
    return trend.over in _OVER_TRIALS and trend.slope_bytes is not None


def _best(trends: list[Trend]) -> Trend | None:
    return max(
        trends,
        key=lambda t: (t.direction is Direction.GROWS, t.confidence is not None, len(t.points)),
        default=None,
    )
