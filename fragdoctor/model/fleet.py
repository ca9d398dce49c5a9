"""What is known about each rank of a job, and the conclusions about all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from typing import Final

from msgspec import Struct, field

from fragdoctor.model.case import OomLog, Overrides
from fragdoctor.model.diagnosis import Cause, DeviceFigures, Recommendation
from fragdoctor.model.finding import Finding, Location
from fragdoctor.units import listed

MAX_SUMMARY_BYTES: Final = 20_000
"""A pickled ``RankSummary`` is always smaller than this, because workers send it back."""


class RankSource(StrEnum):
    """Where a rank's number was read from, most reliable first."""

    MANIFEST = "manifest"
    NAME = "name"
    LOG = "log"
    NUMBER = "number"
    UNKNOWN = ""


class RankInput(Struct, frozen=True):
    """The names of the files that one rank left behind; a worker opens them.

    Attributes:
        path: the snapshot, bundle or text that stands for the rank.
        beside: messages, statistics and logs of the same rank.
        rank, local_rank, job, host: if the names say them.
        said: what a log of the whole job says about the rank, if the rank has no text of its own.
    """

    path: str
    beside: tuple[str, ...] = ()
    rank: int | None = None
    source: RankSource = RankSource.UNKNOWN
    local_rank: int | None = None
    job: str = ""
    host: str = ""
    said: OomLog | None = None


class SummaryOptions(Struct, frozen=True):
    """How each rank is analyzed.

    Attributes:
        replays: whether to test the recommendations, which takes longest.
        timeout_s: give up on a rank that takes longer; None waits forever.
        memory_bytes: how much memory the worker may take, if that can be enforced.
        folder: the folder that relative paths start from; "" is the worker's own folder.
    """

    overrides: Overrides = field(default_factory=Overrides)
    replays: bool = False
    timeout_s: float | None = None
    memory_bytes: int | None = None
    folder: str = ""


class SourceLine(Location, frozen=True):
    """A line of the user's program and what it holds, strands or requests. Hostile text, cut."""

    n_bytes: int
    n_blocks: int = 0

    @property
    def location(self) -> Location | None:
        """Where the line is; None if no stack was recorded."""
        return Location(self.filename, self.line, self.function) if self.filename else None

    @property
    def key(self) -> tuple[str, int, str]:
        """A key that is the same on every machine, so it leaves out the directory."""
        return self.basename, self.line, self.function


class RankSummary(Struct, frozen=True):
    """One rank in less than ``MAX_SUMMARY_BYTES``; None, "" and () mean "not known".

    Attributes:
        path: names the rank within the fleet; hostile text.
        is_read: False if the rank could not be read: ``error`` is a sentence that says why,
            ``error_code`` its stable name, ``exit_code`` the exit code for this rank alone.
        has_failed: whether an out-of-memory error ended the rank or was raised in it.
        figures: figures of the device that the verdict is about.
        settings: allocator settings that differ from the defaults, as (key, value), sorted.
        holders: lines by live bytes at the peak (or at the end, if there is no trace).
        findings: the worst finding of each rule, without prose, evidence and places.
        advice: the first recommendation, reduced to what to do and its predicted effect.
        large_sizes: (request size, number of requests), by the bytes they add up to.
        failed_us: time of the first refusal.
        is_replayed: whether the recommendation was tested, if there was a trace.
    """

    path: str
    rank: int | None = None
    rank_source: RankSource = RankSource.UNKNOWN
    local_rank: int | None = None
    job: str = ""
    host: str = ""
    is_read: bool = True
    error: str = ""
    error_code: str = ""
    hint: str = ""
    exit_code: int = 0
    cause: Cause = Cause.UNKNOWN
    confidence: str = ""
    summary: str = ""
    has_failed: bool = False
    figures: DeviceFigures | None = None
    settings: tuple[tuple[str, str], ...] = ()
    settings_known: bool = False
    holders: tuple[SourceLine, ...] = ()
    findings: tuple[Finding, ...] = ()
    advice: Recommendation | None = None
    large_sizes: tuple[tuple[int, int], ...] = ()
    failed_us: int | None = None
    is_replayed: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """Peak of allocated memory, or the closest figure in the input."""
        f = self.figures
        if f is None:
            return None
        known = (f.peak_allocated_bytes, f.allocated_bytes, f.active_bytes)
        return next((value for value in known if value is not None), None)

    def figure(self, name: str) -> int | None:
        """Return a figure of the device that the verdict is about, or None if it is not known."""
        value: int | None = None if self.figures is None else getattr(self.figures, name)
        return value


