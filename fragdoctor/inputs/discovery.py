"""Turn the names on a command line into ranks, and tell whether they make up a fleet.

More than one snapshot or bundle is a fleet. Messages, statistics and logs belong to the snapshot
with the same folder, rank, or name.

In a name, the word ``rank`` counts first, then the one number that enumerates the names. File names
hold other numbers as well: dates, process ids, ports, steps. None of these is mistaken for a rank:
a bare number counts only if it covers a dense range starting at 0 or 1 while the rest of the name
stays the same.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.inputs.classify import KNOWN_SUFFIXES, STDIN
from fragdoctor.inputs.folders import (
    DiskTree,
    Part,
    UrlTree,
    is_note,
    matches,
    one_of_each_process,
    part_of,
    path_of_url,
    search,
)
from fragdoctor.inputs.remote import (
    has_pattern,
    is_remote,
    is_remote_folder,
    list_remote,
    without_secrets,
)
from fragdoctor.model.fleet import RankInput, RankSource

_JOIN: Final = r"[-_.=: ]?"
_LOCAL: Final = re.compile(
    rf"(?<![a-z])local{_JOIN}(?:rank|device|gpu){_JOIN}(\d{{1,6}})(?!\d)", re.IGNORECASE
)
_RANK: Final = re.compile(
    rf"(?<![a-z])(?:global{_JOIN})?rank{_JOIN}(\d{{1,6}})(?!\d)", re.IGNORECASE
)
_SHORT: Final = re.compile(r"(?<![a-z0-9])r(\d{1,6})(?![a-z0-9])", re.IGNORECASE)
_HOST: Final = re.compile(rf"(?<![a-z])(?:host|node|machine){_JOIN}([a-z0-9]+)", re.IGNORECASE)
_JOB: Final = re.compile(rf"(?<![a-z])job{_JOIN}([a-z0-9]+)", re.IGNORECASE)
_DATE: Final = re.compile(
    r"(?<!\d)(?:19|20)\d\d([-_.]?)[01]\d\1[0-3]\d"
    r"(?:[-_ T.]?\d\d[-_.:h]?\d\d(?:[-_.:m]?\d\d)?)?(?!\d)"
    r"|(?<!\d)\d\d[-_:.]\d\d[-_:.]\d\d(?!\d)"
)
# A number after one of these words is known to count something other than ranks.
_OTHER: Final = re.compile(
    r"(?<![a-z])(?:pid|port|iter|iteration|step|epoch|batch|seed|phase|stage|attempt|try|restart"
    r"|run|exp|version|ver|v|part|job|node|host|machine|size|world|bs|lr|torch|py|layers?"
    r"|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[-_.=: ]?$",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"\d+")
_MAX_LENGTH: Final = 4096
_DENSE: Final = 0.5


def ranks_of(paths: Sequence[str]) -> dict[str, RankInput]:
    """Return what the names say, by path. Only the set of names matters, not their order."""
    said = {path: _said(path) for path in sorted(set(paths))}
    _take_unique(said, {p: n.local_rank for p, n in said.items()}, RankSource.NAME)
    open_paths = [p for p, n in said.items() if n.rank is None]
    _take_unique(said, {p: _last(_SHORT, p) for p in open_paths}, RankSource.NAME)
    open_paths = [p for p, n in said.items() if n.rank is None and n.local_rank is None]
    _take_unique(said, _counted(open_paths), RankSource.NUMBER)
    return said


def _said(path: str) -> RankInput:
    """Return what a name says by itself, without looking at the others."""
    name = path[-_MAX_LENGTH:].replace("\\", "/")
    local = _LOCAL.findall(name)
    rank = _last(_RANK, _LOCAL.sub("local", name))
    return RankInput(
        path,
        rank=rank,
        source=RankSource.UNKNOWN if rank is None else RankSource.NAME,
        local_rank=int(local[-1]) if local else None,
        job=_word(_JOB, name),
        host=_word(_HOST, name),
    )


def _last(pattern: re.Pattern[str], name: str) -> int | None:
    """Return the number in the last match: the file's name wins over its folders' names."""
    found = pattern.findall(name[-_MAX_LENGTH:])
    return int(found[-1]) if found else None


def _word(pattern: re.Pattern[str], name: str) -> str:
    found: list[str] = pattern.findall(name)
    return found[-1][:60] if found else ""


def _take_unique(
    said: dict[str, RankInput], numbers: Mapping[str, int | None], source: RankSource
) -> None:
    """Take the numbers as ranks if they are distinct and none of them is a known rank."""
    new = {p: n for p, n in numbers.items() if n is not None and said[p].rank is None}
    known = {n.rank for n in said.values() if n.rank is not None}
    if len(set(new.values())) < len(new) or known & set(new.values()):
        return
    for path, number in new.items():
        said[path] = replace(said[path], rank=number, source=source)


def _counted(paths: Iterable[str]) -> dict[str, int | None]:
    """Return the number that enumerates names which are otherwise the same, by path."""
    alike: dict[str, list[tuple[str, list[tuple[int, bool]]]]] = defaultdict(list)
    for path in paths:
        template, numbers = _fields(path)
        alike[template].append((path, numbers))
    found: dict[str, int | None] = {}
    for members in alike.values():
        column = _rank_column([numbers for _, numbers in members])
        if column is not None:
            found.update({path: numbers[column][0] for path, numbers in members})
    return found


def _fields(path: str) -> tuple[str, list[tuple[int, bool]]]:
    """Return the name without its numbers, and each number with whether it may be a rank."""
    name = _DATE.sub("<date>", path[-_MAX_LENGTH:].replace("\\", "/"))
    numbers = [
        (int(m.group()[:18]), len(m.group()) <= 6 and not _OTHER.search(name[: m.start()][-20:]))
        for m in _NUMBER.finditer(name)
    ]
    return _NUMBER.sub("#", name), numbers


def _rank_column(rows: Sequence[Sequence[tuple[int, bool]]]) -> int | None:
    """Return the one column with distinct, dense values, or None if there is not exactly one."""
    if len(rows) < 2:
        return None
    good = []
    for column in range(len(rows[0])):
        values = [row[column][0] for row in rows]
        if not all(row[column][1] for row in rows) or len(set(values)) < len(values):
            continue
        if len(values) >= _DENSE * (max(values) + 1):
            good.append(column)
    if len(good) > 1:  # the same number in the folder's and the file's name counts once
        distinct = {tuple(row[c][0] for row in rows) for c in good}
        return good[-1] if len(distinct) == 1 else None
    return good[0] if good else None


MAX_FILES: Final = 100_000


class Discovery(Struct, frozen=True):
    """What was found under the names.

    Attributes:
        ranks: the ranks of a fleet, sorted by path; a single rank is one case.
        ownerless: texts that belong to no rank, such as the log of the whole job.
        case_names: the inputs to read as one case if this is not a fleet.
    """

    ranks: tuple[RankInput, ...] = ()
    ownerless: tuple[str, ...] = ()
    case_names: tuple[str, ...] = ()

    @property
    def is_fleet(self) -> bool:
        """Whether more than one rank was found."""
        return len(self.ranks) > 1


class _Found(Struct):
    ranks: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    doubtful: list[str] = field(default_factory=list)
    is_expanded: bool = False

    @property
    def n_files(self) -> int:
        """Number of ranks and notes so far."""
        return len(self.ranks) + len(self.notes)

    def add(self, path: str, part: Part) -> None:
        if part is Part.RANK:
            self.ranks.setdefault(path)
        elif part is Part.NOTE:
            self.notes.setdefault(path)
        if self.n_files > MAX_FILES:
            raise ConfigError(
                f"There are more than {MAX_FILES} files.", hint="Look at some of them at a time."
            )


def discover(names: Sequence[str]) -> Discovery:
    """Return the ranks found under these files, directories and patterns.

    Raises:
        InputError: a pattern matches nothing.
        ConfigError: there are more files than anyone can have meant.
    """
    if STDIN in names:
        return Discovery(case_names=tuple(names))
    found = _Found()
    for name in names:
        _take(name, found)
    n_found = len(found.ranks)
    found.ranks = dict.fromkeys(one_of_each_process(list(found.ranks)))
    found.is_expanded |= len(found.ranks) < n_found
    if len(found.ranks) > 1:  # otherwise a missing file is an error, not a rank of a job
        found.ranks.update(dict.fromkeys(found.doubtful))
    named = ranks_of([*found.ranks, *found.notes])
    case_names = (*found.ranks, *found.notes) if found.is_expanded else tuple(names)
    if not found.ranks:
        return _of_notes(found, named, case_names)
    own = ranks_of(list(found.ranks))
    beside, ownerless = _owners(list(found.ranks), list(found.notes), named)
    ranks = tuple(
        replace(own[path], beside=tuple(sorted(beside.get(path, ()))))
        for path in sorted(found.ranks)
    )
    return Discovery(ranks, tuple(ownerless), case_names)


def inputs_of(paths: Sequence[str]) -> tuple[RankInput, ...]:
    """Return plain paths as ranks, numbered by their names."""
    named = ranks_of(paths)
    return tuple(named[path] for path in dict.fromkeys(paths))


def _take(name: str, found: _Found) -> None:
    """Sort one name from the command line into ``found``."""
    if is_remote(name):
        _take_remote(name, found)
    elif os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        _take_folder(DiskTree(), name, found)
    elif glob.has_magic(name) and not os.path.lexists(name):
        hits = matches(name)
        if not hits:
            raise InputError(f"Nothing matches {name}.", hint="Check the pattern.")
        found.is_expanded = True
        for hit in hits:
            _take(hit, found)
    else:
        part = part_of(name, is_named=True)
        if part is Part.NOTHING:
            found.doubtful.append(name)
        found.add(name, part)


def _take_remote(url: str, found: _Found) -> None:
    """Sort a URL into ``found``: a file by its name, a pattern or folder by the server's list."""
    if has_pattern(url):
        hits = list_remote(url, most=MAX_FILES)
        if not hits:
            raise InputError(f"Nothing matches {without_secrets(url)}.", hint="Check the pattern.")
        found.is_expanded = True
        for hit in hits:
            found.add(hit, Part.NOTE if is_note(hit) else Part.RANK)
    elif not path_of_url(url).lower().endswith(KNOWN_SUFFIXES) and is_remote_folder(url):
        folder = f"{url.rstrip('/')}/"
        n_before = found.n_files
        _take_folder(UrlTree(folder, list_remote(folder, most=MAX_FILES)), folder, found)
        if found.n_files == n_before:
            raise InputError(
                f"{without_secrets(url)} holds no snapshot, bundle, message or log.",
                hint="Check the URL, and that the server lists what is in it.",
            )
        found.is_expanded = True
    else:
        found.add(url, Part.NOTE if is_note(url) else Part.RANK)


