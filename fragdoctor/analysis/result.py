"""What the analysis of one device says: plain values, no rules, no opinions.

Every figure is exact for what the file holds. None means that the file cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from fragdoctor.model.phases import Category, CategoryShare, PhaseFigures, TrainingPhase
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.lives import Totals
from fragdoctor.trace.trace import Trace


class FreeSpace(Struct, frozen=True):
    """Free cached memory, split by whether the allocator can return it by itself.

    Attributes:
        free_cached_bytes: reserved - active.
        releasable_bytes: what a flush returns: whole free segments of default pools, and fully
            free 2 MiB / 20 MiB pages of expandable ones. Private pools return only when nobody
            uses them any more, which no file says: never counted here.
        stranded_free_bytes: free_cached - releasable - private_pools_free: inside segments or pages
            that still hold a live or pending block.
        private_pools_free_bytes: free bytes in private pools (unusable elsewhere).
        pending_free_bytes: active but not allocated: frees that wait for other streams.
        largest_free_block_bytes: over all pools of the device, after no flush.
    """

    free_cached_bytes: int
    releasable_bytes: int
    stranded_free_bytes: int
    private_pools_free_bytes: int
    private_pools_reserved_bytes: int
    pending_free_bytes: int
    largest_free_block_bytes: int


class Strander(Struct, frozen=True):
    """A group of live blocks with the same stack that keeps free memory in its segments.

    ``stranded_bytes``: free bytes that would become releasable if just these blocks were gone
    (a segment held by two groups counts for neither).
    ``oldest_event``: row of the oldest of their allocations, None if before the trace.
    """

    stack: int
    n_blocks: int
    block_bytes: int
    stranded_bytes: int
    n_segments: int
    oldest_event: int | None
    addresses: Sequence[int]


class Holder(Struct, frozen=True):
    """Live memory of one user source line (the innermost frame that is not library code).

    ``frame`` is a frame id of the snapshot or -1 (no stack recorded); ``stack`` is the stack id
    that holds most of it. ``module`` is the path of the module that made most of it, the number of
    a repeated one as ``*``; "" where none was recorded. Hostile text. ``categories`` are those of
    most of it, the largest first, where they are few. ``failure_bytes`` and ``n_failure`` are
    those at a failure after which more happened, None where none was asked about.
    """

    frame: int
    stack: int
    now_bytes: int
    n_now: int
    peak_bytes: int | None
    n_peak: int | None
    module: str = ""
    categories: Sequence[Category] = ()
    failure_bytes: int | None = None
    n_failure: int | None = None


class Growth(Struct, frozen=True):
    """Live memory from one source line (or stack) that grows step by step and is not freed.

    Attributes:
        slope_bytes: bytes by which it grows per step (median slope).
        n_steps: steps that left something alive; ``n_survivors`` live allocations at the end.
        survivor_bytes: bytes of these at the end.
        first_event, last_event: rows of the first and last survivor.
    """

    frame: int
    stack: int
    slope_bytes: int
    n_steps: int
    n_survivors: int
    survivor_bytes: int
    first_event: int
    last_event: int


class KeptKind(StrEnum):
    """What a kept block is, as far as its stack shows."""

    ACTIVATION = "activation"
    LOSS = "loss"
    STATE = "optimizer state"
    COPY = "copy"
    GRADIENT = "result of the backward pass"
    TENSOR = "tensor"


class KeptPattern(StrEnum):
    """The usual ways in which memory is kept by mistake."""

    GRAPH = "graph"
    EVALUATION = "evaluation"
    RESULTS = "results"
    COPIES = "copies"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    SHAPES = "shapes"
    BUFFER = "buffer"
    TENSORS = "tensors"


class KeptBlocks(Struct, frozen=True):
    """Kept blocks of one kind: bytes in all, and how many a step."""

    kind: KeptKind
    n_per_step: int
    n_bytes: int


class KeptMemory(Struct, frozen=True, eq=False):
    """What grows, and what makes it.

    Attributes:
        frame: frame id of the line through which nearly all of it is made; -1 where no stack says.
        stack: id of the stack that makes most of it.
        lines: the growing lines, most bytes first.
        kinds: most bytes first.
        pattern: what it looks like.
        n_steps: in which it grew, by ``slope_bytes`` each on average.
        survivor_bytes, n_survivors: all that is kept.
        rows: ``int64[n_survivors]``, of the lives that are kept.
        ends: ``int64[n_survivors]``, event row at which the step that made each ends.
    """

    frame: int
    stack: int
    lines: Sequence[Growth]
    kinds: Sequence[KeptBlocks]
    pattern: KeptPattern
    n_steps: int
    slope_bytes: int
    n_survivors: int
    survivor_bytes: int
    rows: I64
    ends: I64


class IdleGraph(Struct, frozen=True):
    """An autograd graph that an evaluation builds, though no backward pass will use it.

    Attributes:
        frame: id of the line that calls the model; -1 where no stack shows one.
        n_bytes: of the results that it keeps.
        share, usual_share: of the bytes that the model makes, those that it keeps; and the same of
            a forward pass of training.
    """

    frame: int
    n_bytes: int
    share: float
    usual_share: float


class SizeDiversity(Struct, frozen=True):
    """How varied the request sizes of the large pool are (the food of fragmentation)."""

    n_allocs: int
    n_large_allocs: int
    n_distinct_large: int
    drifting: bool


class OomEvent(Struct, frozen=True):
    """An ``oom`` row with the state of the device at that moment.

    ``rounded_bytes`` is what the trace says; ``segment_bytes`` is what the driver was asked for
    (2 MiB, 20 MiB, or the next multiple of 2 MiB).
    ``largest_free_block_bytes`` is over the pools that could have served the request; None where
    the layout at that moment cannot be rebuilt. ``message_bytes`` is what PyTorch's message prints
    as "Tried to allocate": ``segment_bytes`` but for expandable segments, where it ignores pages.
    ``private_pools_free_bytes`` is 0 where the layout is not known.
    """

    row: int
    rounded_bytes: int
    segment_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    stack: int
    largest_free_block_bytes: int | None = None
    message_bytes: int | None = None
    private_pools_free_bytes: int = 0


class Flush(Struct, frozen=True):
    """A run of segment_free / segment_unmap rows.

    ``cause``: ``retry`` (an allocation with a new segment or an oom follows at once), ``gc``,
    ``max_split`` (oversize blocks returned before a full flush) or ``empty_cache``; inferred, see
    ``analysis/device.py``.
    """

    first_row: int
    last_row: int
    released_bytes: int
    cause: str


class CaptureQuality(Struct, frozen=True):
    """How much of the story the file holds, each shortcoming with its evidence.

    Attributes:
        has_trace: at least one event that is not ``snapshot``.
        has_stacks: share of live blocks and alloc events with a stack, 0..1.
        is_late_start: blocks live at the first event (recording began after allocation).
        is_truncated: likely a full ring buffer: late start, and a count of events that is
            suspiciously round or equal to another device's, or frees of unknown blocks at once.
        missing_actions: actions that must have happened but are not in the file.
        n_contradictions: rows that contradict the undone state (skipped actions, another
            allocator).
        is_consistent: undoing the trace met no contradiction.
        tiling_errors: segments whose blocks do not tile them (not the native allocator).
        notes: one sentence each.
    """

    has_trace: bool
    has_stacks: float
    is_late_start: bool
    is_truncated: bool
    missing_actions: Sequence[str] = ()
    n_contradictions: int = 0
    is_consistent: bool = True
    tiling_errors: int = 0
    initial_live_bytes: int = 0
    notes: Sequence[str] = ()


class PhaseAnalysis(Struct, frozen=True):
    """Passes of training phases and the categories of memory; see ``model/phases.py``.

    ``labels[i]`` is the phase of rows ``first[i]`` to ``first[i + 1]`` (one longer), within the
    device. ``labels`` has a ``TrainingPhase`` each. ``category`` is that of each block of
    ``Lives`` (see ``analysis/categories.py``), empty where none is known.
    """

    method: str
    reason: str = ""
    labels: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    first: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    pass_peak_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    phases: Sequence[PhaseFigures] = ()
    peak_label: TrainingPhase = TrainingPhase.UNKNOWN
    peak_bytes: int = 0
    at_peak: Sequence[CategoryShare] = ()
    at_rest: Sequence[CategoryShare] = ()
    rest_bytes: int | None = None
    category: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))


class DeviceAnalysis(Struct, frozen=True):
    """Everything the columns say about one device.

    ``n_steps`` are the steps found in the trace, 0 without any. ``kept`` is what grows enough for a
    verdict, ``gathered`` the same of what ends with an evaluation, so that it is no leak;
    ``idle_graph`` is what an evaluation keeps in its only pass.
    """

    trace: Trace
    device: int
    n_events: int
    n_segments: int
    n_blocks: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    free_space: FreeSpace
    capture: CaptureQuality
    timeline: Totals | None = None
    stranders: Sequence[Strander] = ()
    holders: Sequence[Holder] = ()
    growth: Sequence[Growth] = ()
    kept: KeptMemory | None = None
    gathered: KeptMemory | None = None
    idle_graph: IdleGraph | None = None
    sizes: SizeDiversity | None = None
    ooms: Sequence[OomEvent] = ()
    flushes: Sequence[Flush] = ()
    n_inferred_retries: int = 0
    capacity_estimate_bytes: int | None = None
    n_steps: int = 0
    phases: PhaseAnalysis | None = None
