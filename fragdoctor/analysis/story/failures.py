"""Prints of one failure made one: tracebacks, summaries and every thread of a kernel repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fragdoctor.analysis.story.processes import Processes
from fragdoctor.model.oom import OomMessage
from fragdoctor.model.story import FAILURES, Scene, SceneKind

_NEAR_LINES: Final = 200
"""A traceback, and the summary that repeats its last line, are shorter than this."""

_LABEL_LINES: Final = 60
"""So near below an assert without a rank its own process reports it with its rank."""

_ALSO_REPEATED: Final = frozenset(
    {SceneKind.WARNING, SceneKind.TRIAL_FAILED, SceneKind.TRIAL_START, SceneKind.RESTART}
)
_ENDS_RUN: Final = frozenset(
    {SceneKind.TRIAL_START, SceneKind.PROGRESS, SceneKind.RESTART, SceneKind.RETRY}
)


@dataclass(frozen=True, slots=True)
class Told:
    """A scene and how many lines told the same."""

    scene: Scene
    n_lines: int = 1


def collapsed(
    scenes: Sequence[Scene], messages: Sequence[OomMessage], processes: Processes
) -> list[Told]:
    """Return the scenes, each failure once, at its first line."""
    told: list[Told] = []
    recent: list[int] = []  # failures that a further print may repeat
    for scene in _ranked(scenes, processes):
        if scene.kind in _ENDS_RUN and not (told and told[-1].scene.kind is scene.kind):
            recent = [i for i in recent if not _belongs(told[i].scene, scene, processes)]
        same = next(
            (i for i in reversed(recent) if _repeats(told[i], scene, messages, processes)), -1
        )
        if same >= 0:
            first = told[same]
            told[same] = Told(_merged(first.scene, scene), first.n_lines + 1)
            continue
        told.append(Told(scene))
        if scene.kind in FAILURES or scene.kind in _ALSO_REPEATED:
            recent = [*recent[-20:], len(told) - 1]
    return told


def _belongs(failure: Scene, scene: Scene, processes: Processes) -> bool:
    return processes.may_be_same(failure, scene)


def _merged(first: Scene, later: Scene) -> Scene:
    """Return the first print, with the rank and trial that only a later one names."""
    return replace(
        first,
        rank=later.rank if first.rank is None else first.rank,
        pid=later.pid if first.pid is None else first.pid,
        trial=first.trial or later.trial,
    )


def _repeats(
    first: Told, scene: Scene, messages: Sequence[OomMessage], processes: Processes
) -> bool:
    earlier = first.scene
    if earlier.kind is not scene.kind or scene.line - earlier.line > _NEAR_LINES * first.n_lines:
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
    """Return the figures that tell one failure from the next."""
    return (
        message.device_index,
        message.requested_bytes,
        message.allocated_bytes,
        message.reserved_unallocated_bytes,
        message.free_bytes,
    )


def _ranked(scenes: Sequence[Scene], processes: Processes) -> list[Scene]:
    """Return the scenes; asserts that kernels print without a rank get their process's."""
    if processes.n_ranks < 2:
        return list(scenes)
    ranked = list(scenes)
    for i, scene in enumerate(ranked):
        if scene.kind is not SceneKind.DEVICE_ASSERT or scene.rank is not None:
            continue
        for later in ranked[i + 1 :]:
            if later.line - scene.line > _LABEL_LINES:
                break
            if later.kind is SceneKind.DEVICE_ASSERT and later.rank is not None:
                ranked[i] = replace(scene, rank=later.rank, pid=later.pid)
                break
    return ranked
