"""Hooks by which outer layers extend inner ones: a progress display, and drawings for Jupyter.

Work on a long trace takes seconds in places that know nothing about a terminal, and values are
drawn by ``report``, which is a layer above the model. Outer layers set both hooks; a hook that is
not set costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Final

_DRAWN_BY: Final[dict[tuple[str, bool], tuple[str, str]]] = {}


def draw_with(kind: str, module: str, function: str, *, as_page: bool = False) -> None:
    """Let a function return the HTML of values of the class named ``kind``: a card, or a page.

    Its module is loaded when a value is drawn.
    """
    _DRAWN_BY[kind, as_page] = (module, function)


def drawn(value: object, *, as_page: bool = False) -> str | None:
    """Return the HTML of a value, or None if nothing draws it (Jupyter then shows its text)."""
    found = _DRAWN_BY.get((type(value).__name__, as_page))
    return None if found is None else str(getattr(import_module(found[0]), found[1])(value))


Watcher = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and the total; 0, 0 means not known."""

_WATCHER: Final[ContextVar[Watcher | None]] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` with the progress that this thread reports inside the block."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def report_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Report what is being done now, in a few words of our own, never text from an input."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(what, done, total)
