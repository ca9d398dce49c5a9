"""Telling whoever watches how far long work has come.

Work on a long trace takes seconds in places that know nothing of a terminal. They ``tell`` what
they are about to do; who wants to know is set by ``watched_by`` for what runs inside of it, in this
thread. Nobody watches unless asked to, and then telling costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

Watcher = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much; 0, 0 is not known."""

_WATCHER: Final[ContextVar[Watcher | None]] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let ``watcher`` know what is told inside of the block, by this thread."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done now: a few words of our own, never text of an input."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(what, done, total)
