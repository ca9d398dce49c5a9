"""The whole way from the inputs of ranks to the report of the job."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fragdoctor.errors import InputError, RefusedSnapshot
from fragdoctor.fleet.conclusions import conclude, representatives
from fragdoctor.fleet.engine import Progress, merge, stat_of, summarise_all
from fragdoctor.fleet.summary import name_of
from fragdoctor.fleet.workers import SCHEDULER_LOST, WORKERS_LOST
from fragdoctor.inputs.cases import read_messages
from fragdoctor.model.case import OomLog, OomMessage, Overrides
from fragdoctor.model.finding import basename_of
from fragdoctor.model.fleet import FleetReport, FleetSummary, RankInput, SummaryOptions
from fragdoctor.units import MIB, format_count, format_size

if TYPE_CHECKING:
    from fragdoctor.inputs.discovery import Discovery

MAX_LOG_BYTES: Final = 256 * MIB
"""Longer logs are ignored: they are read here, once, while the workers wait."""

_MAX_MESSAGES: Final = 8
_MAX_NAMED: Final = 3


def share_out(found: Discovery) -> tuple[tuple[RankInput, ...], list[str]]:
    """Return the ranks, with what the job's logs say about them, and notes for the report."""
    said: dict[int | None, list[OomMessage]] = defaultdict(list)
    notes, nobodys = [], []
    for name in found.ownerless:
        if (file := stat_of(name)) and file.st_size > MAX_LOG_BYTES:
            notes.append(
                f"{basename_of(name)} is longer than {format_size(MAX_LOG_BYTES)} and was not "
                f"read. Run: fragdoctor oom {name}"
            )
            continue
        of_ranks = _messages(name)
        if not of_ranks:
            nobodys.append(name)
        for message in of_ranks:
            said[message.rank].append(message)
    if nobodys:
        shown = ", ".join(basename_of(n) for n in nobodys[:_MAX_NAMED])
        more = ", ..." if len(nobodys) > _MAX_NAMED else ""
        notes.append(
            f"No rank could be matched with {shown}{more}. To read a log of the whole job, run: "
            f"fragdoctor oom {nobodys[0]}"
        )
    logs = {rank: OomLog(tuple(messages[:_MAX_MESSAGES])) for rank, messages in said.items()}
    return tuple(replace(one, said=logs.get(one.rank)) for one in found.ranks), notes


def _messages(name: str) -> Sequence[OomMessage]:
    """Return the failures in a text that name their rank, or none if it cannot be read."""
    try:
        log = read_messages([name], Overrides()).oom
    except InputError:
        return ()
    messages = () if log is None else log.messages
    return [m for m in messages if m.rank is not None and m.kind != "negative"]


class Replays(StrEnum):
    """Whose recommendations are tested by replay; the verdicts are the same for all three.

    Similar ranks have the same cure, so testing one rank of each group is enough.
    """

    NONE = "none"
    GROUPS = "groups"
    ALL = "all"


def examine(  # noqa: PLR0913 - the choices of one run, all by keyword
    inputs: Sequence[RankInput],
    *,
    executor: Executor | None = None,
    chunk_size: int | None = None,
    progress: Progress | None = None,
    options: SummaryOptions | None = None,
    replays: Replays = Replays.GROUPS,
    notes: Sequence[str] = (),
) -> FleetReport:
    """Return the report of a job.

    Args:
        inputs: the ranks.
        executor: where they are read; None means this process.
        chunk_size: number of ranks per task; if None, it depends on how many ranks there are.
        progress: called with the numbers of ranks done and ranks in all.
        options: how each rank is analyzed, but for the replays.
        replays: whose advice is tested.
        notes: what to report in addition to the findings.

    Raises:
        InputError: if no rank at all could be read.
    """
    folder = "" if executor is None else os.getcwd()  # noqa: PTH109 - a worker compares it
    is_tested = replays is Replays.ALL
    options = replace(options or SummaryOptions(), replays=is_tested, folder=folder)
    fleet = summarise_all(
        inputs, executor=executor, chunk_size=chunk_size, progress=progress, options=options
    )
    if not any(r.is_read for r in fleet.ranks):
        raise nothing_read(fleet)
    if replays is not Replays.GROUPS:
        return conclude(fleet, notes)
    lost = next((r.error for r in fleet.ranks if r.error in {SCHEDULER_LOST, WORKERS_LOST}), "")
    if lost:
        # No worker is left to test the advice, and waiting again for a lost cluster would not help.
        return conclude(fleet, (*notes, f"{lost} The advice was not replayed."))
    wanted = set(representatives(conclude(fleet)))
    chosen = [what for what in inputs if name_of(what) in wanted]
    tested = summarise_all(
        chosen,
        executor=executor,
        chunk_size=1,
        options=replace(options, replays=True),
    )
    return conclude(merge(fleet, tested), notes)


def nothing_read(fleet: FleetSummary) -> InputError:
    """Return the error for a fleet in which nothing is readable, with the most common reason."""
    if not fleet.ranks:
        return InputError("There are no ranks to read.", hint="Give snapshots, or a directory.")
    codes = Counter(r.error_code for r in fleet.ranks)
    code = min(codes, key=lambda c: (-codes[c], c))
    example = next(r for r in fleet.ranks if r.error_code == code)
    n = len(fleet.ranks)
    same = "" if codes[code] == 1 else f", and {format_count(codes[code] - 1)} more like it"
    error = RefusedSnapshot if any(r.exit_code == 3 for r in fleet.ranks) else InputError
    return error(
        f"None of the {format_count(n)} ranks could be read. {example.error} "
        f"({code.replace('_', ' ')}{same})",
        hint=example.hint,
    )
