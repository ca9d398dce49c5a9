"""The story of a log, from the lines that the reader found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fragdoctor.model.case import OomLog
from fragdoctor.model.story import (
    FAILURES,
    Direction,
    LogStory,
    Scene,
    SceneKind,
    StoryEvent,
    Trend,
    Trial,
)
from fragdoctor.story.failures import CauseFinder, Link, MergedScene, collapsed
from fragdoctor.story.order import Processes, in_order
from fragdoctor.story.trends import has_process_each, kept, trends_at_failures, trends_of_prints
from fragdoctor.story.trials import n_parallel, trials_of, with_failures, with_trials

MAX_EVENTS: Final = 2000
"""Events of a story; if there are more, those in the middle without a failure go first."""

_MIN_PROGRESS: Final = 5
_HIDDEN: Final = frozenset({SceneKind.FIGURE, SceneKind.MENTION})
_QUIET: Final = frozenset(
    {
        SceneKind.PROGRESS,
        SceneKind.TRIAL_START,
        SceneKind.TRIAL_END,
        SceneKind.TRIAL_PRUNED,
        SceneKind.WARNING,
    }
)


def build_story(log: OomLog | None) -> LogStory | None:
    """Return the story of a log; None if there is none.

    One failure is no story, nor is a run without any; a log that shows how far a run had come
    before it failed is one, and so are the trials of a sweep that prints what each leaves behind.
    """
    if log is None or not log.scenes:
        return None
    scenes = with_trials(log.scenes)
    processes = Processes(scenes)
    trials = trials_of(scenes)
    ordered, is_by_time = in_order(scenes)
    merged = collapsed(ordered, log.messages, processes)
    links = CauseFinder(merged, log.messages, processes).links()
    trials = with_failures(trials, [t.scene for t in merged])
    trends = kept(
        [
            *trends_at_failures(merged, links, log.messages),
            *trends_of_prints(scenes, processes),
        ]
    )
    if not _is_story(merged, trials, trends):
        return None
    events = _events(merged, links)
    times = [s.time_s for s in ordered if s.time_s is not None]
    story = LogStory(
        events=events,
        trials=tuple(trials),
        trends=trends,
        is_by_time=is_by_time,
        n_ooms=sum(t.scene.kind is SceneKind.OOM for t in merged),
        n_consequences=sum(
            link.cause is not None and t.scene.kind in FAILURES
            for t, link in zip(merged, links, strict=True)
        ),
        n_retries=sum(t.scene.kind is SceneKind.RETRY for t in merged),
        n_restarts=processes.n_restarts,
        n_parallel=n_parallel(scenes) if len(trials) > 1 else 1,
        duration_s=max(times) - min(times) if is_by_time and times else None,
    )
    if not has_process_each(story):
        return story
    marked = (replace(t, has_process_each=t.over == "trial") for t in story.trends)
    return replace(story, trends=tuple(marked))


def _is_story(
    merged: Sequence[MergedScene], trials: Sequence[Trial], trends: Sequence[Trend]
) -> bool:
    loud = [t.scene for t in merged if t.scene.kind not in _QUIET | _HIDDEN]
    grows = any(t.direction is Direction.GROWS and t.confidence is not None for t in trends)
    if not loud:
        return len(trials) > 1 and any(t.over == "trial" and t.confidence for t in trends)
    n_progress = sum(t.scene.kind is SceneKind.PROGRESS for t in merged)
    if n_progress >= _MIN_PROGRESS or len(trials) > 1 or grows:
        return True
    # Messages alone are listed already; what stands beside them makes the story.
    kinds = {s.kind for s in loud}
    is_more = len(kinds - {SceneKind.KILLED, SceneKind.RETRY, SceneKind.CACHE_FLUSH}) > 1
    return is_more or (len(kinds) > 1 and len(loud) > 2)


def _events(merged: Sequence[MergedScene], links: Sequence[Link]) -> tuple[StoryEvent, ...]:
    """Return the events; of progress the first, the last, and the last before each other event."""
    shown = _shown(merged)
    place = {index: i for i, index in enumerate(shown)}
    return tuple(_event(merged[index], links[index], place) for index in shown)


def _shown(merged: Sequence[MergedScene]) -> list[int]:
    candidates = [i for i, t in enumerate(merged) if t.scene.kind not in _HIDDEN]
    progress = [i for i in candidates if merged[i].scene.kind is SceneKind.PROGRESS]
    ends = {progress[0], progress[-1]} if progress else set()
    shown = [
        i
        for n, i in enumerate(candidates)
        if merged[i].scene.kind is not SceneKind.PROGRESS
        or i in ends
        or (n + 1 < len(candidates) and _is_loud(merged[candidates[n + 1]].scene))
    ]
    if len(shown) <= MAX_EVENTS:
        return shown
    loud = [i for i in shown if _is_loud(merged[i].scene)]
    quiet = [i for i in shown if not _is_loud(merged[i].scene)]
    n_quiet = max(0, MAX_EVENTS - len(loud))
    chosen = {*loud[: MAX_EVENTS // 2], *loud[-MAX_EVENTS // 2 :], *quiet[: n_quiet // 2]}
    chosen |= set(quiet[len(quiet) - n_quiet // 2 :])
    return [i for i in shown if i in chosen]


def _is_loud(scene: Scene) -> bool:
    return scene.kind not in _QUIET


def _event(one: MergedScene, link: Link, place: dict[int, int]) -> StoryEvent:
    scene = one.scene
    cause = None if link.cause is None else place.get(link.cause)
    return StoryEvent(
        kind=scene.kind,
        line=scene.line,
        text=scene.text,
        time_s=scene.time_s,
        rank=scene.rank,
        pid=scene.pid,
        trial=scene.trial,
        message=scene.message,
        place=scene.place,
        count=scene.count,
        n_lines=one.n_lines,
        caused_by=cause,
        confidence=link.confidence if cause is not None else None,
        reason=link.reason,
    )
