"""Ranks from names: the word ``rank`` first, then the one number that counts through the names.

Names of files hold other numbers as well: dates, process ids, ports, steps. None of these is taken
for a rank: a lone number counts only where it runs over a dense range from 0 or 1 on while the
rest of the name stays the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fragdoctor.frozen import frozen
from fragdoctor.model.fleet import RankSource

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
# What a number after one of these words counts is known, and it is no rank.
_OTHER: Final = re.compile(
    r"(?<![a-z])(?:pid|port|iter|iteration|step|epoch|batch|seed|phase|stage|attempt|try|restart"
    r"|run|exp|version|ver|v|part|job|node|host|machine|size|world|bs|lr|torch|py|layers?"
    r"|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[-_.=: ]?$",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"\d+")
_MAX_LENGTH: Final = 4096
_DENSE: Final = 0.5


@frozen
class NamedRank:
    """What a name says of its rank."""

    rank: int | None = None
    source: RankSource = RankSource.UNKNOWN
    local_rank: int | None = None
    job: str = ""
    host: str = ""


def ranks_of(paths: Sequence[str]) -> dict[str, NamedRank]:
    """Return what the names say, by path. The set of names matters, their order does not."""
    said = {path: _said(path) for path in sorted(set(paths))}
    _take_unique(said, {p: n.local_rank for p, n in said.items()}, RankSource.NAME)
    open_paths = [p for p, n in said.items() if n.rank is None]
    _take_unique(said, {p: _last(_SHORT, p) for p in open_paths}, RankSource.NAME)
    open_paths = [p for p, n in said.items() if n.rank is None and n.local_rank is None]
    _take_unique(said, _counted(open_paths), RankSource.NUMBER)
    return said


def _said(path: str) -> NamedRank:
    """Return what one name says by itself."""
    name = path[-_MAX_LENGTH:].replace("\\", "/")
    local = _LOCAL.findall(name)
    rank = _last(_RANK, _LOCAL.sub("local", name))
    return NamedRank(
        rank=rank,
        source=RankSource.UNKNOWN if rank is None else RankSource.NAME,
        local_rank=int(local[-1]) if local else None,
        job=_word(_JOB, name),
        host=_word(_HOST, name),
    )


def _last(pattern: re.Pattern[str], name: str) -> int | None:
    """Return the number of the last match: the file's name wins over its folders'."""
    found = pattern.findall(name[-_MAX_LENGTH:])
    return int(found[-1]) if found else None


def _word(pattern: re.Pattern[str], name: str) -> str:
    found: list[str] = pattern.findall(name)
    return found[-1][:60] if found else ""


def _take_unique(
    said: dict[str, NamedRank], numbers: Mapping[str, int | None], source: RankSource
) -> None:
    """Take the numbers as ranks where no two names, nor a rank already known, have the same."""
    new = {p: n for p, n in numbers.items() if n is not None and said[p].rank is None}
    known = {n.rank for n in said.values() if n.rank is not None}
    if len(set(new.values())) < len(new) or known & set(new.values()):
        return
    for path, number in new.items():
        n = said[path]
        said[path] = NamedRank(number, source, n.local_rank, n.job, n.host)


def _counted(paths: Iterable[str]) -> dict[str, int | None]:
    """Return the number that counts through names which are otherwise the same."""
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
    """Return the name with its numbers left out, and these with whether they may be a rank."""
    name = _DATE.sub("<date>", path[-_MAX_LENGTH:].replace("\\", "/"))
    numbers = [
        (int(m.group()[:18]), len(m.group()) <= 6 and not _OTHER.search(name[: m.start()][-20:]))
        for m in _NUMBER.finditer(name)
    ]
    return _NUMBER.sub("#", name), numbers


def _rank_column(rows: Sequence[Sequence[tuple[int, bool]]]) -> int | None:
    """Return the one field with distinct, dense values; None if there is none."""
    if len(rows) < 2:
        return None
    good = []
    for column in range(len(rows[0])):
        values = [row[column][0] for row in rows]
        if not all(row[column][1] for row in rows) or len(set(values)) < len(values):
            continue
        if len(values) >= _DENSE * (max(values) + 1):
            good.append(column)
    if len(good) > 1:  # the same number in folder and file name is one statement
        distinct = {tuple(row[c][0] for row in rows) for c in good}
        return good[-1] if len(distinct) == 1 else None
    return good[0] if good else None
