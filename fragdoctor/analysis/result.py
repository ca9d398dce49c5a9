"""The results of the analysis of one device: plain values, no rules, no opinions.

Rows are rows of the device's own events.

Every figure is exact for the contents of the file. None means that the file does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from msgspec import Struct, field

from fragdoctor.model.phases import Category, PhaseReport, TrainingPhase
from fragdoctor.model.snapshot import I64, U8, Bools
from fragdoctor.trace.lives import Totals
from fragdoctor.trace.trace import Trace


class FreeSpace(Struct, frozen=True):
    """Free cached memory, split by whether the allocator can return it by itself.

    Attributes:
        free_cached_bytes: reserved - active.
        releasable_bytes: what a flush returns: whole free segments of default pools, and fully free
            2 MiB / 20 MiB pages of expandable segments. Private pools are never counted here: they
            return memory only once nobody uses them, and no file says when that is.
        stranded_free_bytes: free_cached - releasable - private_pools_free: free bytes inside
            segments or pages that still hold a live or pending block.
        private_pools_free_bytes: free bytes in private pools (unusable elsewhere).
        pending_free_bytes: active but not allocated: frees that wait for other streams.
        largest_free_block_bytes: over all pools of the device, without a flush.
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

    ``stranded_bytes``: free bytes that would become releasable if only these blocks were freed
    (a segment held by two groups counts for neither).
    ``oldest_event``: row of their oldest allocation, None if it was before the trace.
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

    ``frame`` is a frame id of the snapshot or -1 (no stack recorded); ``stack`` is the id of the
    stack that holds most of the memory. ``n_bytes`` and ``n_blocks`` are at the end of the file,
    and then at the other moments that were asked for. ``module`` and ``categories`` are as in
    ``HolderReport``.
    """

    frame: int
    stack: int
    n_bytes: Sequence[int]
    n_blocks: Sequence[int]
    module: str = ""
    categories: Sequence[Category] = ()


class Growth(Struct, frozen=True):
    """Live memory from one source line (or stack) that grows step by step and is not freed.

    Attributes:
        slope_bytes: how many bytes it grows per step (median slope).
        n_steps: number of steps that left something live.
        n_survivors, survivor_bytes: number and bytes of the live allocations at the end.
        first_event, last_event: rows of the first and last survivor.
        in_evaluation: whether the steps are the batches of one evaluation.
    """

    frame: int
    stack: int
    slope_bytes: int
    n_steps: int
    n_survivors: int
    survivor_bytes: int
    first_event: int
    last_event: int
    in_evaluation: bool = False


class KeptKind(IntEnum):
    """What a kept block is, judging by its stack."""

    ACTIVATION = 0
    LOSS = 1
    STATE = 2
    COPY = 3
    GRADIENT = 4
    TENSOR = 5


class KeptPattern(StrEnum):
    """The usual ways in which memory is kept by mistake."""

    GRAPH = "graph"
    EVALUATION = "evaluation"
    RESULTS = "results"
    COPIES = "copies"
    MODELS = "models"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    SHAPES = "shapes"
    BUFFER = "buffer"
    TENSORS = "tensors"


class KeptBlocks(Struct, frozen=True):
    """Kept blocks of one kind: total bytes, and blocks per step."""

    kind: KeptKind
    n_per_step: int
    n_bytes: int


class KeptMemory(Struct, frozen=True, eq=False):
    """What grows, and what makes it.

    Attributes:
        frame: frame id of the line through which nearly all of it is made; -1 if no stack shows it.
        stack: id of the stack that makes most of it.
        lines: the growing lines, most bytes first.
        kinds: kinds of the kept blocks, most bytes first.
        pattern: which usual way of keeping memory it looks like.
        n_steps: number of steps in which it grew, by ``slope_bytes`` each on average.
        survivor_bytes, n_survivors: bytes and number of all kept blocks.
        rows: ``int64[n_survivors]``, rows of ``Lives`` of the kept blocks.
        ends: ``int64[n_survivors]``, event row at which the step that made each block ends.
        in_evaluation: whether the steps are the batches of one evaluation.
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
    in_evaluation: bool = False


