"""Where a result points: the user's file below the root of the sources, or the input itself.

Nothing is looked up because an input mentions it, but Python files below that root: a program that
was recorded elsewhere (in a container, by another user) is found by the end of its path.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote

from fragdoctor.model.finding import Location
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.source_line import file_of

MAX_LINE: Final = 2**31
_MAX_PATH: Final = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """A file and a line of it; ``line`` is None where it is unknown.

    ``path`` is relative to the root of the sources where the file lies below it; hostile text.
    """

    path: str
    line: int | None = None
    function: str = ""

    @property
    def is_relative(self) -> bool:
        """Whether the path is meant from the root of the sources."""
        return not self.path.startswith("/") and ":" not in self.path[:3]

    @property
    def uri(self) -> str:
        """Return the path as a URI reference: relative, or ``file:///...``; ASCII."""
        text = quote(self.path.encode("utf-8", "replace"), safe="/-._~")
        if self.is_relative:
            return text
        return f"file://{text}" if text.startswith("/") else f"file:///{text}"


def place_of(location: Location, look: RenderOptions) -> Place:
    """Return where a line of the user's program is, seen from the root of the sources."""
    line = location.line if 0 < location.line < MAX_LINE else None
    path = relative(location.filename or "unknown", look)
    place = Place(path, line, location.function[:_MAX_PATH])
    if place.is_relative or not look.source_root:
        return place
    found = file_of(location, look.source_root)
    return place if found is None else replace(place, path=found)


def place_of_input(name: str, look: RenderOptions) -> Place:
    """Return the input itself as a place."""
    return Place("stdin" if name in ("-", "standard input") else relative(name, look))


def relative(path: str, look: RenderOptions) -> str:
    """Return a path below the root as relative to it, any other as it is, with ``/``."""
    clean = posixpath.normpath(path.replace("\\", "/"))[-_MAX_PATH:]
    for recorded, here in look.path_map:
        if clean == recorded or clean.startswith(f"{recorded.rstrip('/')}/"):
            clean = posixpath.normpath(f"{here}/{clean[len(recorded.rstrip('/')) :]}")
            break
    base = look.source_root.replace("\\", "/").rstrip("/")
    if base and clean.startswith(f"{base}/"):
        return clean[len(base) + 1 :]
    return clean.removeprefix("./") or "unknown"
