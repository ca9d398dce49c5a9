"""Ranks and their notes in a listing of URLs: names alone tell, no file is opened for it.

The rules are those of a folder on disk: one that holds snapshots is not searched further, one with
a manifest is a bundle and stands for its rank as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fragdoctor.fleet.suffixes import SNAPSHOTS, STATS, TEXTS
from fragdoctor.intake.bundle import MANIFEST

MAX_DEPTH: Final = 6


@dataclass(slots=True)
class Listed:
    """URLs of ranks, and of texts and statistics that belong to some of them."""

    ranks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_note(url: str) -> bool:
    """Tell whether a URL is a text or statistics, by its name."""
    name = place_of(url).lower().rsplit("/", 1)[-1]
    return name.endswith(TEXTS) or (name.endswith(STATS) and "stats" in name)


def place_of(url: str) -> str:
    """Return a URL without its query."""
    return url.partition("?")[0]


def listed(folder: str, files: Sequence[str]) -> Listed:
    """Return what a folder holds, of the URLs of all files in and below it.

    Args:
        folder: its URL, with a slash at its end.
        files: as ``readers.remote.list_remote`` returns them.
    """
    files_of: dict[str, list[str]] = defaultdict(list)
    folders_of: dict[str, set[str]] = defaultdict(set)
    for url in files:
        rest = place_of(url)[len(folder) :] if url.startswith(folder) else ""
        parts = [p for p in rest.split("/") if p]
        if not parts or any(p.startswith(".") for p in parts):
            continue
        home = folder
        for part in parts[:-1]:
            folders_of[home].add(f"{home}{part}/")
            home = f"{home}{part}/"
        files_of[home].append(url)
    found = Listed()
    _search(folder, files_of, folders_of, found, 0)
    return found


def _search(
    folder: str,
    files_of: Mapping[str, Sequence[str]],
    folders_of: Mapping[str, set[str]],
    found: Listed,
    depth: int,
) -> None:
    files = files_of.get(folder, ())
    if _is_bundle(files):
        found.ranks.append(folder)
        return
    snapshots = [f for f in files if place_of(f).lower().endswith(SNAPSHOTS)]
    # Of a zip only its content tells whether it is a bundle; beside snapshots it hardly is one.
    ranks = snapshots or [f for f in files if place_of(f).lower().endswith(".zip")]
    found.ranks += ranks
    found.notes += [f for f in files if is_note(f)]
    for below in sorted(folders_of.get(folder, ())):
        if not ranks and depth < MAX_DEPTH:
            _search(below, files_of, folders_of, found, depth + 1)
        elif _is_bundle(files_of.get(below, ())):
            found.ranks.append(below)


def _is_bundle(files: Sequence[str]) -> bool:
    return any(place_of(f).rsplit("/", 1)[-1] == MANIFEST for f in files)
