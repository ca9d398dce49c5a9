"""The story of a log, built from the lines that the reader found: first trials, then events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.case import OomLog
from fragdoctor.model.story import (
    FAILURES,
    Direction,
    LogStory,
    Scene,
    SceneKind,
    Trial,
    TrialOutcome,
    TrialTrend,
)
from fragdoctor.story.failures import TRACEBACK_LINES, CauseFinder, collapsed
from fragdoctor.story.order import LogSource, Processes, in_order, restarts_once
from fragdoctor.story.trends import has_process_each, kept, trends_at_failures, trends_of_prints

ENDS = {
    SceneKind.TRIAL_END: TrialOutcome.FINISHED,
    SceneKind.TRIAL_FAILED: TrialOutcome.FAILED,
    SceneKind.TRIAL_PRUNED: TrialOutcome.PRUNED,
}
_AT_WORK = (SceneKind.TRIAL_START, SceneKind.MENTION, SceneKind.PROGRESS, SceneKind.FIGURE)
_NOWHERE = LogSource(None, None)


def with_trials(scenes: Sequence[Scene]) -> list[Scene]:
    """Return the scenes with their trial, if the log shows it.

    A line belongs to the trial that it names, else to the one that its process announced last, else
    (since Optuna announces no start) to the one whose end comes next. A failure right below the
    line that says that a trial failed belongs to that trial, unless it has shown one above. If
    trials run side by side in one stream, lines that name none belong to none.
    """
    is_parallel = depth(_spans((s.trial, s.line) for s in scenes if s.trial)) > 1
    whole = list(scenes)
    current: dict[LogSource, str] = {}
    waiting: dict[LogSource, list[int]] = {}  # lines without a trial
    failed: dict[LogSource, Scene] = {}  # ends whose traceback may still come
    started: set[str] = set()
    for i, scene in enumerate(scenes):
        source, name = LogSource(scene.rank, scene.pid), scene.trial
        if scene.kind is SceneKind.RESTART:
            current, waiting, failed = {}, {}, {}
        if not name:
            name = current.get(source, "") or _just_failed(failed, scene, source)
            name = name or ("" if is_parallel else current.get(_NOWHERE, ""))
            whole[i] = replace(scene, trial=name)
            if not name:
                waiting.setdefault(source, []).append(i)
        elif scene.kind in ENDS:
            if name not in started and not is_parallel:
                for k in _taken(waiting, source):
                    whole[k] = replace(whole[k], trial=name)
            failed.pop(source, None)
            above = whole[max(0, i - TRACEBACK_LINES) : i]
            is_shown = any(s.trial == name and s.kind in FAILURES for s in above)
            if scene.kind is SceneKind.TRIAL_FAILED and not is_shown:
                failed[source] = scene
            current.pop(source, None)
            current.pop(_NOWHERE, None)
        elif scene.kind in _AT_WORK:
            failed.pop(source, None)
            waiting.pop(source, None)
            current[source] = name
            started.add(name)
    return whole


def _just_failed(failed: dict[LogSource, Scene], scene: Scene, source: LogSource) -> str:
    """Return the trial that was reported as failed right above its traceback."""
    if source not in failed:
        return ""
    if scene.kind in FAILURES and scene.line - failed[source].line <= TRACEBACK_LINES:
        return failed[source].trial
    if scene.kind in _AT_WORK:
        del failed[source]
    return ""


def _taken(waiting: dict[LogSource, list[int]], source: LogSource) -> list[int]:
    """Take the lines without a trial since the last end; all sources' if none is named."""
    if source != _NOWHERE:
        return waiting.pop(source, [])
    found = [i for indices in waiting.values() for i in indices]
    waiting.clear()
    return found


def _spans(marks: Iterable[tuple[Hashable, int]]) -> list[tuple[int, int]]:
    """Return the first and last line of each name, given names with the lines they appear in."""
    spans: dict[Hashable, tuple[int, int]] = {}
    for name, line in marks:
        first, _ = spans.get(name, (line, 0))
        spans[name] = first, line
    return list(spans.values())


