"""The result that every report prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from fragdoctor.errors import ConfigError
from fragdoctor.model.case import Case
from fragdoctor.model.census import Owner
from fragdoctor.model.finding import (
    Confidence,
    Evidence,
    Finding,
    Location,
    SkippedRule,
    basename_of,
)
from fragdoctor.model.hooks import drawn
from fragdoctor.model.modules import ModuleMemory
from fragdoctor.model.phases import (
    Category,
    HeldBytes,
    LineBytes,
    MomentReport,
    PhaseReport,
)
from fragdoctor.model.simulation import FidelityReport, Outlook, Promise, room_left
from fragdoctor.model.story import LogStory

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = "1.0"


class Cause(StrEnum):
    """What the problem is. The strings are a contract (JSON ``verdict.cause``)."""

    HEALTHY = "healthy"
    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    TRANSIENT_PEAK = "transient_peak"
    NON_PYTORCH_MEMORY = "non_pytorch_memory"
    OTHER_PROCESS = "other_process"
    MEMORY_LIMIT = "memory_limit"
    PRIVATE_POOLS = "private_pools"
    PENDING_FREES = "pending_frees"
    SIZE_BUG = "size_bug"
    HOST_MEMORY = "host_memory"
    NOT_MEMORY = "not_memory"
    UNKNOWN = "unknown"


SOUND: Final = (Cause.HEALTHY, Cause.NOT_MEMORY)
"""Causes that are no problem of memory."""

NO_PROBLEM: Final = (*SOUND, Cause.UNKNOWN)
"""Causes that by themselves are not a reason to fail."""

SHORT_OF_MEMORY: Final = (Cause.CAPACITY, Cause.TRANSIENT_PEAK, Cause.MEMORY_LIMIT)

MAY_SAVE: Final = (*SHORT_OF_MEMORY, Cause.FRAGMENTATION, Cause.HEALTHY)
"""Causes for which it is worth checking what a training run could do without."""


class Status(StrEnum):
    """Outcome of a checklist item."""

    PASS = "pass"  # noqa: S105 - not a password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class RunState(StrEnum):
    """State of the run at the end of the input. The strings are a contract (``verdict.state``)."""

    FAILED = "failed"
    """A request failed."""
    NEAR_LIMIT = "near_limit"
    """No request failed, but one needed a flush of the cache, or less than 5% were left."""
    FITS = "fits"
    """No request failed, and nothing shows that one nearly did."""
    NO_HISTORY = "no_history"
    """The input shows one moment and does not say what came before it."""
    EMPTY = "empty"
    """The input holds no memory at all."""
    UNKNOWN = "unknown"


class Moment(StrEnum):
    """The moment that a list or figure describes. The strings are a contract (JSON ``moment``)."""

    FAILURE = "failure"
    """When the request that decides the verdict failed; the same time on other devices."""
    PEAK = "peak"
    """The highest allocated bytes of the trace."""
    END = "end"
    """The end of the file."""


class Verdict(Struct, frozen=True):
    """What the problem is and how sure that is, in one sentence with its two numbers.

    Attributes:
        also: further causes that the evidence supports.
        decider: the row of the decision table that gave the verdict.
        settled_by: the one cheap measurement that would settle the rest, "" if nothing is open.
        state: state of the run, whatever the cause.
        outlook: what the run would do next under the recorded settings; None if nobody asked.
    """

    cause: Cause
    confidence: Confidence
    summary: str
    device: int | None = None
    also: Sequence[Cause] = ()
    evidence: Sequence[Evidence] = ()
    decider: str = ""
    settled_by: str = ""
    state: RunState = RunState.UNKNOWN
    outlook: Outlook | None = None


class ChecklistItem(Struct, frozen=True):
    """One step of the checklist. ``source`` names the input that answered it."""

    id: str
    title: str
    status: Status
    value: str
    detail: str
    source: str = ""


class Predicted(Struct, frozen=True):
    """The effect of a recommendation.

    ``method`` is ``replay`` (the trace was replayed with the change), ``arithmetic`` (follows from
    the figures) or ``none`` (not tested; then the other fields are None). ``outlook`` is what comes
    after the recorded part of the run. If the outlook holds, peak and margin apply to the whole run
    as far as it was played; otherwise they apply to the recorded part.
    """

    fits: bool | None = None
    peak_reserved_bytes: int | None = None
    retries: int | None = None
    method: str = "none"
    driver_calls: int | None = None
    margin_bytes: int | None = None
    fidelity_share: float | None = None
    outlook: Outlook | None = None

    @property
    def promise(self) -> Promise:
        """What the recommendation promises for the whole run."""
        return Promise.of(None if self.method == "none" else self.fits, self.outlook)

    @property
    def room_bytes(self) -> int:
        """How much of the capacity is left at the highest known point of the run."""
        return room_left(self.margin_bytes, self.peak_reserved_bytes or 0, self.outlook)


class Recommendation(Struct, frozen=True):
    """One thing to do, with its reason, price and proof.

    Attributes:
        rank: 1 is best; 0 in ``rejected``.
        code: code of the remedy, for example ``expandable-segments``.
        title: imperative, one line.
        setting: exact text to set, for example
            ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; "" for code changes.
        change: the code change, for example ``wrap the loop at eval.py:12 in torch.no_grad()``.
        cost: the price of the change.
        caveats: known conflicts.
    """

    rank: int
    code: str
    title: str
    confidence: Confidence
    setting: str = ""
    change: str = ""
    why: str = ""
    locations: Sequence[Location] = ()
    predicted: Predicted = field(default_factory=Predicted)
    cost: str = ""
    caveats: Sequence[str] = ()
    saves_bytes: int | None = None


class Failure(Struct, frozen=True):
    """The failed request that the verdict is about.

    Attributes:
        device: the device, None if no input names it.
        event: events of the device's trace before it; None if only a message tells of it.
        requested_bytes: what the program asked for; a message has the segment, maybe a larger one.
        segment_bytes: what the driver was asked for, if that is known to be larger.
        free_bytes: what the driver had free.
        limit_bytes: what a memory fraction allowed, if only that was in the way; ``left_bytes`` is
            what was left of it.
        location: the line of the program that made the request; None if nothing shows it.
        stack: the stack from that line outward.
        source_text: that line as a traceback prints it, or ""; hostile text.
        source: the inputs that tell of it: ``trace``, ``oom message``, ``trace and oom message``.
        is_caught: whether the program went on.
        backward_of: the forward line that the backward pass had reached, if the request came from a
            thread of the autograd engine, which has no Python stack.
    """

    device: int | None = None
    event: int | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    location: Location | None = None
    segment_bytes: int | None = None
    stack: Sequence[Location] = ()
    source_text: str = ""
    source: str = ""
    is_caught: bool = False
    backward_of: Location | None = None
    limit_bytes: int | None = None
    left_bytes: int | None = None


class HostGrowth(Struct, frozen=True):
    """Page-locked memory of one source line that grows from step to step and is not freed."""

    location: Location | None
    bytes_per_step: int
    survivor_bytes: int


class HostMemoryReport(Struct, frozen=True):
    """Page-locked memory of the host that PyTorch allocated; no figure of a GPU includes it.

    Attributes:
        reserved_bytes: what the host's allocator had at the end of the file.
        cached_bytes: the part of ``reserved_bytes`` that was cached for reuse.
        moment: the moment of ``held_bytes`` and ``holders``: the failure that decides the verdict,
            else the end. None if the file does not record the host's events.
        held_bytes: held by tensors at that moment.
        peak_bytes: the most that was held at once.
        holders: source lines that held memory at that moment, most bytes first.
    """

    reserved_bytes: int
    cached_bytes: int
    moment: Moment | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    holders: Sequence[LineBytes] = ()
    growth: Sequence[HostGrowth] = ()


class MomentFigures(Struct, frozen=True):
    """What a device's memory consists of at the moment that the report is about.

    Attributes:
        moment: the failure that decides the verdict, else the peak, else the end.
        event: events of the device's trace before the moment; None if the input has no trace.
        is_end: whether nothing happened on the device after the moment.
        device_free_bytes: what the driver had free then; None if no input says it.
        categories: what the allocated memory is for, most bytes first; empty if that is not known.
    """

    moment: Moment
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    releasable_bytes: int = 0
    stranded_free_bytes: int = 0
    private_pools_free_bytes: int = 0
    device_free_bytes: int | None = None
    event: int | None = None
    is_end: bool = True
    categories: Sequence[HeldBytes] = ()


IDLE_SHARE: Final = 0.01
"""A device with less than this share of the fullest device's memory does not take part."""


