"""Choose the files of a folder, on disk or behind a URL, that belong to a fleet or a check.

A folder with a manifest is a bundle, and the whole folder stands for its rank. For a fleet, the
subfolders of a folder are searched only if the folder itself holds no snapshot. Several bundles of
one run are ordered by how much they explain, and each process keeps only its best one.
"""

from __future__ import annotations

import glob
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final

from msgspec import Struct

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.inputs.bundles import MANIFEST, is_bundle, open_bundle
from fragdoctor.inputs.classify import (
    KNOWN_SUFFIXES,
    SNAPSHOT_SUFFIXES,
    STATS_SUFFIXES,
    STDIN,
    TEXT_SUFFIXES,
    InputKind,
    kind_of,
)
from fragdoctor.inputs.confinement import check_place, is_allowed
from fragdoctor.model.case import BundleFacts
from fragdoctor.opening import first_free

MAX_DEPTH: Final = 6
MAX_CHECKED: Final = 10_000
_DEEP: Final = re.compile(r"(?<![^/])\*\*(?:/|\Z)")


class Part(Enum):
    """What a file is to a fleet."""

    RANK = auto()
    NOTE = auto()
    NOTHING = auto()


def search(
    tree: DiskTree | UrlTree, folder: str, depth: int = 0
) -> Iterator[tuple[str, Part, int]]:
    """Yield what a folder holds for a fleet: each part's path, kind, and depth.

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
        """Return the files and the subfolders of a folder, sorted, without hidden ones."""
        check_place(folder)
        files, folders = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif os.path.isfile(entry.path):  # noqa: PTH113 - never raises, unlike the entry
                        files.append(entry.path)
        except OSError as e:
            raise InputError(f"{folder} cannot be read: {e.strerror or e}.") from e
        return sorted(files), sorted(folders)

    def part(self, file: str, depth: int) -> Part:
        """Return what a file is; in subfolders, only files with a known suffix are opened."""
        is_meant = depth == 0 or file.lower().endswith(KNOWN_SUFFIXES)
        return part_of(file) if is_meant else Part.NOTHING


def part_of(path: str, *, is_named: bool = False) -> Part:
    """Return what a file is, by its suffix or content; any text that the user named is a note."""
    name = path.lower()
    if not os.path.isfile(path) or os.path.basename(path) == MANIFEST:  # noqa: PTH113, PTH119 - never raise
        return Part.NOTHING
    if name.endswith(SNAPSHOT_SUFFIXES):
        return Part.RANK  # an unreadable snapshot must be reported, not left out
    kind = kind_of(path)
    if kind is None:
        return Part.NOTHING
    if kind.may_be_snapshot or kind is InputKind.BUNDLE:
        return Part.RANK
    is_text = kind.is_text and (is_named or name.endswith(TEXT_SUFFIXES))
    return Part.NOTE if is_text or kind is InputKind.STATS else Part.NOTHING


class UrlTree:
    """Folders of an object store or a web server, built from a listing without opening a file.

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
        """Return the files and the subfolders of a folder, without hidden ones."""
        files = self._files[folder]
        if any(path_of_url(f).lower().endswith(SNAPSHOT_SUFFIXES) for f in files):
            # Only a zip's content shows whether it is a bundle; beside snapshots that is unlikely.
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
    """Return whether a URL's name is that of a text or of statistics."""
    name = path_of_url(url).lower().rsplit("/", 1)[-1]
    return name.endswith(TEXT_SUFFIXES) or (name.endswith(STATS_SUFFIXES) and "stats" in name)


def path_of_url(url: str) -> str:
    """Return a URL without its query."""
    return url.partition("?")[0]


