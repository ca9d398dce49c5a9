"""A log as a story: what happened when, in which process, and what caused what."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size


class SceneKind(StrEnum):
    """What a line of a log reports. The strings are a contract (JSON ``story.events[].kind``)."""

    OOM = "oom"
    HOST_MEMORY = "host-memory"
    WARNING = "warning"
    DEVICE_ASSERT = "device-assert"
    ILLEGAL_ACCESS = "illegal-access"
    CUDA_ERROR = "cuda-error"
    COLLECTIVE = "collective-timeout"
    KILLED = "killed"
    RETRY = "retry"
    CACHE_FLUSH = "cache-flush"
    RESTART = "restart"
    TRIAL_START = "trial-start"
    TRIAL_END = "trial-end"
    TRIAL_FAILED = "trial-failed"
    TRIAL_PRUNED = "trial-pruned"
    PROGRESS = "progress"
    FIGURE = "figure"
    MENTION = "mention"
    OTHER = "other"


FAILURES = frozenset(
    {
        SceneKind.OOM,
        SceneKind.HOST_MEMORY,
        SceneKind.DEVICE_ASSERT,
        SceneKind.ILLEGAL_ACCESS,
        SceneKind.CUDA_ERROR,
        SceneKind.COLLECTIVE,
        SceneKind.KILLED,
        SceneKind.OTHER,
    }
)
"""Kinds that mean that something went wrong, except warnings and retries."""


class TimePrecision(StrEnum):
    """How complete a printed time is; only times of the same precision can be compared."""

    NONE = ""
    DATED = "dated"
    YEARLESS = "yearless"
    CLOCK = "clock"


class PrintedFigure(Struct, frozen=True):
    """A figure of memory that a program printed.

    Attributes:
        name: ``allocated``, ``reserved`` or ``used`` (nvidia-smi and the like).
        label: the words before it, normalized; figures with different labels are not compared.
        n_bytes: the value.
    """

    name: str
    label: str
    n_bytes: int


class Scene(Struct, frozen=True):
    """A line of a log that belongs to its story, first as the reader found it, then as an event.

    Attributes:
        kind: what the line reports.
        line: 1-based line number.
        text: the line, with whitespace folded, at most 300 characters; hostile text.
        time_s: seconds of the printed time (since 1970 for a date, since midnight for a clock
            time); None if the line prints none. In the story, the time of the line above then.
        precision: how complete that time is.
        rank, pid: rank and process id printed on the line.
        trial: the trial that the line (in the story, also a neighboring line) names, or "".
        message: index of the message in ``OomLog.messages``, None for other lines.
        place: progress in words, such as ``epoch 3/10, step 1200``, or "".
        figures: figures of memory on the line.
        count: a counter on the line (retries, cache flushes), None if there is none.
        n_lines: number of lines that reported the same.
        caused_by: index in ``LogStory.events`` of the earlier failure that caused this one; None
            for a failure that no other caused.
        confidence: how sure ``caused_by`` is; None without it.
        reason: why the failure is a consequence or, for a later failure, why it is not; or "".
    """

    kind: SceneKind
    line: int
    text: str = ""
    time_s: float | None = None
    precision: TimePrecision = TimePrecision.NONE
    rank: int | None = None
    pid: int | None = None
    trial: str = ""
    message: int | None = None
    place: str = ""
    figures: Sequence[PrintedFigure] = ()
    count: int | None = None
    n_lines: int = 1
    caused_by: int | None = None
    confidence: Confidence | None = None
    reason: str = ""


class TrialOutcome(StrEnum):
    """How a trial ended."""

    FINISHED = "finished"
    FAILED = "failed"
    PRUNED = "pruned"
    OPEN = "open"


class Trial(Struct, frozen=True):
    """One trial of a sweep: its end, and how often it ran out of memory."""

    name: str
    outcome: TrialOutcome = TrialOutcome.OPEN
    n_ooms: int = 0


class Direction(StrEnum):
    """The direction in which a figure moves."""

    GROWS = "grows"
    FALLS = "falls"
    LEVEL = "level"
    UNCLEAR = "unclear"
    TOO_FEW = "too-few"


class TrialTrend(Struct, frozen=True):
    """A figure over trials or over failures, with a robust slope.

    Attributes:
        figure: ``allocated``, ``unallocated``, ``reserved`` or ``used``.
        over: what one step is: ``trial``, ``oom`` or ``print``.
        points: bytes, in order.
        lines: line of each point.
        slope_bytes: median of all pairwise slopes (Theil-Sen), bytes per step; None below 3 points.
        low_bytes, high_bytes: bounds of the slope with 90% confidence; None below 4 points.
        direction: the direction that the slope and its bounds show.
        confidence: how sure the direction is; None for unclear and too few.
        label: the words that the program prints before the figure, or "".
        rank: the rank that the figure is about, None for all ranks.
        has_process_each: whether each trial had its own process, so that nothing can pile up.
    """

    figure: str
    over: str
    points: Sequence[int]
    lines: Sequence[int] = ()
    slope_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    direction: Direction = Direction.TOO_FEW
    confidence: Confidence | None = None
    label: str = ""
    rank: int | None = None
    has_process_each: bool = False

    @property
    def bounds(self) -> str:
        """The bounds of the slope in words, or "" if they are not known or say no more than it."""
        if self.low_bytes is None or self.high_bytes is None:
            return ""
        low, high = format_size(self.low_bytes), format_size(self.high_bytes)
        return f"90%: {low} to {high}" if low != high else ""


class LogStory(Struct, frozen=True):
    """The story of a log.

    Attributes:
        events: in order of time if the log prints times (``is_by_time``), otherwise of lines.
        trials: trials of a sweep, in order of their first line.
        trends: figures over trials and failures.
        n_ooms, n_consequences, n_retries, n_restarts: counts over the whole log, without repeats.
        duration_s: seconds between the first and the last printed time, None if there are none.
    """

    events: Sequence[Scene]
    trials: Sequence[Trial] = ()
    trends: Sequence[TrialTrend] = ()
    is_by_time: bool = False
    n_ooms: int = 0
    n_consequences: int = 0
    n_retries: int = 0
    n_restarts: int = 0
    duration_s: float | None = None
