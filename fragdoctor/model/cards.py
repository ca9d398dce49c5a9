"""What Jupyter shows of a value: the model knows that there is a drawing, not how it is made.

Jupyter asks a value for ``_repr_html_``. Drawing is the business of ``report``, which stands above
the model, so the Python API (``fragdoctor.api``) says once who draws what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_DRAWN_BY: Final[dict[str, Callable[[Any], str]]] = {}


def draw_with(kind: str, drawer: Callable[[Any], str]) -> None:
    """Let ``drawer`` return the HTML of values of the class named ``kind``."""
    _DRAWN_BY[kind] = drawer


def card(value: object) -> str | None:
    """Return the HTML of a value, None (Jupyter then shows its text) where nobody draws it."""
    drawer = _DRAWN_BY.get(type(value).__name__)
    return None if drawer is None else drawer(value)
