"""From names on a command line to ranks: which files belong to which, and whether it is a fleet.

More than one snapshot or bundle is a fleet. A folder that holds snapshots is not searched further;
one that holds none is, so that ``rank0/snapshot.pickle`` is found. Messages, statistics and logs
belong to the snapshot of the same folder, rank, or name. Of URLs the names alone decide.
"""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.inputs.bundle_sets import one_of_each_process
from fragdoctor.inputs.bundles import MANIFEST, is_bundle
from fragdoctor.inputs.cases import STDIN
from fragdoctor.inputs.kinds import Kind, kind_of
from fragdoctor.inputs.rank_names import NamedRank, ranks_of
from fragdoctor.inputs.remote import (
    has_pattern,
    is_remote,
    is_remote_folder,
    list_remote,
    without_secrets,
)
from fragdoctor.inputs.source import open_source
from fragdoctor.model.fleet import RankInput, RankSource

MAX_FILES: Final = 100_000
MAX_DEPTH: Final = 6


class _Part(Enum):
    """What a file is to a fleet."""

    RANK = auto()
    NOTE = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Discovery:
    """What the names led to.

    Attributes:
        ranks: the ranks of a fleet, in the order of their paths; one in all is one case.
        ownerless: texts that belong to no rank, such as the log of the whole job.
        case_names: what to read as one case where this is no fleet.
    """

    ranks: tuple[RankInput, ...] = ()
    ownerless: tuple[str, ...] = ()
    case_names: tuple[str, ...] = ()

    @property
    def is_fleet(self) -> bool:
        """Whether more than one rank was found."""
        return len(self.ranks) > 1


@dataclass(slots=True)
class _Found:
    ranks: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    doubtful: list[str] = field(default_factory=list)
    is_expanded: bool = False

    def add(self, path: str, part: _Part) -> None:
        if part is _Part.RANK:
            self.ranks.setdefault(path)
        elif part is _Part.NOTE:
            self.notes.setdefault(path)
        if len(self.ranks) + len(self.notes) > MAX_FILES:
            raise ConfigError(
                f"These are more than {MAX_FILES} files.", hint="Look at a part of them at a time."
            )


def discover(names: Sequence[str]) -> Discovery:
    """Return the ranks that files, directories and patterns lead to.

    Raises:
        InputError: a pattern matches nothing.
        ConfigError: these are more files than anyone means.
    """
    if STDIN in names:
        return Discovery(case_names=tuple(names))
    found = _Found()
    for name in names:
        _take(name, found)
    n_found = len(found.ranks)
    found.ranks = dict.fromkeys(one_of_each_process(list(found.ranks)))
    found.is_expanded |= len(found.ranks) < n_found
    if len(found.ranks) > 1:  # else a name that leads nowhere is an error, not a rank of a job
        found.ranks.update(dict.fromkeys(found.doubtful))
    named = ranks_of([*found.ranks, *found.notes])
    case_names = (*found.ranks, *found.notes) if found.is_expanded else tuple(names)
    if not found.ranks:
        return _of_notes(found, named, case_names)
    own = ranks_of(list(found.ranks))
    beside, ownerless = _owners(list(found.ranks), list(found.notes), named)
    ranks = tuple(
        _rank_input(path, own[path], tuple(sorted(beside.get(path, ()))))
        for path in sorted(found.ranks)
    )
    return Discovery(ranks, tuple(ownerless), case_names)


def inputs_of(paths: Sequence[str]) -> tuple[RankInput, ...]:
    """Return plain paths as ranks, numbered by their names."""
    named = ranks_of(paths)
    return tuple(_rank_input(path, named[path], ()) for path in dict.fromkeys(paths))


def _rank_input(path: str, named: NamedRank, beside: tuple[str, ...]) -> RankInput:
    return RankInput(
        path, beside, named.rank, named.source, named.local_rank, named.job, named.host
    )


