"""The loop in which a program takes its steps: whether a round of it is over, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class _Mark:
    """Marks a frame as one that was there, by its ``f_trace``.

    Frames cannot be referred to weakly, holding them would hold the tensors of the program, and
    their addresses are used again at once. As a trace function it does nothing.
    """

    __slots__ = ("line",)

    def __init__(self, line: int) -> None:
        self.line = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Trace nothing."""


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those that called it, outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _innermost_marked(
    frames: Sequence[FrameType], marks: Sequence[_Mark]
) -> tuple[FrameType, _Mark] | None:
    found: tuple[FrameType, _Mark] | None = None
    for frame, mark in zip(frames, marks, strict=False):
        marked: Any = frame.f_trace
        if marked is not mark:
            break
        found = (frame, mark)
    return found


class Loop:
    """Follows the frames that call the optimizer.

    The loop is in the innermost frame that is still the same from one step to the next.
    """

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._depth = 0

    def move_on(self, caller: FrameType) -> None:
        """Note where the optimizer was called for the step that is just complete."""
        if sys.gettrace() is not None:  # a debugger or a coverage tool has the frames
            return
        frames = _frames(caller)
        marks: list[_Mark] = []
        common = 0
        for i, frame in enumerate(frames):
            mark = frame.f_trace
            if i < len(self._marks) and mark is self._marks[i]:
                common = i + 1
                self._marks[i].line = frame.f_lineno
            else:
                mark = frame.f_trace = _Mark(frame.f_lineno)
            marks.append(mark)
        self._depth = common or len(frames)
        self._marks = marks

    def is_in_same_round(self) -> bool:
        """Whether the round of the last step still goes on: what follows the optimizer in it."""
        found = _innermost_marked(_frames(sys._getframe(1)), self._marks)
        return found is not None and found[0].f_lineno > found[1].line

    def at_its_end(self, call: Callable[[], None]) -> None:
        """Call something when the next round begins; never, if none does."""
        found = _innermost_marked(_frames(sys._getframe(1)), self._marks[: self._depth])
        if found is None:
            return
        frame, line = found[0], found[1].line
        went_back = False

        def in_loop(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal went_back
            if event == "line" and frame.f_lineno <= line:
                if went_back:
                    sys.settrace(None)
                    call()
                went_back = True
            elif went_back or event == "return":  # the loop is over, the program goes on
                sys.settrace(None)
                frame.f_trace = None
                return None
            return in_loop

        frame.f_trace = in_loop
        sys.settrace(lambda *_: None)
