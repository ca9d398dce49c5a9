"""What is concluded of the ranks of a job: the values that its report prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.fleet import RankAdvice, RankSummary, SourceLine

FLEET_SCHEMA_VERSION = "1.0"


class DifferenceKind(StrEnum):
    """In what two ranks differ."""

    LINE = "line"
    PEAK = "peak"
    SETTING = "setting"
    VERSION = "version"
    CAPACITY = "capacity"
    PINNED = "pinned"
    RETRIES = "retries"
    SIZES = "request_sizes"
    VERDICT = "verdict"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a rank, or a group, differs from the ranks it is compared with.

    Attributes:
        text: the difference in words, without a full stop; may quote input: hostile text.
        name: the setting, or "".
        line: the line of the program for ``LINE``.
        value, others: the figure or text here, and (the median) there.
        delta_bytes: here less there, where these are bytes.
    """

    kind: DifferenceKind
    text: str
    name: str = ""
    line: SourceLine | None = None
    value: str = ""
    others: str = ""
    delta_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Skew:
    """How unevenly one figure is spread over the ranks.

    ``mad`` is the median absolute deviation; ``over_median`` is max / median, None for a median
    of 0; ``path`` names the first rank that has the maximum, ``n_highest`` counts them.
    """

    name: str
    n: int
    minimum: int
    median: int
    maximum: int
    mad: int
    over_median: float | None
    path: str
    label: str
    n_highest: int = 1


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that are alike: same verdict, settings and holders, peaks without a gap between.

    Attributes:
        id: ``A`` is the largest group, ``B`` the next one.
        paths, labels: of its ranks, in the order of the ranks.
        holders: lines with the median bytes over the group, the largest first.
        is_odd: too few of its kind, or failing where most are not; ``reference`` is then the id
            of the group that it is compared with, "" for all other ranks.
        differences: from ``reference`` or, for groups that are not odd, from group A.
        representative: path of the rank nearest to the median peak; ``advice`` is its advice.
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
    median_pinned_bytes: int | None
    median_retries: int | None
    settings: tuple[tuple[str, str], ...] = ()
    holders: Sequence[SourceLine] = ()
    is_odd: bool = False
    reference: str = ""
    differences: Sequence[Difference] = ()
    representative: str = ""
    advice: RankAdvice | None = None
    advice_is_tested: bool = False


@dataclass(frozen=True, slots=True)
class OddRank:
    """A rank unlike the others, and what differs, the weightiest first."""

    path: str
    label: str
    group: str
    reference: str
    differences: Sequence[Difference] = ()


@dataclass(frozen=True, slots=True)
class RankRow:
    """A row of the table of ranks; ``group`` is "" for a rank that could not be read."""

    label: str
    group: str
    is_odd: bool
    rank: RankSummary


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """What it is for the whole job.

    ``first_failed`` is the label of the rank that ran out of memory first, "" where the times do
    not tell; ``odd`` and ``failed`` are labels.
    """

    cause: Cause
    summary: str
    n_ranks: int
    n_read: int
    n_failed: int
    first_failed: str = ""
    odd: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Everything that a report of many ranks prints. Made by ``fleet.report.conclude``."""

    verdict: JobVerdict
    rows: Sequence[RankRow]
    groups: Sequence[RankGroup] = ()
    odd: Sequence[OddRank] = ()
    skew: Sequence[Skew] = ()
    notes: Sequence[str] = ()