def _take(name: str, found: _Found) -> None:
    """Sort one name of the command line in."""
    if is_remote(name):
        _take_remote(name, found)
    elif os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        _take_folder(name, found, 0)
    elif glob.has_magic(name) and not os.path.lexists(name):
        hits = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - keeps the spelling
        if not hits:
            raise InputError(f"Nothing matches {name}.", hint="Check the pattern.")
        found.is_expanded = True
        for hit in hits:
            _take(hit, found)
    else:
        part = _part(name, is_named=True)
        if part is _Part.NOTHING:
            found.doubtful.append(name)
        found.add(name, part)


def _take_remote(url: str, found: _Found) -> None:
    """Sort a URL in: a file as it is named, a pattern or a folder by what the server lists."""
    if has_pattern(url):
        hits = list_remote(url, most=MAX_FILES)
        if not hits:
            raise InputError(f"Nothing matches {without_secrets(url)}.", hint="Check the pattern.")
        found.is_expanded = True
        for hit in hits:
            found.add(hit, _Part.NOTE if is_note(hit) else _Part.RANK)
    elif not place_of(url).lower().endswith(LOOKED_AT) and is_remote_folder(url):
        folder = f"{url.rstrip('/')}/"
        here = listed(folder, list_remote(folder, most=MAX_FILES))
        if not here.ranks and not here.notes:
            raise InputError(
                f"{without_secrets(url)} holds no snapshot, bundle, message or log.",
                hint="Check the URL, and that the server lists what is in it.",
            )
        found.is_expanded = True
        for paths, part in ((here.ranks, _Part.RANK), (here.notes, _Part.NOTE)):
            for path in paths:
                found.add(path, part)
    else:
        found.add(url, _Part.NOTE if is_note(url) else _Part.RANK)


def _take_folder(folder: str, found: _Found, depth: int) -> None:
    """Sort the files of a folder in, and of the folders in it where it holds no snapshot."""
    if is_bundle(folder):
        found.add(folder, _Part.RANK)
        found.is_expanded |= depth > 0
        return
    files, folders = _listing(folder)
    n_before = len(found.ranks)
    for path in files:
        if depth == 0 or path.lower().endswith(LOOKED_AT):
            found.add(path, _part(path))
    found.is_expanded |= depth > 0 and len(found.ranks) > n_before
    if len(found.ranks) > n_before:
        for path in folders:
            if is_bundle(path):
                found.add(path, _Part.RANK)
    elif depth < MAX_DEPTH:
        for path in folders:
            _take_folder(path, found, depth + 1)


def _listing(folder: str) -> tuple[list[str], list[str]]:
    """Return the files and the folders of a folder, sorted; hidden ones and links left out."""
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


def _part(path: str, *, is_named: bool = False) -> _Part:
    """Return what a file is, by its suffix or by what it holds; any text that was named counts."""
    name = path.lower()
    if not os.path.isfile(path) or os.path.basename(path) == MANIFEST:  # noqa: PTH113, PTH119 - never raise
        return _Part.NOTHING
    if name.endswith(SNAPSHOTS):
        return _Part.RANK  # an unreadable snapshot must be heard of, not left out
    try:
        with open_source(path) as stream:
            kind = kind_of(stream.head)
    except (InputError, OSError):
        return _Part.NOTHING
    if kind is Kind.SNAPSHOT or (kind is Kind.ARCHIVE and is_bundle(path)):
        return _Part.RANK
    is_text = kind is Kind.TEXT and (is_named or name.endswith(TEXTS))
    return _Part.NOTE if is_text or kind is Kind.STATS else _Part.NOTHING


