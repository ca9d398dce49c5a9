"""Which trial each line belongs to, and what became of each trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fragdoctor.model.story import FAILURES, Outcome, Scene, SceneKind, Trial
from fragdoctor.story.order import Source

ENDS = {
    SceneKind.TRIAL_END: Outcome.FINISHED,
    SceneKind.TRIAL_FAILED: Outcome.FAILED,
    SceneKind.TRIAL_PRUNED: Outcome.PRUNED,
}
_AT_WORK = (SceneKind.TRIAL_START, SceneKind.MENTION, SceneKind.PROGRESS, SceneKind.FIGURE)
_NOWHERE = Source(None, None)
_TRACEBACK_LINES = 200
"""Optuna says that a trial failed and prints the traceback below, which is shorter than this."""


def with_trials(scenes: Sequence[Scene]) -> list[Scene]:
    """Return the scenes with their trial, where the log lets one know.

    A line belongs to the trial that it names; else to the one that its process announced last;
    else, as Optuna announces no start, to the one whose end comes next. A failure right below the
    line that says that a trial failed is that trial's, unless it has shown one before. Where trials
    run side by side in one stream, lines that name none belong to none.
    """
    return _Assignment(scenes).done()


class _Assignment:
    """One pass over the lines: what each process announced, and what waits for a name."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._scenes = scenes
        self._whole = list(scenes)
        self._is_parallel = depth(_spans_of_names(scenes)) > 1
        self._current: dict[Source, str] = {}
        self._started: set[str] = set()
        self._unnamed: dict[Source, list[int]] = {}
        self._failure_lines: dict[str, int] = {}  # of each trial the first
        self._failed: dict[Source, Scene] = {}  # whose traceback may still come

    def done(self) -> list[Scene]:
        """Return all scenes with their trials."""
        for i, scene in enumerate(self._scenes):
            source = Source(scene.rank, scene.pid)
            if scene.kind is SceneKind.RESTART:
                self._current.clear()
                self._unnamed.clear()
                self._failed.clear()
            if scene.trial and scene.kind in FAILURES:
                self._failure_lines.setdefault(scene.trial, scene.line)
            if not scene.trial:
                self._place(i, source)
            elif scene.kind in ENDS:
                self._end(scene, source)
            elif scene.kind in _AT_WORK:
                self._begin(scene.trial, source)
        return self._whole

    def _place(self, i: int, source: Source) -> None:
        scene = self._whole[i]
        name = self._current.get(source, "") or self._just_failed(scene, source)
        if not name and not self._is_parallel:
            name = self._current.get(_NOWHERE, "")
        if name:
            self._name(i, name)
        else:
            self._unnamed.setdefault(source, []).append(i)

    def _name(self, i: int, name: str) -> None:
        scene = self._whole[i]
        self._whole[i] = replace(scene, trial=name)
        if scene.kind in FAILURES:
            self._failure_lines.setdefault(name, scene.line)

    def _just_failed(self, scene: Scene, source: Source) -> str:
        """Return the trial that was said to have failed right above its traceback."""
        failed = self._failed.get(source)
        if failed is None:
            return ""
        if scene.kind in FAILURES and scene.line - failed.line <= _TRACEBACK_LINES:
            return failed.trial
        if scene.kind in _AT_WORK:
            del self._failed[source]
        return ""

    def _begin(self, name: str, source: Source) -> None:
        self._failed.pop(source, None)
        if self._current.get(source) != name:
            self._unnamed.pop(source, None)
        self._started.add(name)
        self._current[source] = name

    def _end(self, scene: Scene, source: Source) -> None:
        name = scene.trial
        if name not in self._started and not self._is_parallel:
            for i in self._waiting(source):
                self._name(i, name)
        self._failed.pop(source, None)
        is_known = self._failure_lines.get(name, scene.line) < scene.line
        if scene.kind is SceneKind.TRIAL_FAILED and not is_known:
            self._failed[source] = scene
        self._current.pop(source, None)
        self._current.pop(_NOWHERE, None)

    def _waiting(self, source: Source) -> list[int]:
        """Return the lines without a trial since the last end; all sources' if none is named."""
        if source != _NOWHERE:
            return self._unnamed.pop(source, [])
        waiting = [i for indices in self._unnamed.values() for i in indices]
        self._unnamed.clear()
        return waiting


def _spans_of_names(scenes: Sequence[Scene]) -> list[tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for scene in scenes:
        if scene.trial:
            first, _ = spans.get(scene.trial, (scene.line, 0))
            spans[scene.trial] = first, scene.line
    return list(spans.values())


def depth(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many spans overlap at most; touching ends do not."""
    edges = sorted(
        [(first, 1) for first, last in spans if last > first]
        + [(last, -1) for first, last in spans if last > first]
    )
    deepest = level = 0
    for _, step in edges:
        level += step
        deepest = max(deepest, level)
    return deepest


def n_parallel(scenes: Sequence[Scene]) -> int:
    """Return how many trials were seen at work at the same time, 1 where none was.

    Workers of a sweep that print a pid and no rank count too.
    """
    pids: dict[int, tuple[int, int]] = {}
    for scene in scenes:
        if scene.pid is not None and scene.rank is None:
            first, _ = pids.get(scene.pid, (scene.line, 0))
            pids[scene.pid] = first, scene.line
    return max(1, depth(_spans_of_names(scenes)), depth(list(pids.values())))


def trials_of(scenes: Sequence[Scene]) -> list[Trial]:
    """Return the trials of scenes that carry theirs, by first line."""
    grouped: dict[str, list[Scene]] = {}
    for scene in scenes:
        if scene.trial:
            grouped.setdefault(scene.trial, []).append(scene)
    return [_trial(name, members) for name, members in grouped.items()]


def _trial(name: str, members: Sequence[Scene]) -> Trial:
    outcome = Outcome.OPEN
    for scene in members:
        outcome = ENDS.get(scene.kind, outcome)
    figures = [f for s in members for f in s.figures]
    # what is allocated says more than what is cached, and that more than the whole device
    best = next(
        (n for n in ("allocated", "reserved", "used") if any(f.name == n for f in figures)), ""
    )
    return Trial(
        name=name,
        first_line=members[0].line,
        last_line=members[-1].line,
        outcome=outcome,
        baseline_bytes=min((f.n_bytes for f in figures if f.name == best), default=None),
        baseline_of=best,
    )


def with_failures(trials: Sequence[Trial], failures: Sequence[Scene]) -> list[Trial]:
    """Return the trials with the number of their OOMs, each of which is listed once."""
    n_ooms = Counter(s.trial for s in failures if s.kind is SceneKind.OOM)
    return [replace(trial, n_ooms=n_ooms[trial.name]) for trial in trials]