class DeviceFigures(Struct, frozen=True):
    """Key figures of one device; None means "this input does not say" (JSON ``devices[]``).

    They apply to the end of the input; peaks and counters apply to all of it. ``limit_bytes`` is
    what a memory fraction allows of the capacity. ``moment`` has the figures at the moment that the
    report is about, or None if the input has no snapshot.
    """

    device: int
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    active_bytes: int | None = None
    requested_bytes: int | None = None
    free_cached_bytes: int | None = None
    releasable_bytes: int | None = None
    stranded_free_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    capacity_bytes: int | None = None
    n_events: int | None = None
    peak_active_bytes: int | None = None
    private_pools_bytes: int | None = None
    pending_free_bytes: int | None = None
    limit_bytes: int | None = None
    moment: MomentFigures | None = None

    @property
    def allowed_bytes(self) -> int | None:
        """What PyTorch could have: what a limit allows, else the capacity."""
        return self.capacity_bytes if self.limit_bytes is None else self.limit_bytes

    def highest(self, kind: str) -> int | None:
        """Return the most ``active``, ``allocated`` or ``reserved`` bytes that are known."""
        values = (getattr(self, f"peak_{kind}_bytes"), getattr(self, f"{kind}_bytes"))
        return max((v for v in values if v is not None), default=None)


