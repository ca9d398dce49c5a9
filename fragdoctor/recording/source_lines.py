"""The source around the user's lines that allocate, so that a report shows it on any machine."""

from __future__ import annotations

import contextlib
import os
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

from .bundle_writer import write_json
from .object_search import is_users

FORMAT = "fragdoctor-sources"
VERSION = 1
_AROUND = 2
_MAX_SITES = 2_000
_MAX_FILE_BYTES = 2_000_000
_MAX_LINE = 200


@contextlib.contextmanager
def passed_through(memory: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have PyTorch write its snapshots as ``change`` returns them."""
    make = memory._snapshot
    memory._snapshot = lambda *args, **kwargs: change(make(*args, **kwargs))
    try:
        yield
    finally:
        memory._snapshot = make


def user_lines(snapshot: dict[str, Any]) -> dict[str, set[int]]:
    """Return the lines of the user's files in the stacks of a snapshot, by file."""
    found: dict[str, set[int]] = {}
    own: dict[str, bool] = {}
    seen = set()
    n_sites = 0
    for frames in _stacks(snapshot):
        if id(frames) in seen:
            continue
        seen.add(id(frames))
        for frame in frames:
            name, line = frame.get("filename", ""), frame.get("line", 0)
            if name not in own:
                own[name] = is_users(name) and not name.endswith((".cpp", ".cu", ".h", ".so"))
            if own[name] and line > 0 and line not in found.get(name, ()):
                found.setdefault(name, set()).add(line)
                n_sites += 1
        if n_sites >= _MAX_SITES:
            break
    return found


def _stacks(snapshot: dict[str, Any]) -> Iterator[list[Any]]:
    for trace in snapshot.get("device_traces", ()):
        for event in reversed(trace):
            yield event.get("frames", [])
    for segment in snapshot.get("segments", ()):
        for block in segment.get("blocks", ()):
            yield block.get("frames", [])


def write_sources(path: str, lines_of: dict[str, set[int]], unchanged_since: float) -> None:
    """Write lines of files with their surroundings, except from files changed since a time (s).

    The present content of a changed file is not what runs.
    """
    files = {}
    for name, lines in lines_of.items():
        text = _lines_of(name, unchanged_since)
        wanted = {n for line in lines for n in range(line - _AROUND, line + _AROUND + 1)}
        kept = {n: text[n - 1].rstrip()[:_MAX_LINE] for n in wanted if 0 < n <= len(text)}
        if kept:
            files[name] = {str(n): kept[n] for n in sorted(kept)}
    write_json(path, {"format": FORMAT, "version": VERSION, "files": files})


def _lines_of(name: str, unchanged_since: float) -> list[str]:
    try:
        state = os.stat(name)
        if state.st_mtime > unchanged_since or state.st_size > _MAX_FILE_BYTES:
            return []
        with tokenize.open(name) as f:
            return f.read().splitlines()
    except (OSError, SyntaxError, ValueError):
        # A notebook cell is not a file; IPython keeps its lines here.
        cache = getattr(sys.modules.get("linecache"), "cache", {})
        entry = cache.get(name)
        return list(entry[2]) if type(entry) is tuple and len(entry) == 4 else []
