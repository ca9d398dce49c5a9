"""HTML made of elements. Every string is escaped, unless it is markup that was made here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from markupsafe import Markup, escape

from fragdoctor.report.escape import visible
from fragdoctor.units import format_count

MAX_SHOWN: Final = 1500
"""The most characters of one text: a file may hold names of megabytes."""

Child = str | Iterable["Child"] | None
"""What an element can hold: text, markup, several of these, or nothing."""

_VOID: Final = frozenset(("input", "link", "meta"))
_LINES: Final = frozenset(
    ("a", "div", "h2", "h3", "li", "meta", "p", "section", "title", "tr", "ul")
)
"""Elements that end a line of the file, so that people can read it."""


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """Return an element.

    In an attribute's name ``_`` stands for ``-``, and one at the end tells it from a word of
    Python: ``class_``. True is an attribute without a value; False and None leave it out.
    """
    head = "".join(
        f" {key}" if value is True else f' {key}="{text(str(value))}"'
        for key, value in ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items())
        if value is not None and value is not False
    )
    end = "" if name in _VOID else f"{joined(*children)}</{name}>"
    line = "\n" if name in _LINES else ""
    return Markup(f"<{name}{head}>{end}{line}")  # noqa: S704 - every part is escaped


def joined(*children: Child) -> Markup:
    """Return some children as markup."""
    return Markup("".join(_flat(children)))  # noqa: S704 - every part is escaped


def text(value: str) -> Markup:
    """Return text with invisible characters made visible; markup stays as it is."""
    if isinstance(value, Markup):
        return value
    n_more = len(value) - MAX_SHOWN
    shown = visible(value[:MAX_SHOWN])
    return escape(f"{shown} ... ({format_count(n_more)} more characters)" if n_more > 0 else shown)


def ours(source: str) -> Markup:
    """Return a file of the package, or data that the package encoded, as markup."""
    return Markup(source)  # noqa: S704 - never a string from an input


def _flat(children: Iterable[Child]) -> Iterator[Markup]:
    for child in children:
        if isinstance(child, str):
            yield text(child)
        elif child is not None:
            yield from _flat(child)