def expand(names: Sequence[str]) -> tuple[list[str], list[tuple[str, InputError]]]:
    """Return all inputs of a check, in the order given, and the names without inputs, with errors.

    A directory is searched recursively for snapshots, bundles, statistics, texts and logs, without
    hidden files and links to directories. A pattern that the shell left alone is expanded.

    Raises:
        ConfigError: standard input is given twice, or there are more files than anyone can have
            meant.
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
                f"There are more than {MAX_CHECKED} files.", hint="Check some of them at a time."
            )
    return list(found), missing


def _expanded(name: str) -> Iterator[str]:
    if name != STDIN and os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        yield from _inputs_under(name)
    elif glob.has_magic(name) and not os.path.lexists(name):
        for hit in matches(name):
            yield from _expanded(hit)
    else:
        yield name


def matches(pattern: str) -> list[str]:
    """Return the paths that a pattern matches, spelled the way the pattern is.

    Raises:
        InputError: one of the paths may not be read; the error does not name it.
    """
    hits = sorted({*_matches(pattern)})
    if not all(is_allowed(hit) for hit in hits):
        raise InputError(
            f"{pattern} leads out of the folder that may be read.",
            hint="A link below it does; give a pattern that skips the link.",
        )
    return hits


def _matches(pattern: str) -> Iterator[str]:
    """Yield what a pattern matches; ``**`` does not follow links, which may lead in a circle."""
    deep = _DEEP.search(pattern)
    if deep is None:
        yield from glob.iglob(pattern)  # noqa: PTH207 - keeps the spelling
        return
    start, rest = pattern[: deep.start()], pattern[deep.end() :] or "*"
    for base in glob.iglob(start) if start else [""]:  # noqa: PTH207 - keeps the spelling
        if not is_allowed(base):
            yield base
            continue
        for folder, below, _files in os.walk(base or "."):
            below[:] = [name for name in below if not name.startswith(".")]
            here = glob.escape(folder if base else folder[2:])
            yield from _matches(os.path.join(here, rest))  # noqa: PTH118 - keeps the spelling


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


_ORDER: Final = {"oom": 0, "signal": 1, "exit": 2}


class FoundBundle(Struct, frozen=True):
    """One bundle of a run, with the facts in its manifest."""

    path: Path
    facts: BundleFacts


def find_bundles(directory: Path) -> tuple[FoundBundle, ...]:
    """Return the bundles in a directory, starting with the one that explains the most.

    A failure that ended its program comes before one that was caught; among equals the earliest
    comes first, because later failures, also on other ranks, are often consequences. After failures
    come signals, then exits; the clean exit of a program that caught its failures comes before all
    caught ones.
    """
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        bundle = None if path.name.startswith(".") else _read(str(path))
        if bundle is not None:
            found.append(bundle)
    return tuple(sorted(found, key=telling_order))


def telling_order(found: FoundBundle) -> tuple[int, int, str, str]:
    """Return the sort key of ``find_bundles``."""
    facts = found.facts
    # A failure that has no bundle of its own may also have ended the program.
    is_fatal = facts.ended_program or facts.exception.endswith("OutOfMemoryError")
    order = 0 if is_fatal else _ORDER.get(facts.reason, len(_ORDER))
    if facts.reason == "exit" and facts.n_ooms and not facts.exception:
        # The program ended well: its recording shows the caught failures and everything else.
        return 0, 1, facts.time, found.path.name
    return order, 0 if is_fatal else 2, facts.time, found.path.name


def pack(bundle: Path) -> Path:
    """Turn a bundle into a zip file beside it, remove the directory, and return the zip's path.

    The zip appears under its final name only when complete, and never replaces another file.

    Raises:
        OSError: the zip cannot be written; the directory is left untouched.
    """
    target = first_free(bundle.parent, bundle.name, ".zip")
    temporary = bundle.with_name(f".{bundle.name}.{os.getpid()}.zip.tmp")
    files: Sequence[Path] = sorted(p for p in bundle.iterdir() if p.is_file())
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in files:
                archive.write(file, f"{bundle.name}/{file.name}")
        with temporary.open("rb") as done:
            os.fsync(done.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    for file in files:
        file.unlink()
    bundle.rmdir()
    return target


Process = tuple[str, int | None, int]


def one_of_each_process(paths: Sequence[str]) -> list[str]:
    """Return the paths, keeping only the most informative bundle of each process.

    A path that is not a bundle, or whose bundle does not name its process, stays.
    """
    best: dict[Process, FoundBundle] = {}
    kept = []
    for path in paths:
        found = _read(path)
        if found is None or found.facts.pid is None:
            kept.append(path)
            continue
        process = (found.facts.host, found.facts.rank, found.facts.pid)
        known = best.get(process)
        if known is None or telling_order(found) < telling_order(known):
            best[process] = found
    chosen = {str(b.path) for b in best.values()} | set(kept)
    return [path for path in paths if str(Path(path)) in chosen or path in chosen]


def _read(path: str) -> FoundBundle | None:
    if "://" in path or not is_bundle(path):
        return None
    try:
        with open_bundle(path) as bundle:
            return FoundBundle(Path(path), bundle.facts)
    except InputError:
        return None  # written by another program; the user sees why if the path is given by name
