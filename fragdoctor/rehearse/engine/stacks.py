"""Python stacks of requests, each kept once, as PyTorch's recorder would have them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ENGINE: Final = str(Path(__file__).parent)
_NOT_USERS: Final = ("<", ENGINE, str(Path(os.__file__).parent))
_ENGINE_CALL: Final = "_engine_run_backward"
Frame = dict[str, Any]


class Stacks:
    """Stacks by number, and the names of operations by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[tuple[Any, int], ...]] = []
        self._names: dict[str, int] = {}
        self._frames: dict[tuple[CodeType, int], Frame] = {}
        self._kept: dict[int, CodeType | None] = {}
        self._outermost: CodeType | None = None
        self._held: list[CodeType] = []  # their ids stay theirs
        self._shown: dict[int, list[Frame]] = {}
        self.names: list[str] = []
        self.last = -1

    def here(self, *, in_backward: bool) -> int:
        """Return the number of the stack of the code that asks for memory.

        Args:
            in_backward: the autograd engine is at work. On a GPU it works in a thread of its own,
                which has no Python frames but those of hooks and functions that it calls.
        """
        frame: FrameType | None = sys._getframe(1)
        key: list[int] = []
        add = key.append
        kept = self._kept
        outermost = self._outermost
        while frame is not None:
            code = frame.f_code
            if code is outermost or (in_backward and code.co_name == _ENGINE_CALL):
                break
            number = id(code)
            if number not in kept:
                kept[number] = None if code.co_filename.startswith(ENGINE) else code
                self._held.append(code)
            if kept[number] is not None:
                add(number)
                add(frame.f_lasti)
            frame = frame.f_back
        place = tuple(key)
        found = self._numbers.get(place)
        if found is None:
            found = self._numbers[place] = len(self._stacks)
            self._stacks.append(tuple((kept[key[i]], key[i + 1]) for i in range(0, len(key), 2)))
        self.last = found
        return found

    def begin_below(self, code: CodeType) -> None:
        """Leave out the frame of a function, and what calls it: the program begins below it."""
        self._outermost = code

    def operation(self, name: str) -> int:
        """Return the number of an operation's name."""
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = len(self.names)
            self.names.append(name)
        return found

    def frames(self, number: int) -> list[Frame]:
        """Return a stack as a snapshot has it, innermost frame first; [] for -1.

        Equal stacks are one list, equal frames one dict: the pickle refers to them.
        """
        if number < 0:
            return _NO_FRAMES
        found = self._shown.get(number)
        if found is None:
            found = self._shown[number] = [self._frame(*place) for place in self._stacks[number]]
        return found

    def _frame(self, code: CodeType, instruction: int) -> Frame:
        found = self._frames.get((code, instruction))
        if found is None:
            found = {
                "name": code.co_name,
                "filename": code.co_filename,
                "line": _line(code, instruction),
            }
            self._frames[code, instruction] = found
        return found


_NO_FRAMES: list[Frame] = []


def _line(code: CodeType, instruction: int) -> int:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end:
            return number if number is not None else line
    return line


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: neither installed nor of Python itself."""
    return not (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith(_NOT_USERS)
    )