class IdleGraph(Struct, frozen=True):
    """An autograd graph that an evaluation builds, though no backward pass will use it.

    Attributes:
        frame: frame id of the line that calls the model; -1 if no stack shows one.
        n_bytes: bytes of the results that the graph keeps.
        share: share of the bytes made by the model that the evaluation keeps.
        usual_share: the same share in a forward pass of training.
    """

    frame: int
    n_bytes: int
    share: float
    usual_share: float


class SizeDiversity(Struct, frozen=True):
    """How varied the request sizes of the large pool are; variety is what causes fragmentation."""

    n_large_allocs: int
    n_distinct_large: int
    drifting: bool


class OomEvent(Struct, frozen=True):
    """An ``oom`` row with the state of the device at that moment.

    ``rounded_bytes`` is the size in the trace; ``segment_bytes`` is what PyTorch's message prints
    as "Tried to allocate": the segment for it (2 MiB, 20 MiB, or the next multiple of 2 MiB), also
    where expandable segments take whole pages.
    ``largest_free_block_bytes`` is over the pools that could have served the request, or None if
    the layout at that moment was not rebuilt. ``private_pools_free_bytes`` is 0 if the layout is
    not known.
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
    private_pools_free_bytes: int = 0


class Flush(Struct, frozen=True):
    """A run of segment_free / segment_unmap rows.

    ``cause`` is ``retry`` (an allocation with a new segment or an oom follows at once), ``gc``,
    ``max_split`` (oversize blocks returned before a full flush) or ``empty_cache``. It is inferred;
    see ``analysis/device.py``.
    """

    first_row: int
    last_row: int
    released_bytes: int
    cause: str


class CaptureQuality(Struct, frozen=True):
    """How much of the story the file holds, and the evidence for each shortcoming.

    Attributes:
        has_trace: whether there is an event other than ``snapshot``.
        has_stacks: share of live blocks and alloc events with a stack, 0..1.
        is_late_start: whether recording began late: blocks were live at the first event.
        is_truncated: whether a ring buffer was likely full: a late start, and a number of events
            that is suspiciously round or equal to another device's.
        missing_actions: actions that must have happened but are not in the file.
        n_contradictions: rows that contradict the undone state (skipped actions, another
            allocator).
        is_consistent: whether undoing the trace met no contradiction.
        tiling_errors: number of segments whose blocks do not tile them (not the native allocator).
        notes: one sentence for each shortcoming.
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


_TRAINING: Final = (TrainingPhase.BACKWARD, TrainingPhase.OPTIMIZER)


class PhaseAnalysis(Struct, frozen=True):
    """The phases of a device's trace, with the phase of each row and the category of each block.

    ``labels[i]`` is the ``TrainingPhase`` of the device's rows ``first[i]`` to ``first[i + 1]``, so
    ``first`` is one longer than ``labels``. ``category`` has the category of each block of
    ``Lives`` (see ``analysis/categories.py``); it is empty if none is known.
    """

    report: PhaseReport
    labels: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    first: I64 = field(default_factory=lambda: np.zeros(1, np.int64))
    category: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def is_training(self) -> Bools:
        """Whether each pass shows that the program trains; a forward pass alone does not."""
        found: Bools = np.isin(self.labels, _TRAINING)
        return found


class DeviceAnalysis(Struct, frozen=True):
    """Everything the columns say about one device.

    ``n_steps`` is the number of steps found in the trace, evaluations among them. ``kept`` is
    memory that grows enough for a verdict; ``gathered`` grows as much but ends with an evaluation,
    so it is no leak. ``idle_graph`` is what an evaluation keeps in its only pass.
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

    @property
    def category(self) -> U8:
        """The category of each block of ``Lives``; empty if none is known."""
        return np.zeros(0, np.uint8) if self.phases is None else self.phases.category
