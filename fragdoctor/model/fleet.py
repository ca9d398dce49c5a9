"""What is known of each rank of a job: small values that travel between machines and merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from fragdoctor.model.case import Overrides
from fragdoctor.model.diagnosis import Cause, DeviceFigures
from fragdoctor.model.oom import OomLog

MAX_SUMMARY_BYTES: Final = 20_000
"""A pickled ``RankSummary`` is smaller than this, whatever its input: workers send it home."""


class RankSource(StrEnum):
    """What a rank was read from, the surest first."""

    MANIFEST = "manifest"
    NAME = "name"
    LOG = "log"
    NUMBER = "number"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class RankInput:
    """What one rank left behind, as names; a worker opens them.

    Attributes:
        path: the snapshot, bundle or text that stands for the rank.
        beside: messages, statistics and logs of the same rank.
        rank, local_rank, job, host: as far as the names say it.
        said: what a log of the whole job says of the rank, where it has no text of its own.
    """

    path: str
    beside: tuple[str, ...] = ()
    rank: int | None = None
    source: RankSource = RankSource.UNKNOWN
    local_rank: int | None = None
    job: str = ""
    host: str = ""
    said: OomLog | None = None


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """How each rank is looked at.

    Attributes:
        replays: test the recommendations, which takes longest.
        timeout_s: a rank that takes longer is given up; None waits for ever.
        memory_bytes: what the worker may take, as far as somebody holds it to that.
        folder: where names that are no whole paths start; "" is the worker's own folder.
    """

    overrides: Overrides = field(default_factory=Overrides)
    replays: bool = False
    timeout_s: float | None = None
    memory_bytes: int | None = None
    folder: str = ""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's program and what it holds, pins or asks for. Hostile text, cut."""

    filename: str
    line: int
    function: str
    n_bytes: int
    n_blocks: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        """What names the line on every machine: directories differ between them."""
        return self.filename.replace("\\", "/").rsplit("/", 1)[-1], self.line, self.function


@dataclass(frozen=True, slots=True)
class RankFinding:
    """A finding without its prose. ``severity`` as in ``model.finding.Severity``."""

    code: str
    severity: int
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankAdvice:
    """The first recommendation. ``method`` and ``fits`` as in ``model.diagnosis.Predicted``."""

    code: str
    title: str
    setting: str = ""
    change: str = ""
    confidence: str = ""
    method: str = "none"
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank in less than ``MAX_SUMMARY_BYTES``; None, "" and () are "not known".

    Attributes:
        path: names the rank within the fleet; hostile text.
        inputs: names of everything read for it; hostile text.
        is_read: False where the rank could not be read: ``error`` is the sentence that says why,
            ``error_code`` its stable name, ``exit_code`` what it would mean alone.
        has_failed: an out-of-memory error ended the rank or was raised in it.
        refused_bytes: size of the first request that was refused.
        figures: of the device that the verdict is about.
        settings: allocator settings that differ from the defaults, as (key, value), sorted.
        conf: the raw ``PYTORCH_CUDA_ALLOC_CONF``.
        era: tie-breaking era of the allocator, where a replay told it.
        holders: lines by live bytes at the peak (at the end where there is no trace).
        pins: lines by the free bytes that their blocks pin.
        sites: lines by bytes asked for over the whole trace.
        large_sizes: (request size, number of requests), by the bytes they add up to.
        size_histogram: (power of two, number of requests) of all requests of the trace.
        n_events, n_allocs: of that device.
        first_us, last_us: time of its first and last event; ``failed_us`` of the first refusal.
        is_replayed: the recommendation was tested where there was a trace.
    """

    path: str
    inputs: tuple[str, ...] = ()
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
    refused_bytes: int | None = None
    figures: DeviceFigures | None = None
    conf: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    settings_known: bool = False
    version_low: str = ""
    version_high: str = ""
    era: str = ""
    holders: tuple[SourceLine, ...] = ()
    pins: tuple[SourceLine, ...] = ()
    sites: tuple[SourceLine, ...] = ()
    findings: tuple[RankFinding, ...] = ()
    advice: RankAdvice | None = None
    large_sizes: tuple[tuple[int, int], ...] = ()
    size_histogram: tuple[tuple[int, int], ...] = ()
    n_events: int | None = None
    n_allocs: int | None = None
    first_us: int | None = None
    last_us: int | None = None
    failed_us: int | None = None
    is_replayed: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """Peak of allocated memory, or the nearest figure that the input has."""
        f = self.figures
        if f is None:
            return None
        known = (f.peak_allocated_bytes, f.allocated_bytes, f.active_bytes)
        return next((value for value in known if value is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The ranks seen so far, each path once, in the order of the paths.

    Made by ``fleet.merge``, which keeps that order: equal fleets are equal values.
    """

    ranks: tuple[RankSummary, ...] = ()

    def __len__(self) -> int:
        return len(self.ranks)

    def by_path(self) -> Mapping[str, RankSummary]:
        """Return the ranks by their paths."""
        return {r.path: r for r in self.ranks}