class StranderReport(Struct, frozen=True):
    """A live block (or group with the same stack) that keeps free memory from being returned.

    ``stranded_bytes`` is the free memory that could be returned if these blocks were freed.
    ``moment`` is the failure, or the end of the file if there is none.
    """

    device: int
    n_blocks: int
    block_bytes: int
    stranded_bytes: int
    stack: Sequence[Location] = ()
    location: Location | None = None
    age_events: int | None = None
    moment: Moment = Moment.END


class HolderReport(Struct, frozen=True):
    """Live memory by the user's own source line: at the failure, at the peak and at the end.

    ``moment`` is the moment of these that the report is about; ``held_bytes`` and ``n_blocks``
    apply to it. ``now_bytes`` is at the end of the file. ``failure_bytes`` is None if no request in
    the trace decides the verdict.

    ``within`` is the library's line that the user's line called into and that made most of the
    memory. ``module`` is the path of the model's module that made most of it, with ``*`` for the
    number of a repeated module, or "" if none was recorded (``run --module-paths``).
    ``categories`` say what most of it is for, largest first, if they are few.
    """

    device: int
    location: Location | None
    now_bytes: int
    peak_bytes: int | None
    n_blocks: int
    stack: Sequence[Location] = ()
    within: Location | None = None
    module: str = ""
    categories: Sequence[Category] = ()
    failure_bytes: int | None = None
    moment: Moment = Moment.END

    @property
    def held_bytes(self) -> int:
        """What was live at the moment that the report is about."""
        at = {Moment.FAILURE: self.failure_bytes, Moment.PEAK: self.peak_bytes}
        return at.get(self.moment, self.now_bytes) or 0


class OwnerReport(Struct, frozen=True):
    """Who holds memory at ``moment``, by its name in the program.

    Attributes:
        owner: the owner; its name has ``*`` for numbers if several are alike, "" for ``unnamed``.
        location: the line that made most of the memory.
        grown_bytes: how much more it holds than in the first census; None if that is not known.
        n_items_before: number of its items in the first census.
    """

    device: int
    owner: Owner
    held_bytes: int
    n_blocks: int
    location: Location | None = None
    moment: Moment = Moment.END
    grown_bytes: int | None = None
    n_items_before: int | None = None