def depth(spans: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of spans that overlap; touching ends do not count."""
    marks = (((first, 1), (last, -1)) for first, last in spans if last > first)
    edges = sorted(edge for pair in marks for edge in pair)
    return max(accumulate(step for _, step in edges), default=0)


def trials_of(scenes: Sequence[Scene]) -> list[Trial]:
    """Return the trials of scenes that have one, sorted by first line."""
    outcomes: dict[str, TrialOutcome] = {}
    for scene in scenes:
        if scene.trial:
            known = outcomes.setdefault(scene.trial, TrialOutcome.OPEN)
            outcomes[scene.trial] = ENDS.get(scene.kind, known)
    return [Trial(name, outcome) for name, outcome in outcomes.items()]


MAX_EVENTS: Final = 2000
"""Maximum events of a story; beyond it, those in the middle without a failure are dropped first."""

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
    """Return the story of a log, or None if there is none.

    A single failure is not a story, nor is a run without one. A log that shows how far a run had
    come before it failed is one, and so are the trials of a sweep that prints what each leaves.
    """
    if log is None or not log.scenes:
        return None
    scenes = with_trials(restarts_once(log.scenes))
    processes = Processes(scenes)
    trials = trials_of(scenes)
    ordered, is_by_time = in_order(scenes)
    merged = collapsed(ordered, log.messages, processes)
    linked = CauseFinder(merged, log.messages, processes).linked()
    n_of_trial = Counter(s.trial for s in linked if s.kind is SceneKind.OOM)
    trials = [replace(trial, n_ooms=n_of_trial[trial.name]) for trial in trials]
    at_failures = trends_at_failures(linked, log.messages)
    trends = kept([*at_failures, *trends_of_prints(scenes, processes)])
    if not _is_story(linked, trials, trends):
        return None
    times = [s.time_s for s in ordered if s.time_s is not None]
    story = LogStory(
        events=_events(linked),
        trials=tuple(trials),
        trends=trends,
        is_by_time=is_by_time,
        n_ooms=n_of_trial.total(),
        n_consequences=sum(s.caused_by is not None and s.kind in FAILURES for s in linked),
        n_retries=_n_retries(linked, processes),
        n_restarts=sum(s.kind is SceneKind.RESTART for s in linked),
        duration_s=max(times) - min(times) if is_by_time and times else None,
    )
    if not has_process_each(story):
        return story
    marked = (replace(t, has_process_each=t.over == "trial") for t in story.trends)
    return replace(story, trends=tuple(marked))


def _n_retries(scenes: Sequence[Scene], processes: Processes) -> int:
    """Return the number of retries: what each process has counted, else its lines about them."""
    retries = [s for s in scenes if s.kind is SceneKind.RETRY]
    counted = {
        (s.rank, s.pid, processes.generation(s.line)): s.count for s in retries if s.count
    }  # a counter's last figure stands for all of them
    return sum(s.count is None for s in retries) + sum(counted.values())


def _is_story(
    scenes: Sequence[Scene], trials: Sequence[Trial], trends: Sequence[TrialTrend]
) -> bool:
    loud = [s for s in scenes if s.kind not in _QUIET | _HIDDEN]
    grows = any(t.direction is Direction.GROWS and t.confidence is not None for t in trends)
    if not loud:
        return len(trials) > 1 and any(t.over == "trial" and t.confidence for t in trends)
    n_progress = sum(s.kind is SceneKind.PROGRESS for s in scenes)
    if n_progress >= _MIN_PROGRESS or len(trials) > 1 or grows:
        return True
    # Messages alone are already listed; what accompanies them makes the story.
    kinds = {s.kind for s in loud}
    is_more = len(kinds - {SceneKind.KILLED, SceneKind.RETRY, SceneKind.CACHE_FLUSH}) > 1
    return is_more or (len(kinds) > 1 and len(loud) > 2)


def _events(scenes: Sequence[Scene]) -> tuple[Scene, ...]:
    """Return the events; of progress only the first, the last, and the last before other events."""
    shown = _shown(scenes)
    place = {index: i for i, index in enumerate(shown)}
    events = []
    for scene in (scenes[index] for index in shown):
        cause = None if scene.caused_by is None else place.get(scene.caused_by)
        sure = None if cause is None else scene.confidence
        events.append(replace(scene, caused_by=cause, confidence=sure))
    return tuple(events)


def _shown(scenes: Sequence[Scene]) -> list[int]:
    candidates = [i for i, s in enumerate(scenes) if s.kind not in _HIDDEN]
    progress = [i for i in candidates if scenes[i].kind is SceneKind.PROGRESS]
    ends = {progress[0], progress[-1]} if progress else set()
    shown = [
        i
        for i, following in zip_longest(candidates, candidates[1:])
        if scenes[i].kind is not SceneKind.PROGRESS
        or i in ends
        or (following is not None and scenes[following].kind not in _QUIET)
    ]
    if len(shown) <= MAX_EVENTS:
        return shown
    loud = [i for i in shown if scenes[i].kind not in _QUIET]
    quiet = [i for i in shown if scenes[i].kind in _QUIET]
    n_quiet = max(0, MAX_EVENTS - len(loud))
    chosen = {*loud[: MAX_EVENTS // 2], *loud[-MAX_EVENTS // 2 :], *quiet[: n_quiet // 2]}
    chosen |= set(quiet[len(quiet) - n_quiet // 2 :])
    return [i for i in shown if i in chosen]
