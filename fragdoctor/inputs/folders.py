"""Which files of a folder, on disk or behind a URL, are meant: for a fleet, and for a check.

A folder with a manifest is a bundle and stands for its rank as a whole. For a fleet, one that holds
snapshots is not searched further, and one that holds none is.
"""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, Protocol

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.inputs.bundles import MANIFEST, is_bundle
from fragdoctor.inputs.classify import (
    KNOWN_SUFFIXES,
    SNAPSHOT_SUFFIXES,
    STATS_SUFFIXES,
    STDIN,
    TEXT_SUFFIXES,
    Kind,
    kind_of,
)

MAX_DEPTH: Final = 6
MAX_CHECKED: Final = 10_000


class Part(Enum):
    """What a file is to a fleet."""

    RANK = auto()
    NOTE = auto()
    NOTHING = auto()


class Tree(Protocol):
    """A folder with all that is in it."""

    def is_bundle(self, folder: str) -> bool:
        """Return whether a folder has a manifest."""
        ...

    def listing(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the files and the folders of a folder, sorted; hidden ones left out."""
        ...

    def part(self, file: str, depth: int) -> Part:
        """Return what a file is, so many folders below the one that was named."""
        ...


def search(tree: Tree, folder: str, depth: int = 0) -> Iterator[tuple[str, Part, int]]:
    """Yield what a folder holds for a fleet: its path, what it is, and how deep it lies.

    Raises:
        InputError: a folder cannot be listed.
    """
    if tree.is_bundle(folder):
        yield folder, Part.RANK, depth
        return
    files, folders = tree.listing(folder)
    has_rank = False
    for path in files:
        part = tree.part(path, depth)
        has_rank |= part is Part.RANK
        if part is not Part.NOTHING:
            yield path, part, depth
    for below in folders:
        if not has_rank and depth < MAX_DEPTH:
            yield from search(tree, below, depth + 1)
        elif tree.is_bundle(below):
            yield below, Part.RANK, depth


class DiskTree:
    """Folders on disk; links to folders are not followed."""

    def is_bundle(self, folder: str) -> bool:
        """Return whether a folder has a manifest."""
        return is_bundle(folder)

    def listing(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the files and the folders of a folder, sorted; hidden ones left out."""
        files, folders = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file():
                        files.append(entry.path)
        except OSError as e:
            raise InputError(f"{folder} cannot be read: {e.strerror or e}.") from e
        return sorted(files), sorted(folders)

    def part(self, file: str, depth: int) -> Part:
        """Return what a file is; further down only files with a known suffix are looked at."""
        is_meant = depth == 0 or file.lower().endswith(KNOWN_SUFFIXES)
        return part_of(file) if is_meant else Part.NOTHING


def part_of(path: str, *, is_named: bool = False) -> Part:
    """Return what a file is, by its suffix or by what it holds; any text that was named counts."""
    name = path.lower()
    if not os.path.isfile(path) or os.path.basename(path) == MANIFEST:  # noqa: PTH113, PTH119 - never raise
        return Part.NOTHING
    if name.endswith(SNAPSHOT_SUFFIXES):
        return Part.RANK  # an unreadable snapshot must be heard of, not left out
    kind = kind_of(path)
    if kind is None:
        return Part.NOTHING
    if kind.may_be_snapshot or kind is Kind.BUNDLE:
        return Part.RANK
    is_text = kind.is_text and (is_named or name.endswith(TEXT_SUFFIXES))
    return Part.NOTE if is_text or kind is Kind.STATS else Part.NOTHING


class UrlTree:
    """Folders of an object store or a web server, from a listing: no file is opened for it.

    Args:
        folder: the URL of the folder, with a slash at its end.
        files: the URLs of all files in and below it.
    """

    def __init__(self, folder: str, files: Sequence[str]) -> None:
        self._files: dict[str, list[str]] = defaultdict(list)
        self._folders: dict[str, set[str]] = defaultdict(set)
        for url in files:
            rest = path_of_url(url)[len(folder) :] if url.startswith(folder) else ""
            parts = [p for p in rest.split("/") if p]
            if not parts or any(p.startswith(".") for p in parts):
                continue
            home = folder
            for part in parts[:-1]:
                self._folders[home].add(f"{home}{part}/")
                home = f"{home}{part}/"
            self._files[home].append(url)

    def is_bundle(self, folder: str) -> bool:
        """Return whether a folder has a manifest."""
        return any(path_of_url(f).rsplit("/", 1)[-1] == MANIFEST for f in self._files[folder])

    def listing(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the files and the folders of a folder; hidden ones left out."""
        files = self._files[folder]
        if any(path_of_url(f).lower().endswith(SNAPSHOT_SUFFIXES) for f in files):
            # Only its content shows whether a zip is a bundle; beside snapshots it is unlikely.
            files = [f for f in files if not path_of_url(f).lower().endswith(".zip")]
        return files, sorted(self._folders[folder])

    def part(self, file: str, depth: int) -> Part:
        """Return what a file is, by its name."""
        del depth
        if is_note(file):
            return Part.NOTE
        is_rank = path_of_url(file).lower().endswith((*SNAPSHOT_SUFFIXES, ".zip"))
        return Part.RANK if is_rank else Part.NOTHING


def is_note(url: str) -> bool:
    """Return whether a URL is a text or statistics, by its name."""
    name = path_of_url(url).lower().rsplit("/", 1)[-1]
    return name.endswith(TEXT_SUFFIXES) or (name.endswith(STATS_SUFFIXES) and "stats" in name)


def path_of_url(url: str) -> str:
    """Return a URL without its query."""
    return url.partition("?")[0]


def expand(names: Sequence[str]) -> tuple[list[str], list[tuple[str, InputError]]]:
    """Return every input of a check, in the order given, and the names that led to none, and why.

    A directory is searched through for snapshots, bundles, statistics, texts and logs; hidden
    files are left out, and so are links to directories. A pattern that the shell left alone is
    expanded.

    Raises:
        ConfigError: standard input is given twice, or there are more files than anyone means.
    """
    if list(names).count(STDIN) > 1:
        raise ConfigError("Standard input is given twice.", hint="Give - once.")
    found: dict[str, None] = {}
    missing: list[tuple[str, InputError]] = []
    for name in names:
        try:
            paths = list(_expanded(name))
        except InputError as e:
            missing.append((name, e))
            continue
        found.update(dict.fromkeys(paths))
        if not paths:
            missing.append((name, _nothing(name)))
        if len(found) > MAX_CHECKED:
            raise ConfigError(
                f"These are more than {MAX_CHECKED} files.", hint="Check a part of them at a time."
            )
    return list(found), missing


def _expanded(name: str) -> Iterator[str]:
    if name != STDIN and os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        yield from _inputs_under(name)
    elif glob.has_magic(name) and not os.path.lexists(name):
        for hit in sorted(glob.glob(name, recursive=True)):  # noqa: PTH207 - keeps the spelling
            yield from _expanded(hit)
    else:
        yield name


def _inputs_under(folder: str) -> Iterator[str]:
    tree = DiskTree()
    if tree.is_bundle(folder):
        yield folder
        return
    files, folders = tree.listing(folder)
    yield from (f for f in files if part_of(f) is not Part.NOTHING)
    for below in folders:
        yield from _inputs_under(below)


def _nothing(name: str) -> InputError:
    if os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        return InputError(
            f"{name} holds no snapshot, statistics, message or log.", hint="Check the directory."
        )
    return InputError(f"Nothing matches {name}.", hint="Check the pattern.")