class FunctionHolder(Struct, frozen=True):
    """Several lines of one function that hold memory together, at the moment of the holders.

    ``first_line`` and ``last_line`` are the first and last that hold memory.
    """

    device: int
    function: str
    filename: str
    first_line: int
    last_line: int
    held_bytes: int
    moment: Moment

    @property
    def short(self) -> str:
        """The function with its file and lines: ``update_nodes (models.py:174-181)``."""
        name = basename_of(self.filename)
        return f"{self.function} ({name}:{self.first_line}-{self.last_line})"

    def has(self, holder: HolderReport | OwnerReport) -> bool:
        """Whether a holder's line, or the line that made most of an owner's memory, is in it."""
        place = holder.location
        return (
            place is not None
            and (holder.device, place.filename) == (self.device, self.filename)
            and place.function == self.function
            and self.first_line <= place.line <= self.last_line
        )


class TimelinePoint(Struct, frozen=True):
    """A named moment of a trace: its start and end, a peak, a flush, an OOM.

    ``event`` counts the events before it; ``note`` says more in a few words, or is "".
    """

    what: str
    event: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    note: str = ""


class TimelineStrip(Struct, frozen=True):
    """The memory of one device over its trace, in at most a few hundred columns.

    Attributes:
        allocated_bytes, reserved_bytes: maximum in each column, so that no peak is lost.
        oom_columns, flush_columns: columns with an OOM or a flush, ascending, without duplicates.
        first_bytes, last_bytes, peak_bytes: (allocated, reserved) before the trace, after it, and
            at the highest of each.
        points: named moments, in order.
    """

    device: int
    n_events: int
    allocated_bytes: Sequence[int]
    reserved_bytes: Sequence[int]
    first_bytes: tuple[int, int]
    last_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]
    capacity_bytes: int | None = None
    oom_columns: Sequence[int] = ()
    flush_columns: Sequence[int] = ()
    n_ooms: int = 0
    n_flushes: int = 0
    points: Sequence[TimelinePoint] = ()


class SegmentReport(Struct, frozen=True):
    """A segment with free memory that live blocks strand.

    ``stranded_bytes`` is less than ``free_bytes`` if an expandable segment can return pages.
    """

    device: int
    total_bytes: int
    free_bytes: int
    stranded_bytes: int
    largest_hole_bytes: int


