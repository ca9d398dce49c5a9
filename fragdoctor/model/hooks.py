"""What outer layers hang into inner ones: a display of progress, and drawings for Jupyter.

Work on a long trace takes seconds in places that know nothing of a terminal; values are drawn by
``report``, which stands above the model. Both are set from outside, and cost nothing where they
are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

_DRAWN_BY: Final[dict[tuple[str, bool], Callable[[Any], str]]] = {}


def draw_with(kind: str, drawer: Callable[[Any], str], *, as_page: bool = False) -> None:
    """Let ``drawer`` return the HTML of values of the class named ``kind``: a card, or a page."""
    _DRAWN_BY[kind, as_page] = drawer


def drawn(value: object, *, as_page: bool = False) -> str | None:
    """Return the HTML of a value; None (Jupyter then shows its text) where nothing draws it."""
    drawer = _DRAWN_BY.get((type(value).__name__, as_page))
    return None if drawer is None else drawer(value)


Watcher = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much; 0, 0 is not known."""

_WATCHER: Final[ContextVar[Watcher | None]] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` with the progress that this thread reports inside of the block."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def report_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done now: a few words of our own, never text of an input."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(what, done, total)
