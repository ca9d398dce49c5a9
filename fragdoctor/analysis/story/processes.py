"""Which process a line belongs to, as far as the log says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.story import Scene, SceneKind

_SAME_RESTART_LINES: Final = 40
"""Lines about one restart: the agent that announces it, and the workers that start."""


@dataclass(frozen=True, slots=True)
class Source:
    """What tells the writers of a log apart; None is "not printed"."""

    rank: int | None
    pid: int | None


class Processes:
    """Tells whether two lines of one log come from the same process.

    A line that names no rank is nobody's in a log of several ranks; in a log of one process all
    lines are its own. After a restart every process is a new one.
    """

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.n_ranks = len({s.rank for s in scenes if s.rank is not None})
        self.n_pids = len({s.pid for s in scenes if s.pid is not None})
        self._restarts = restart_lines(scenes)

    @property
    def n_restarts(self) -> int:
        """Restarts, several lines about one counted once."""
        return len(self._restarts)

    def generation(self, line: int) -> int:
        """Return how many restarts lie before a line."""
        return bisect_right(self._restarts, line)

    def may_be_same(self, a: Scene, b: Scene) -> bool:
        """Tell whether two lines come from one process as far as ranks and pids are printed."""
        if self.generation(a.line) != self.generation(b.line):
            return False
        return _agree(a.rank, b.rank, self.n_ranks) and _agree(a.pid, b.pid, self.n_pids)


def _agree(a: int | None, b: int | None, n: int) -> bool:
    if a is not None and b is not None:
        return a == b
    return (a is None and b is None) or n < 2


def restart_lines(scenes: Iterable[Scene]) -> list[int]:
    """Return the lines of restarts, ascending, those about the same one left out."""
    lines: list[int] = []
    last = -_SAME_RESTART_LINES - 1
    for scene in scenes:
        if scene.kind is SceneKind.RESTART:
            if scene.line - last > _SAME_RESTART_LINES:
                lines.append(scene.line)
            last = scene.line
        elif scene.kind is SceneKind.PROGRESS:
            last = -_SAME_RESTART_LINES - 1  # the new process is at work: the next is another one
    return lines