class Diagnosis(Struct, frozen=True):
    """Everything a report needs. Produced by ``fragdoctor.diagnose``.

    ``timeline``, ``worst_segments`` (most stranded first) and ``n_stranded_segments`` are for the
    device that the verdict is about; ``phases`` has one report per device with a trace, starting
    with that device.
    ``functions`` are functions with several lines among the holders, most bytes first.
    ``owners`` are the names that hold memory, by device, most bytes first; empty without a census.
    ``host`` is the host's page-locked memory, or None if the file has none.
    ``modules`` say where in the model the memory was at each device's peak of allocated bytes, as a
    tree of modules; empty if no module was recorded.
    ``notes`` are about the inputs, ``replay_notes`` about what a replay can and cannot say.
    ``story`` is None if there is no log, or if nothing happens in it. ``moment`` is the moment that
    the user asked for. ``failure`` is the request that the verdict is about, or None if no GPU
    request failed. ``analyses`` has the ``DeviceAnalysis`` of each device of the snapshot, for the
    graphics of the page.
    """

    case: Case
    verdict: Verdict
    checklist: Sequence[ChecklistItem]
    devices: Sequence[DeviceFigures] = ()
    stranders: Sequence[StranderReport] = ()
    holders: Sequence[HolderReport] = ()
    functions: Sequence[FunctionHolder] = ()
    owners: Sequence[OwnerReport] = ()
    modules: Sequence[ModuleMemory] = ()
    fidelity: FidelityReport = field(default_factory=FidelityReport)
    findings: Sequence[Finding] = ()
    skipped: Sequence[SkippedRule] = ()
    recommendations: Sequence[Recommendation] = ()
    rejected: Sequence[Recommendation] = ()
    corrections: Sequence[str] = ()
    notes: Sequence[str] = ()
    replay_notes: Sequence[str] = ()
    timeline: TimelineStrip | None = None
    worst_segments: Sequence[SegmentReport] = ()
    n_stranded_segments: int = 0
    phases: Sequence[PhaseReport] = ()
    story: LogStory | None = None
    moment: MomentReport | None = None
    failure: Failure | None = None
    host: HostMemoryReport | None = None
    analyses: Mapping[int, Any] = field(default_factory=dict)

    def figures_of(self, device: int | None) -> DeviceFigures | None:
        """Return the figures of a device, or None if there are none."""
        return next((f for f in self.devices if f.device == device), None)

    def __repr__(self) -> str:
        """Return only the verdict: the case may hold a snapshot with millions of rows."""
        verdict = self.verdict
        return f"<Diagnosis {verdict.cause} ({verdict.confidence}): {verdict.summary!r}>"

    def _repr_html_(self) -> str | None:
        """Return what Jupyter shows."""
        return drawn(self)

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False
    ) -> str:
        """Return the interactive page of ``analyze --format html``; write it to ``path`` if given.

        Raises:
            ConfigError: the file exists and ``overwrite`` is False.
        """
        page = drawn(self, as_page=True) or ""
        if path is not None:
            try:
                with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
                    file.write(page)
            except FileExistsError as e:
                raise ConfigError(
                    f"{os.fspath(path)} exists.", hint="Give overwrite=True to replace it."
                ) from e
        return page

    def holders_frame(self) -> pd.DataFrame:
        """Return live memory by source line as a DataFrame, one row per line, largest first.

        Columns: ``device``, ``location``, ``now_bytes``, ``peak_bytes`` (missing without a trace),
        ``n_blocks``.
        """
        numbers = ("now_bytes", "peak_bytes", "n_blocks")
        return _table_of(self.holders, ("device", "location"), numbers)

    def stranders_frame(self) -> pd.DataFrame:
        """Return the live blocks that strand free memory as a DataFrame, worst first.

        Columns: ``device``, ``location``, ``stranded_bytes`` (what would be free without them),
        ``n_blocks``, ``block_bytes``, ``age_events`` (missing if they are older than the trace).
        """
        numbers = ("stranded_bytes", "n_blocks", "block_bytes", "age_events")
        return _table_of(self.stranders, ("device", "location"), numbers)

    def checklist_frame(self) -> pd.DataFrame:
        """Return the checklist as a DataFrame, one row per item, indexed by the item's id.

        Columns: ``title``, ``status``, ``value``, ``detail``, ``source``.
        """
        columns = ("id", "title", "status", "value", "detail", "source")
        return _table_of(self.checklist, columns).set_index("id")

    def recommendations_frame(self) -> pd.DataFrame:
        """Return what to do, best first, then what would not help (``rank`` 0), indexed by rank.

        Columns: ``code``, ``title``, ``setting``, ``change``, ``confidence``, ``method``, ``fits``,
        ``peak_reserved_bytes``, ``retries``, ``margin_bytes``; untested values are missing.
        """
        texts = ("rank", "code", "title", "setting", "change", "confidence", "predicted.method",
                 "predicted.fits")  # fmt: skip
        numbers = ("predicted.peak_reserved_bytes", "predicted.retries", "predicted.margin_bytes")
        frame = _table_of((*self.recommendations, *self.rejected), texts, numbers)
        return frame.astype({"fits": "boolean"}).set_index("rank")


def _table_of(
    items: Iterable[object], texts: Sequence[str], numbers: Sequence[str] = ()
) -> pd.DataFrame:
    from fragdoctor.model.frames import table_of  # noqa: PLC0415 - loads pandas

    return table_of(items, texts, numbers)
