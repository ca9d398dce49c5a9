"""The process that each line of a log belongs to, and one timeline for all lines."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.story import Scene, SceneKind, TimePrecision

_SAME_RESTART_LINES: Final = 40
"""Range of lines about one restart: the agent that announces it, and the workers that start."""


class LogSource(Struct, frozen=True):
    """What distinguishes the writers of a log; None means "not printed"."""

    rank: int | None
    pid: int | None


class Processes:
    """Decides whether two lines of one log come from the same process.

    In a log of several ranks, a line without a rank belongs to no process; in a log of one process,
    all lines belong to it. After a restart (``restarts_once`` keeps one line of each), every
    process is a new one.
    """

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.n_ranks = len({s.rank for s in scenes if s.rank is not None})
        self.n_pids = len({s.pid for s in scenes if s.pid is not None})
        self._restarts = [s.line for s in scenes if s.kind is SceneKind.RESTART]

    def generation(self, line: int) -> int:
        """Return how many restarts come before a line."""
        return bisect_right(self._restarts, line)

    def may_be_same(self, a: Scene, b: Scene) -> bool:
        """Return whether two lines may come from one process, going by printed ranks and PIDs."""
        if self.generation(a.line) != self.generation(b.line):
            return False
        return _agree(a.rank, b.rank, self.n_ranks) and _agree(a.pid, b.pid, self.n_pids)


def _agree(a: int | None, b: int | None, n: int) -> bool:
    if a is not None and b is not None:
        return a == b
    return (a is None and b is None) or n < 2


def restarts_once(scenes: Iterable[Scene]) -> list[Scene]:
    """Return the scenes, with only the first of the lines about each restart."""
    kept: list[Scene] = []
    last = -_SAME_RESTART_LINES - 1
    for scene in scenes:
        if scene.kind is SceneKind.RESTART:
            before, last = last, scene.line
            if last - before <= _SAME_RESTART_LINES:
                continue
        elif scene.kind is SceneKind.PROGRESS:
            last = -_SAME_RESTART_LINES - 1  # the new process is at work: the next one is another
        kept.append(scene)
    return kept


_DAY_S: Final = 86_400
_MIN_TIMED_SHARE: Final = 0.3
"""Tracebacks print no times, so in a log with times only part of the lines have them."""


def in_order(scenes: Sequence[Scene]) -> tuple[list[Scene], bool]:
    """Return the scenes on one timeline, and whether they are sorted by time.

    A line without a time gets that of the line above it. Times of a minority kind (from a library
    that prints another format) count as missing.
    """
    kinds = Counter(s.precision for s in scenes if s.precision is not TimePrecision.NONE)
    if not kinds:
        return sorted(scenes, key=lambda s: s.line), False
    main, n_timed = kinds.most_common(1)[0]
    if n_timed < 2 or n_timed < _MIN_TIMED_SHARE * len(scenes):
        return sorted([replace(s, time_s=None) for s in scenes], key=lambda s: s.line), False
    counted = _days_counted(scenes) if main is TimePrecision.CLOCK else scenes
    timed = _filled(counted, main)
    return sorted(timed, key=lambda s: (s.time_s or 0.0, s.line)), True


def _days_counted(scenes: Sequence[Scene]) -> list[Scene]:
    """Return clock times that keep counting past midnight."""
    counted: list[Scene] = []
    day, last = 0, None
    for scene in scenes:
        if scene.precision is not TimePrecision.CLOCK or scene.time_s is None:
            counted.append(scene)
            continue
        if last is not None and scene.time_s < last - _DAY_S / 2:
            day += 1
        last = scene.time_s
        counted.append(replace(scene, time_s=scene.time_s + day * _DAY_S))
    return counted


def _filled(scenes: Sequence[Scene], main: TimePrecision) -> list[Scene]:
    known = [s.time_s if s.precision is main else None for s in scenes]
    last = next((t for t in known if t is not None), None)
    filled: list[Scene] = []
    for scene, time_s in zip(scenes, known, strict=True):
        last = last if time_s is None else time_s
        filled.append(replace(scene, time_s=last))
    return filled