def _of_notes(
    found: _Found, named: Mapping[str, NamedRank], case_names: tuple[str, ...]
) -> Discovery:
    """Return the ranks of texts alone: several ranks only where the names say so by the word."""
    by_rank: dict[tuple[str, int], list[str]] = defaultdict(list)
    rest = []
    for path in sorted(found.notes):
        n = named[path]
        if n.rank is not None and n.source is RankSource.NAME:
            by_rank[n.host, n.rank].append(path)
        else:
            rest.append(path)
    if len(by_rank) < 2:
        return Discovery(case_names=case_names)
    ranks = [
        replace(_rank_input(paths[0], named[paths[0]], ()), beside=tuple(paths[1:]))
        for paths in by_rank.values()
    ]
    return Discovery(tuple(sorted(ranks, key=lambda r: r.path)), tuple(rest), case_names)


def _owners(
    ranks: Sequence[str], notes: Sequence[str], named: Mapping[str, NamedRank]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the notes of each rank, and those that belong to none."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    by_rank: dict[int, list[str]] = defaultdict(list)
    by_stem: dict[str, list[str]] = defaultdict(list)
    for path in ranks:
        by_folder[os.path.dirname(path)].append(path)  # noqa: PTH120 - paths of any spelling
        by_stem[_stem(path)].append(path)
        rank = named[path].rank
        if rank is not None:
            by_rank[rank].append(path)
    beside: dict[str, list[str]] = defaultdict(list)
    ownerless = []
    for note in sorted(notes):
        owner = _owner(note, named[note], by_rank, by_stem, by_folder)
        if owner is None:
            ownerless.append(note)
        else:
            beside[owner].append(note)
    return beside, ownerless


def _owner(
    note: str,
    named: NamedRank,
    by_rank: Mapping[int, Sequence[str]],
    by_stem: Mapping[str, Sequence[str]],
    by_folder: Mapping[str, Sequence[str]],
) -> str | None:
    """Return the one rank that a text belongs to: by its rank, its name, then its folder."""
    folder = os.path.dirname(note)  # noqa: PTH120 - paths of any spelling
    for candidates in _candidates(note, named, by_rank, by_stem, by_folder):
        near = [c for c in candidates if os.path.dirname(c) == folder]  # noqa: PTH120 - same
        for choice in (candidates, near):
            if len(choice) == 1:
                return choice[0]
    return None


def _candidates(
    note: str,
    named: NamedRank,
    by_rank: Mapping[int, Sequence[str]],
    by_stem: Mapping[str, Sequence[str]],
    by_folder: Mapping[str, Sequence[str]],
) -> Iterator[Sequence[str]]:
    if named.rank is not None and named.source is RankSource.NAME:
        yield by_rank.get(named.rank, ())
        return  # it says whose it is; nobody else's then
    yield by_stem.get(_stem(note), ())
    if named.rank is not None:
        yield by_rank.get(named.rank, ())
    yield by_folder.get(os.path.dirname(note), ())  # noqa: PTH120 - paths of any spelling


def _stem(path: str) -> str:
    """Return a path up to the first dot of the file's name that ends in no number."""
    folder, name = os.path.split(path)
    words = name.split(".")
    while len(words) > 1 and not words[-1].isdigit():
        words.pop()
    return f"{folder}/{'.'.join(words)}"


MAX_URL_DEPTH: Final = 6


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
        files: as ``inputs.remote.list_remote`` returns them.
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
        if not ranks and depth < MAX_URL_DEPTH:
            _search(below, files_of, folders_of, found, depth + 1)
        elif _is_bundle(files_of.get(below, ())):
            found.ranks.append(below)


def _is_bundle(files: Sequence[str]) -> bool:
    return any(place_of(f).rsplit("/", 1)[-1] == MANIFEST for f in files)


_PACKED: Final = ("", ".gz", ".zst")
SNAPSHOTS: Final = tuple(s + p for s in (".pickle", ".pkl") for p in _PACKED)
TEXTS: Final = tuple(
    s + p for s in (".txt", ".log", ".out", ".err", ".stderr", ".stdout") for p in _PACKED
)
STATS: Final = tuple(s + p for s in (".json", ".jsonl") for p in _PACKED)
LOOKED_AT: Final = (*SNAPSHOTS, *TEXTS, *STATS, ".html", ".zip")