class FleetSummary(Struct, frozen=True):
    """The ranks seen so far, each path once, in the order of the paths.

    Made by ``fleet.engine.merge``, which keeps that order, so equal fleets compare equal.
    """

    ranks: tuple[RankSummary, ...] = ()


class DifferenceKind(StrEnum):
    """The kinds of differences between ranks."""

    LINE = "line"
    PEAK = "peak"
    SETTING = "setting"
    CAPACITY = "capacity"
    STRANDED = "stranded"
    RETRIES = "retries"
    SIZES = "request_sizes"
    VERDICT = "verdict"


class Difference(Struct, frozen=True):
    """One way in which a rank, or a group, differs from the ranks it is compared with.

    Attributes:
        text: the difference in words, without a period; may quote input, so it is hostile text.
        line: the line of the program for ``LINE``.
        delta_bytes: the value here minus the others' value, if these are bytes.
    """

    kind: DifferenceKind
    text: str
    line: SourceLine | None = None
    delta_bytes: int | None = None


SKEWED: Final = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "stranded_free_bytes": "stranded",
    "alloc_retries": "retries",
}
"""Figures that ranks should share evenly, and their titles."""


class Skew(Struct, frozen=True):
    """How unevenly one figure is spread over the ranks.

    ``over_median`` is max / median, None for a median of 0; ``path`` names the first rank with the
    maximum, ``n_highest`` is how many have it.
    """

    name: str
    n: int
    minimum: int
    median: int
    maximum: int
    over_median: float | None
    path: str
    label: str
    n_highest: int = 1


class RankGroup(Struct, frozen=True):
    """Ranks that are alike: same verdict, settings and holders, and peaks without gaps.

    Attributes:
        id: ``A`` is the largest group, ``B`` the next largest.
        paths, labels: paths and labels of the group's ranks, in the order of the ranks.
        holders: lines with the median bytes over the group, largest first.
        is_odd: whether the group is very small, or fails although most ranks do not.
        reference: id of the group that an odd group is compared with; "" for all other ranks.
        differences: from ``reference`` or, for groups that are not odd, from group A.
        representative: path of the rank closest to the median peak; ``advice`` is its advice.
    """

    id: str
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    cause: Cause
    summary: str
    n_failed: int
    median_peak_bytes: int | None
    min_peak_bytes: int | None
    max_peak_bytes: int | None
    settings: tuple[tuple[str, str], ...] = ()
    holders: Sequence[SourceLine] = ()
    is_odd: bool = False
    reference: str = ""
    differences: Sequence[Difference] = ()
    representative: str = ""
    advice: Recommendation | None = None


_NUMBERED: Final = re.compile(r"rank (\d+)")


def members(labels: Sequence[str], limit: int) -> list[str]:
    """Return labels with consecutive ranks joined, ``0-4``, ``6``, ``7``; at most ``limit``."""
    numbers = [int(match[1]) for label in labels if (match := _NUMBERED.fullmatch(label))]
    # Consecutive numbers have the same distance to their places.
    by_distance = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    parts: list[str] = []
    for _, pairs in by_distance:
        run = [str(n) for _, n in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    parts += [label for label in labels if not _NUMBERED.fullmatch(label)]
    more = [f"{len(parts) - limit:,} more"] if len(parts) > limit else []
    return [*parts[:limit], *more]


def ranks_text(labels: Sequence[str], limit: int = 4) -> str:
    """Return the ranks that something applies to: ``rank 5``, ``ranks 0-3, 6 and 8``."""
    if len(labels) == 1:
        return labels[0]
    lead = "ranks " if all(map(_NUMBERED.fullmatch, labels)) else ""
    return lead + listed(members(labels, limit))


class RankRow(Struct, frozen=True):
    """A row of the table of ranks; ``group`` is "" for a rank that could not be read."""

    label: str
    group: str
    is_odd: bool
    rank: RankSummary


class JobVerdict(Struct, frozen=True):
    """The verdict on the whole job.

    ``first_failed`` is the label of the rank that ran out of memory first, "" if the times do not
    tell; ``odd`` and ``failed`` are labels.
    """

    cause: Cause
    summary: str
    n_ranks: int
    n_read: int
    n_failed: int
    first_failed: str = ""
    odd: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class FleetReport(Struct, frozen=True):
    """Everything that a report on many ranks prints. Made by ``fleet.conclusions.conclude``."""

    verdict: JobVerdict
    rows: Sequence[RankRow]
    groups: Sequence[RankGroup] = ()
    skew: Sequence[Skew] = ()
    notes: Sequence[str] = ()

    @property
    def odd(self) -> tuple[RankRow, ...]:
        """The ranks unlike the others."""
        return tuple(row for row in self.rows if row.is_odd)
