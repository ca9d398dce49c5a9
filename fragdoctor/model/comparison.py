"""Runs compared with each other: what changed, what explains it, and where it is heading.

Runs are called A, B, C, ... in the order given. A figure that is not in a run's files is None.
All texts may quote the inputs, so they are hostile, and each format escapes them on output.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from fragdoctor.model.diagnosis import MomentFigures, Verdict
from fragdoctor.model.finding import Confidence, Location, line_text


class Basis(StrEnum):
    """The moment of the runs at which lines are compared."""

    PEAK = "peak"  # the highest allocated bytes in the trace
    NOW = "now"  # the moment at which the snapshot was taken
    NONE = "none"  # a run without a snapshot has no lines


class LineKind(StrEnum):
    """What happened to the memory of a source line."""

    NEW = "new"
    GONE = "gone"
    GREW = "grew"
    SHRANK = "shrank"
    SAME = "same"


class CauseKind(StrEnum):
    """What kind of change caused the difference."""

    SETTINGS = "settings"
    SCALE = "scale"
    LEAK = "leak"
    CHECKPOINTING = "checkpointing"
    OPTIMIZER = "optimizer"
    NEW_CODE = "new_code"
    GONE_CODE = "gone_code"
    MORE_BLOCKS = "more_blocks"
    FEWER_BLOCKS = "fewer_blocks"
    LENGTH = "length"


class RunSide(Struct, frozen=True):
    """One run of a comparison, seen on the device that is compared.

    Attributes:
        letter: what sentences call the run: A, B, C, ...
        name: the name that the user gave; hostile text.
        torch_version: PyTorch versions that fit the inputs, or "".
        n_steps: steps in the trace, evaluations among them; None without a trace.
        is_cut: whether the trace lacks its beginning.
        moment: figures at the moment that a report on this run alone is about.
        analysis: the ``DeviceAnalysis``, for the graphics of the page; None if they are not needed.
    """

    letter: str
    name: str
    verdict: Verdict
    device: int | None = None
    devices: Sequence[int] = ()
    torch_version: str = ""
    conf: str | None = None
    has_snapshot: bool = False
    has_trace: bool = False
    has_stacks: bool = False
    is_cut: bool = False
    n_events: int | None = None
    n_steps: int | None = None
    capacity_bytes: int | None = None
    moment: MomentFigures | None = None
    analysis: Any = None


class ComparedFigure(Struct, frozen=True):
    """One figure of every run, in the order of the runs. ``unit`` is ``bytes`` or ``count``."""

    id: str
    title: str
    unit: str
    values: Sequence[int | None]

    @property
    def delta(self) -> int | None:
        """The last value minus the first; None if either is unknown."""
        first, last = self.values[0], self.values[-1]
        return None if first is None or last is None else last - first


class DevicePeaks(Struct, frozen=True):
    """Peaks of one device in the first and the last run: what ``--fail-on-growth`` judges.

    ``device`` is its number in the last run. Pairs are (first, last); None is unknown. A run that
    ran out of memory shows the peak that it reached, not the peak that it needed. So if the two
    runs failed differently, the peaks cover only the first ``n_common_requests``, which is as many
    as both runs made; None means the whole runs.
    """

    device: int
    allocated_bytes: tuple[int | None, int | None]
    active_bytes: tuple[int | None, int | None]
    ooms: tuple[int | None, int | None] = (None, None)
    n_common_requests: int | None = None


class SettingChange(Struct, frozen=True):
    """A setting that differs between the first and the last run."""

    key: str
    before: str
    after: str


class SizeChange(Struct, frozen=True):
    """How the sizes that a line requests changed.

    ``factor`` is after / before if one factor fits all sizes; ``before_bytes`` and ``after_bytes``
    are typical sizes. ``new_bytes`` and ``gone_bytes`` are sizes that only one run requested,
    largest total first.
    """

    factor: float | None
    before_bytes: int
    after_bytes: int
    new_bytes: Sequence[int] = ()
    gone_bytes: Sequence[int] = ()
    n_new: int = 0
    n_gone: int = 0


class LineChange(Struct, frozen=True):
    """Live memory of one source line at the compared moment of the first and the last run.

    ``before`` and ``after`` are the same line of the program, even if an edit has moved it; None if
    a run has no such line. If both are None, no stack was recorded.
    """

    kind: LineKind
    before: Location | None
    after: Location | None
    before_bytes: int
    after_bytes: int
    before_blocks: int
    after_blocks: int
    sizes: SizeChange | None = None

    @property
    def delta_bytes(self) -> int:
        """The bytes after minus the bytes before."""
        return self.after_bytes - self.before_bytes

    @property
    def place(self) -> Location | None:
        """The line in the newer run, or in the older run if the newer has no such line."""
        return self.after or self.before

    @property
    def where(self) -> str:
        """The line for a sentence, without the folders of its file; hostile text."""
        return line_text(self.place, "requests without a Python stack")


class LikelyCause(Struct, frozen=True):
    """A likely cause of the difference in one sentence, with its confidence."""

    kind: CauseKind
    confidence: Confidence
    text: str
    delta_bytes: int | None = None


class SettingsProof(Struct, frozen=True):
    """The requests of one run replayed under the settings of another.

    Attributes:
        under: letter of the run whose settings are used; run A is replayed.
        requests_equal: share of the shorter run's requests that both made in the same order.
        own_bytes: peak reserved memory of the replayed run under its own settings.
        result_bytes: its peak reserved memory under the other settings.
        recorded_bytes: the other run's recorded peak over the same number of requests.
        fits: whether every request was served under the other settings.
        own_fits: whether every request was served under its own settings, with the same capacity.
        accounted: share of the difference in peak reserved memory that the settings explain; None
            if there is no such difference.
        is_exact: whether the model reproduces the replayed file exactly.
    """

    under: str
    requests_equal: float
    own_bytes: int
    result_bytes: int
    recorded_bytes: int
    fits: bool
    accounted: float | None
    is_exact: bool
    text: str
    own_fits: bool = True

    @property
    def decides(self) -> bool:
        """Whether requests fail under only one of the two settings."""
        return self.fits != self.own_fits


class LineTrend(Struct, frozen=True):
    """A source line whose memory grows over the runs; ``slope_bytes`` per unit of the axis."""

    location: Location | None
    values: Sequence[int]
    slope_bytes: float


class RunTrend(Struct, frozen=True):
    """Growth over three or more runs in time order.

    Attributes:
        figure: which figure is fitted: ``peak_allocated`` or ``allocated``.
        x, unit: the axis: step counts (``step``) or plain numbers (``snapshot``).
        slope_bytes: median of all pairwise slopes (Theil-Sen), per unit of the axis.
        slope_low_bytes, slope_high_bytes: 90% confidence range of the slope if there are enough
            runs, otherwise the smallest and largest pairwise slope.
        p_value: chance of such a steady rise without any growth (Mann-Kendall, one-sided).
        confidence: None if nothing grows.
        capacity_bytes: the capacity that the growth runs into, if known.
        exhausted_at: axis value at which the capacity is reached; None if unknown or insignificant.
        exhausted_from, exhausted_until: range of ``exhausted_at``; None for an open end.
    """

    figure: str
    x: Sequence[float]
    unit: str
    values: Sequence[int]
    slope_bytes: float
    slope_low_bytes: float
    slope_high_bytes: float
    p_value: float
    confidence: Confidence | None
    lines: Sequence[LineTrend] = ()
    capacity_bytes: int | None = None
    exhausted_at: float | None = None
    exhausted_from: float | None = None
    exhausted_until: float | None = None
    text: str = ""


class Comparison(Struct, frozen=True):
    """A comparison of two runs, or of the first and the last of several.

    Attributes:
        summary: the answer in one or two sentences.
        basis: the moment that ``lines`` are about.
        delta_bytes: difference in live memory at that moment; None without lines.
        explained_bytes: the part of it that lines with a stack add up to.
        lines: all lines whose memory changed, largest change first, then the unchanged lines.
        causes: likely causes of the difference, most bytes first.
        settings: settings that differ; None if a run does not record its settings.
        requests_equal: share of the shorter run's requests that both made in the same order.
        is_same: whether everything that both runs report is equal.
        notes: what could not be compared, and why.
    """

    runs: Sequence[RunSide]
    summary: str
    basis: Basis
    figures: Sequence[ComparedFigure] = ()
    delta_bytes: int | None = None
    explained_bytes: int | None = None
    lines: Sequence[LineChange] = ()
    n_lines_left_out: int = 0
    causes: Sequence[LikelyCause] = ()
    settings: Sequence[SettingChange] | None = None
    proof: SettingsProof | None = None
    requests_equal: float | None = None
    trend: RunTrend | None = None
    device_peaks: Sequence[DevicePeaks] = ()
    is_same: bool = False
    notes: Sequence[str] = field(default_factory=tuple)

    def figure(self, name: str) -> ComparedFigure | None:
        """Return a figure by its id."""
        return next((f for f in self.figures if f.id == name), None)
