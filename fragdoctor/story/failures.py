"""Failures of a log: repeated prints merged, consequences separated from causes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.case import OomMessage
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import FAILURES, Scene, SceneKind
from fragdoctor.story.order import Processes

_NEAR_LINES: Final = 200
"""A traceback and the summary that repeats its last line are shorter than this together."""

_ALSO_REPEATED: Final = frozenset(
    {SceneKind.WARNING, SceneKind.TRIAL_FAILED, SceneKind.TRIAL_START}
)
_ENDS_RUN: Final = frozenset(
    {SceneKind.TRIAL_START, SceneKind.PROGRESS, SceneKind.RESTART, SceneKind.RETRY}
)


def collapsed(
    scenes: Sequence[Scene], messages: Sequence[OomMessage], processes: Processes
) -> list[Scene]:
    """Return the scenes with each failure only once, at its first line."""
    merged: list[Scene] = []
    recent: list[int] = []  # failures that a further print may repeat
    for scene in scenes:
        if scene.kind in _ENDS_RUN and not (merged and merged[-1].kind is scene.kind):
            recent = [i for i in recent if not processes.may_be_same(merged[i], scene)]
        same = next(
            (i for i in reversed(recent) if _repeats(merged[i], scene, messages, processes)), -1
        )
        if same >= 0:
            merged[same] = _merged(merged[same], scene)
            continue
        merged.append(scene)
        if scene.kind in FAILURES or scene.kind in _ALSO_REPEATED:
            recent = [*recent[-20:], len(merged) - 1]
    return merged


def _merged(first: Scene, later: Scene) -> Scene:
    """Return the first print, adding the rank and trial if only a later one names them."""
    return replace(
        first,
        rank=later.rank if first.rank is None else first.rank,
        pid=later.pid if first.pid is None else first.pid,
        trial=first.trial or later.trial,
        n_lines=first.n_lines + 1,
    )


def _repeats(
    earlier: Scene, scene: Scene, messages: Sequence[OomMessage], processes: Processes
) -> bool:
    is_near = scene.line - earlier.line <= _NEAR_LINES * earlier.n_lines
    if earlier.kind is not scene.kind or not is_near:
        return False
    if processes.generation(earlier.line) != processes.generation(scene.line):
        return False
    if earlier.trial and scene.trial and earlier.trial != scene.trial:
        return False
    if earlier.rank is not None and scene.rank is not None and earlier.rank != scene.rank:
        return False
    if scene.message is not None and earlier.message is not None:
        a, b = messages[earlier.message], messages[scene.message]
        return figures_of(a) == figures_of(b) and a.kind == b.kind
    return processes.may_be_same(earlier, scene)


def figures_of(message: OomMessage) -> tuple[int | None, ...]:
    """Return the figures that distinguish one failure from the next."""
    return (
        message.device_index,
        message.requested_bytes,
        message.allocated_bytes,
        message.reserved_unallocated_bytes,
        message.free_bytes,
    )


_STICKY: Final = frozenset({SceneKind.DEVICE_ASSERT, SceneKind.ILLEGAL_ACCESS})
_CUDA: Final = frozenset({*_STICKY, SceneKind.CUDA_ERROR, SceneKind.COLLECTIVE, SceneKind.OTHER})
_OF_PEERS: Final = frozenset({SceneKind.COLLECTIVE, SceneKind.KILLED})
_ROOTS: Final = frozenset({SceneKind.OOM, SceneKind.HOST_MEMORY, *_STICKY, SceneKind.CUDA_ERROR})
TRACEBACK_LINES: Final = 200
"""If a trial is reported as failed, its traceback follows within this many lines."""

_MAX_BACK: Final = 200
_BURST_LINES: Final = 300
"""Ranks that fail together print their tracebacks one below the other within this many lines."""


def _caused(scene: Scene, cause: int, reason: str, sure: Confidence = Confidence.LIKELY) -> Scene:
    return replace(scene, caused_by=cause, confidence=sure, reason=reason)


class CauseFinder:
    """Links each failure to the one that it follows from."""

    def __init__(
        self, scenes: Sequence[Scene], messages: Sequence[OomMessage], processes: Processes
    ) -> None:
        self._scenes = list(scenes)
        self._messages = messages
        self._processes = processes
        self._progress = sorted(
            (s for s in self._scenes if s.kind is SceneKind.PROGRESS), key=lambda s: s.line
        )
        self._progress_lines = [s.line for s in self._progress]
        self._failures: list[int] = []

    def linked(self) -> list[Scene]:
        """Return the scenes with what they follow from; ``caused_by`` counts all of them."""
        for i, scene in enumerate(self._scenes):
            self._scenes[i] = self._linked(scene)
            if scene.kind in FAILURES:
                self._failures.append(i)
        return self._scenes

    def _linked(self, scene: Scene) -> Scene:
        message = None if scene.message is None else self._messages[scene.message]
        has_figures = message is not None and message.requested_bytes is not None
        if scene.kind in _CUDA or (scene.kind is SceneKind.OOM and not has_figures):
            found = self._after_sticky(scene)
            if found.caused_by is not None or scene.kind is SceneKind.OOM:
                return found
            own = self._after_oom(scene)
            if own.caused_by is not None or scene.kind not in _OF_PEERS:
                return own
        if scene.kind in _OF_PEERS:
            return self._after_peer(scene)
        if scene.kind is SceneKind.TRIAL_FAILED:
            return self._end_of_trial(scene)
        return scene

    def _before(self, kinds: frozenset[SceneKind]) -> list[int]:
        """Return the latest failures of some kinds so far, latest first."""
        return [i for i in reversed(self._failures[-_MAX_BACK:]) if self._scenes[i].kind in kinds]

    def _root(self, i: int) -> int:
        cause = self._scenes[i].caused_by
        return i if cause is None else cause

    def _after_sticky(self, scene: Scene) -> Scene:
        for i in reversed(self._before(_STICKY)):
            earlier = self._scenes[i]
            if self._processes.may_be_same(earlier, scene) and not self._went_on(earlier, scene):
                what = "device-side assert" if earlier.kind is SceneKind.DEVICE_ASSERT else "fault"
                sure = Confidence.PROVEN if scene.rank == earlier.rank else Confidence.LIKELY
                reason = f"after a {what} every CUDA call of that process fails until it ends"
                return _caused(scene, i, reason, sure)
        return scene

    def _went_on(self, earlier: Scene, scene: Scene) -> bool:
        """Return whether the process of a failure made progress before a later line.

        If there is very much progress, only the part right after the failure is checked.
        """
        first = bisect_right(self._progress_lines, earlier.line)
        last = min(bisect_left(self._progress_lines, scene.line), first + _MAX_BACK)
        return any(self._processes.may_be_same(earlier, s) for s in self._progress[first:last])

    def _after_oom(self, scene: Scene) -> Scene:
        reason = ""
        for i in self._before(frozenset({SceneKind.OOM})):
            earlier = self._scenes[i]
            why_not = self._separate(earlier, scene)
            if why_not:
                reason = reason or why_not
                continue
            if self._went_on(earlier, scene):
                reason = reason or f"the run had gone on after the OOM in line {earlier.line}"
                continue
            is_sure = scene.kind is not SceneKind.ILLEGAL_ACCESS
            reason = "the same process had just failed to allocate"
            if scene.kind in _STICKY:
                reason = "the same process went on with what the failed allocation left"
            return _caused(scene, i, reason, Confidence.LIKELY if is_sure else Confidence.POSSIBLE)
        return replace(scene, reason=reason)

    def _separate(self, earlier: Scene, scene: Scene) -> str:
        """Return why two failures are not of one process and trial, or "" if they may be."""
        where = f"the OOM in line {earlier.line}"
        if self._processes.generation(earlier.line) != self._processes.generation(scene.line):
            return f"{where} was before a restart"
        if earlier.trial != scene.trial:
            return f"{where} is of another trial"
        if not self._processes.may_be_same(earlier, scene):
            is_known = None not in (earlier.rank, scene.rank)
            return f"{where} is of another {'rank' if is_known else 'process'}"
        return ""

    def _after_peer(self, scene: Scene) -> Scene:
        first: int | None = None
        for i in self._before(_ROOTS):
            earlier = self._scenes[i]
            generation = self._processes.generation
            if generation(earlier.line) != generation(scene.line):
                break
            if earlier.trial != scene.trial and earlier.trial and scene.trial:
                continue
            if first is not None and self._scenes[first].line - earlier.line > _BURST_LINES:
                break
            first = self._root(i)
        if first is None:
            return scene
        reason = "a process ends with its failure, and its launcher ends the others"
        if scene.kind is SceneKind.COLLECTIVE:
            reason = "the other ranks wait for the one that failed"
        return _caused(scene, first, reason)

    def _end_of_trial(self, scene: Scene) -> Scene:
        for i in self._before(FAILURES):
            if self._scenes[i].trial == scene.trial:
                return _caused(scene, self._root(i), "the failure ended the trial")
        return scene
