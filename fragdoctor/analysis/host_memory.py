"""Page-locked memory of the host: what a snapshot's ``host_segments`` and ``host_traces`` say.

PyTorch's caching host allocator writes the same events as the device allocator and never splits a
segment (pytorch/pytorch#182407). So the host's trace is undone like that of one more device, whose
segments hold one block each. No figure of a GPU includes any of these bytes.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from fragdoctor.analysis.growth import StepEnds, find_growth
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.diagnosis import HostGrowth, HostMemoryReport, Moment
from fragdoctor.model.phases import LineBytes
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import (
    I64,
    Action,
    BlockState,
    BlockTable,
    EventTable,
    SegmentTable,
    Snapshot,
)
from fragdoctor.trace.trace import Trace


def host_memory(
    snapshot: Snapshot, moment_us: int | None = None, step_times_us: I64 | None = None
) -> HostMemoryReport | None:
    """Return the page-locked memory, or None if the file has none.

    If ``moment_us`` is None, the moment is the end of the file. The steps are the device's: the
    host's trace has no marks for them, but both traces use the same clock.
    """
    known = [segment for segment in snapshot.host_segments if segment.size_bytes > 0]
    report = HostMemoryReport(
        reserved_bytes=sum(segment.size_bytes for segment in known),
        cached_bytes=sum(s.size_bytes for s in known if s.allocated is False),
    )
    report_of_file = report if report.reserved_bytes else None
    events = snapshot.host_events
    if events is None:
        return report_of_file
    trace = Trace.of(_as_device(snapshot, events), 0)
    times, lives = trace.events.time_us, trace.lives
    has_times = bool((times >= 0).all())
    state = trace.n_events
    if moment_us is not None and has_times:
        state = int(np.searchsorted(times, moment_us, side="right"))
    peak_bytes = int(trace.totals.allocated_bytes.max())
    if not peak_bytes:
        return report_of_file
    held = lives.allocated_at(state)
    frames = trace.stacks.lines_of(lives.stack[held]).astype(np.int64)
    groups = largest_groups(frames, lives.size_bytes[held])
    steps = StepEnds(np.zeros(0, np.int64))
    if step_times_us is not None and has_times and (step_times_us >= 0).all():
        steps = StepEnds(np.searchsorted(times, step_times_us).astype(np.int64))
    return replace(
        report,
        moment=Moment.END if moment_us is None else Moment.FAILURE,
        held_bytes=int(lives.size_bytes[held].sum()),
        peak_bytes=peak_bytes,
        holders=tuple(
            LineBytes(snapshot.location(frame), n_bytes)
            for frame, n_bytes in zip(groups.group.tolist(), groups.n_bytes.tolist(), strict=True)
        ),
        growth=tuple(
            HostGrowth(snapshot.location(g.frame), g.slope_bytes, g.survivor_bytes)
            for g in find_growth(trace, steps)
        ),
    )


def _as_device(snapshot: Snapshot, events: EventTable) -> Snapshot:
    """Return the host's memory as the only device of a snapshot."""
    kept = [s for s in snapshot.host_segments if s.size_bytes > 0 and s.address >= 0]
    n = len(kept)
    allocs = np.flatnonzero(events.action == Action.ALLOC)
    stack_of = dict(
        zip(events.address[allocs].tolist(), events.stack[allocs].tolist(), strict=True)
    )
    address = np.array([s.address for s in kept], np.uint64)
    size = np.array([s.size_bytes for s in kept], np.uint64)
    is_held = np.array([s.allocated is not False for s in kept], np.bool_)
    zeros, none = np.zeros(n, np.int32), np.full(n, -1, np.int32)
    held_bytes = np.where(is_held, size, 0).astype(np.uint64)
    segments = SegmentTable(
        device=zeros,
        address=address,
        total_bytes=size,
        allocated_bytes=held_bytes,
        active_bytes=held_bytes,
        requested_bytes=held_bytes,
        stream=zeros,
        kind=np.ones(n, np.uint8),
        pool=none,
        is_expandable=np.zeros(n, np.bool_),
        stack=none,
        block_offsets=np.arange(n + 1, dtype=np.int64),
    )
    blocks = BlockTable(
        segment=np.arange(n, dtype=np.int32),
        address=address,
        size_bytes=size,
        requested_bytes=size,
        state=np.where(is_held, BlockState.ALLOCATED, BlockState.INACTIVE).astype(np.uint8),
        stack=np.array([stack_of.get(s.address, -1) for s in kept], np.int32),
    )
    return replace(
        snapshot,
        events=events,
        segments=segments,
        blocks=blocks,
        settings=AllocatorSettings(),
        oom_free_bytes={},
        host_events=None,
    )
