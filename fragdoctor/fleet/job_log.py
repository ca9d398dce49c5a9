"""Logs of the whole job: each message goes to the rank that its line names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from fragdoctor.errors import InputError
from fragdoctor.intake.inputs import read_messages
from fragdoctor.model.case import Overrides
from fragdoctor.model.fleet import RankInput
from fragdoctor.model.oom import OomLog, OomMessage
from fragdoctor.units import MIB, format_size

if TYPE_CHECKING:
    from fragdoctor.fleet.discovery import Discovery

MAX_LOG_BYTES: Final = 256 * MIB
"""Longer logs are left aside: they are read here, once, while the workers wait."""

_MAX_MESSAGES: Final = 8
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class SharedOut:
    """The ranks with what the logs of the job say of them, and what to tell people."""

    ranks: tuple[RankInput, ...]
    notes: tuple[str, ...]


def share_out(found: Discovery) -> SharedOut:
    """Return the ranks, each with its messages of texts that belong to no rank alone."""
    said: dict[int, list[OomMessage]] = defaultdict(list)
    notes, nobodys = [], []
    for name in found.ownerless:
        if _size(name) > MAX_LOG_BYTES:
            notes.append(
                f"{_base(name)} is longer than {format_size(MAX_LOG_BYTES)} and was not read. "
                f"Run: fragdoctor oom {name}"
            )
            continue
        of_ranks = _messages(name)
        if not of_ranks:
            nobodys.append(name)
        for message in of_ranks:
            if message.rank is not None:
                said[message.rank].append(message)
    if nobodys:
        notes.append(_nobodys(nobodys))
    ranks = tuple(_with(rank, said) for rank in found.ranks)
    return SharedOut(ranks, tuple(notes))


def _with(what: RankInput, said: dict[int, list[OomMessage]]) -> RankInput:
    messages = said.get(what.rank, []) if what.rank is not None else []
    if not messages:
        return what
    return replace(what, said=OomLog(tuple(messages[:_MAX_MESSAGES])))


def _messages(name: str) -> Sequence[OomMessage]:
    """Return the failures that a text tells of a rank; none where it cannot be read."""
    try:
        log = read_messages([name], Overrides()).oom
    except InputError:
        return ()
    messages = () if log is None else log.messages
    return [m for m in messages if m.rank is not None and m.kind != "negative"]


def _nobodys(names: Sequence[str]) -> str:
    shown = ", ".join(_base(n) for n in names[:_MAX_NAMED])
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return (
        f"No rank could be told to own {shown}{more}. To read a log of the whole job, run: "
        f"fragdoctor oom {names[0]}"
    )


def _base(name: str) -> str:
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size  # noqa: PTH116 - a path of any spelling
    except (OSError, ValueError):
        return 0
