"""What runs inside the rehearsed program: fake GPUs, real memory requests.

Nothing here imports more than PyTorch, the standard library and the plain modules of fragdoctor:
the program's Python has its own packages, and need not have fragdoctor's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final, NoReturn

_MISSING: Final = object()


def put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` is closed; one that was not there disappears again."""
    before = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
    setattr(owner, name, value)
    if before is _MISSING:
        undo.callback(_remove, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def put_all(undo: ExitStack, owner: Any, values: Mapping[str, Any]) -> None:
    """Set attributes until ``undo`` is closed."""
    for name, value in values.items():
        put(undo, owner, name, value)


def _remove(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def leave(code: int) -> NoReturn:
    """End without what Python does at the end: threads of the program may wait for ever."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