def _take_folder(tree: DiskTree | UrlTree, folder: str, found: _Found) -> None:
    """Sort a folder's files into ``found``, and its subfolders' files if it holds no snapshot."""
    for path, part, depth in search(tree, folder):
        found.add(path, part)
        found.is_expanded |= depth > 0 and part is Part.RANK


def _of_notes(
    found: _Found, named: Mapping[str, RankInput], case_names: tuple[str, ...]
) -> Discovery:
    """Return the ranks if there are only texts; several ranks only if the names say "rank"."""
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
    ranks = [replace(named[paths[0]], beside=tuple(paths[1:])) for paths in by_rank.values()]
    return Discovery(tuple(sorted(ranks, key=lambda r: r.path)), tuple(rest), case_names)


def _owners(
    ranks: Sequence[str], notes: Sequence[str], named: Mapping[str, RankInput]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the notes of each rank, and the notes that belong to no rank.

    A note's owner is found by the note's file stem, rank number or folder: the first of these that
    leaves one choice decides.
    """
    alike: dict[object, list[str]] = defaultdict(list)  # ranks by number, stem and folder
    for path in ranks:
        for key in (named[path].rank, ("stem", _stem(path)), ("folder", _folder(path))):
            alike[key].append(path)
    beside: dict[str, list[str]] = defaultdict(list)
    ownerless = []
    for note in sorted(notes):
        rank = named[note].rank
        keys: tuple[object, ...] = (("stem", _stem(note)), rank, ("folder", _folder(note)))
        if rank is not None and named[note].source is RankSource.NAME:
            keys = (rank,)  # the name says which rank owns the note
        choices = [alike[key] for key in keys if key is not None and key in alike]
        near = ([c for c in some if _folder(c) == _folder(note)] for some in choices)
        both = (choice for pair in zip(choices, near, strict=True) for choice in pair)
        owner = next((choice[0] for choice in both if len(choice) == 1), None)
        if owner is None:
            ownerless.append(note)
        else:
            beside[owner].append(note)
    return beside, ownerless


def _folder(path: str) -> str:
    return os.path.dirname(path)  # noqa: PTH120 - paths of any spelling


def _stem(path: str) -> str:
    """Return a path with its file name cut after its last dotted number, or at its first dot."""
    folder, name = os.path.split(path)
    words = name.split(".")
    while len(words) > 1 and not words[-1].isdigit():
        words.pop()
    return f"{folder}/{'.'.join(words)}"
