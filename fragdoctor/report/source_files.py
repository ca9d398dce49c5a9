"""The program's own files: where they are relative to the source root, and what they hold.

A path in an input can only lead to Python files below that root. A program that was recorded
elsewhere (in a container, by another user) is found by the end of its path.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

from fragdoctor.model.finding import Location
from fragdoctor.report.base import RenderOptions

MAX_SOURCE_BYTES: Final = 2_000_000
MAX_QUOTED: Final = 200
MAX_PATH: Final = 1000


def relative(path: str, look: RenderOptions) -> str:
    """Return a path relative to the root if it is below it, else unchanged; always with ``/``."""
    clean = posixpath.normpath(path.replace("\\", "/"))[-MAX_PATH:]
    for recorded, here in look.path_map:
        if clean == recorded or clean.startswith(f"{recorded.rstrip('/')}/"):
            clean = posixpath.normpath(f"{here}/{clean[len(recorded.rstrip('/')) :]}")
            break
    base = look.source_root.replace("\\", "/").rstrip("/")
    if base and clean.startswith(f"{base}/"):
        return clean[len(base) + 1 :]
    return clean.removeprefix("./") or "unknown"


def source_text(location: Location, look: RenderOptions) -> str:
    """Return the source of a line without its indentation, or "" if the file is not available.

    The path comes from an input, so only Python files below the root are opened, and a line is
    quoted only if it really is inside the function that the input names.
    """
    for _, text in _files(location, look):
        return text.splitlines()[location.line - 1].strip()[:MAX_QUOTED]
    return ""


def file_of(location: Location, look: RenderOptions) -> str | None:
    """Return the file below the root that holds a line, relative to the root, or None."""
    for path, _ in _files(location, look):
        return path.relative_to(look.source_root).as_posix()
    return None


def links_to(locations: Iterable[Location], look: RenderOptions) -> dict[str, str]:
    """Return link targets for the lines of a program, keyed by their text such as ``train.py:88``.

    Only lines that ``file_of`` finds get a link; names that two files share get none.
    """
    found: dict[str, set[str]] = {}
    for location in dict.fromkeys(locations) if look.link else ():
        place = file_of(location, look)
        if place is not None:
            path = quote(str(Path(look.source_root, place)))
            target = look.link.format(path=path, line=location.line)
            found.setdefault(location.at, set()).add(target)
    return {name: min(targets) for name, targets in found.items() if len(targets) == 1}


def _files(location: Location, look: RenderOptions) -> Iterator[tuple[Path, str]]:
    """Yield the files below the root that have the line in the named function, and their text."""
    root = look.source_root
    if not root or location.line < 1:
        return
    for path in _candidates(relative(location.filename, look), root):
        text = _read(path, Path(root).resolve())
        if text is not None and location.line <= len(text.splitlines()) and _holds(text, location):
            yield path, text


def _candidates(filename: str, root: str) -> Iterator[Path]:
    """Yield the path itself, then its endings below the root: it may be from another machine."""
    parts = PurePosixPath(filename.replace("\\", "/")).parts
    if not parts or not parts[-1].endswith(".py") or ".." in parts:
        return
    for i in range(len(parts)):
        if (path := Path(root, *parts[i:])).is_relative_to(root):
            yield path


def _read(path: Path, root: Path) -> str | None:
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(root) or not real.is_file():
            return None
        if real.stat().st_size > MAX_SOURCE_BYTES:
            return None
        return real.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _holds(text: str, location: Location) -> bool:
    """Return whether the innermost function around the line has the recorded name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    name, start = "<module>", 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            end = node.end_lineno or node.lineno
            if node.lineno <= location.line <= end and node.lineno >= start:
                name, start = getattr(node, "name", "<lambda>"), node.lineno
    return name == location.function or location.function.startswith("<")
