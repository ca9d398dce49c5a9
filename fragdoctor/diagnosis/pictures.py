"""The small data behind the pictures of the text report: a timeline, and the worst segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.pinned_segments import NO_PIN
from fragdoctor.analysis.result import DeviceAnalysis, PhaseAnalysis, PinnedSegment, Timeline
from fragdoctor.diagnosis.figures import MAX_PINS, device_figures
from fragdoctor.diagnosis.phases import PHASES
from fragdoctor.model.diagnosis import (
    RunKind,
    SegmentReport,
    SegmentRun,
    TimelinePoint,
    TimelineStrip,
)
from fragdoctor.model.phases import Phase
from fragdoctor.model.snapshot import BlockState
from fragdoctor.rules.context import Context
from fragdoctor.units import format_size

I64 = npt.NDArray[np.int64]

MAX_COLUMNS: Final = 240
"""Twice the widest page: a renderer takes the highest of neighbouring columns."""

MAX_POINTS: Final = 20
"""Flushes, and OOMs, that have a name each."""

_KINDS: Final = {
    int(BlockState.INACTIVE): RunKind.FREE,
    int(BlockState.ALLOCATED): RunKind.LIVE,
    int(BlockState.PENDING_FREE): RunKind.PENDING,
}


def timeline_strip(context: Context) -> TimelineStrip | None:
    """Return the device's memory over its trace; None without a trace."""
    a = context.analysis
    if a is None or a.timeline is None or context.snapshot is None:
        return None
    line = a.timeline
    n_states = len(line.allocated_bytes)
    starts = np.unique(np.linspace(0, n_states, MAX_COLUMNS, endpoint=False).astype(np.int64))
    allocated, reserved = line.allocated_bytes, line.reserved_bytes
    first_row = context.snapshot.events.device_slice(a.device).start
    figures = device_figures(context)
    return TimelineStrip(
        device=a.device,
        n_events=a.n_events,
        allocated_bytes=tuple(np.maximum.reduceat(allocated, starts).tolist()),
        reserved_bytes=tuple(np.maximum.reduceat(reserved, starts).tolist()),
        first_bytes=(int(allocated[0]), int(reserved[0])),
        last_bytes=(int(allocated[-1]), int(reserved[-1])),
        peak_bytes=(line.peak_allocated_bytes, line.peak_reserved_bytes),
        capacity_bytes=None if figures is None else figures.capacity_bytes,
        oom_columns=_columns((o.row - first_row + 1 for o in a.ooms), starts),
        flush_columns=_columns((f.first_row - first_row + 1 for f in a.flushes), starts),
        n_ooms=len(a.ooms),
        n_flushes=len(a.flushes),
        phases=_phases(a.phases, starts, n_states),
        points=_points(a, line, first_row),
    )


def _points(a: DeviceAnalysis, line: Timeline, first_row: int) -> tuple[TimelinePoint, ...]:
    """Return the moments worth a name: start, peaks, flushes, OOMs, end; in order."""
    places = [
        ("Start of the trace", 0, ""),
        ("Peak allocated", int(line.allocated_bytes.argmax()), ""),
        ("Peak reserved", int(line.reserved_bytes.argmax()), ""),
    ]
    for oom in a.ooms[-MAX_POINTS:]:
        note = f"{format_size(oom.rounded_bytes)} asked"
        if oom.device_free_bytes is not None:
            note += f", {format_size(oom.device_free_bytes)} free at the driver"
        places.append(("Out of memory", oom.row - first_row + 1, note))
    for flush in sorted(a.flushes, key=lambda f: -f.released_bytes)[:MAX_POINTS]:
        note = f"{format_size(flush.released_bytes)} returned"
        places.append((f"Flush ({flush.cause})", flush.last_row - first_row + 1, note))
    places.sort(key=lambda place: place[1])
    return tuple(
        TimelinePoint(
            what,
            event,
            int(line.allocated_bytes[event]),
            int(line.active_bytes[event]),
            int(line.reserved_bytes[event]),
            note,
        )
        for what, event, note in [*places, ("End of the trace", a.n_events, "")]
    )


def _phases(analysis: PhaseAnalysis | None, starts: I64, n_states: int) -> tuple[Phase, ...]:
    """Return the phase of the most events of each column; empty where none is known."""
    if analysis is None or not analysis.phases:
        return ()
    label = np.repeat(analysis.labels, np.diff(analysis.first))
    label = np.append(label[:1], label)[:n_states]  # state k is that after k events
    counts = np.stack(
        [np.add.reduceat((label == i).astype(np.int64), starts) for i in range(len(PHASES))]
    )
    return tuple(PHASES[i] for i in counts.argmax(axis=0).tolist())


def _columns(states: Iterable[int], starts: I64) -> tuple[int, ...]:
    """Return the columns that these states fall in, each once."""
    at = np.fromiter(states, np.int64)
    return tuple(np.unique(np.searchsorted(starts, at, side="right") - 1).tolist())


def segment_reports(context: Context) -> tuple[SegmentReport, ...]:
    """Return the segments with most pinned free memory, the worst first."""
    a = context.analysis
    if a is None:
        return ()
    # The places that pin_reports gives to the groups.
    place = {pin.stack: i for i, pin in enumerate(a.pins[:MAX_PINS])}
    return tuple(
        SegmentReport(
            device=a.device,
            total_bytes=s.total_bytes,
            free_bytes=s.free_bytes,
            pinned_bytes=s.pinned_bytes,
            largest_hole_bytes=s.largest_hole_bytes,
            runs=_runs(s, place),
        )
        for s in a.pinned_segments
    )


def _runs(segment: PinnedSegment, place: dict[int, int]) -> tuple[SegmentRun, ...]:
    """Return the blocks with neighbours of the same kind and group taken together."""
    kind, stack = segment.block_kind, segment.block_stack
    if not len(kind):
        return ()
    fresh = np.ones(len(kind), np.bool_)
    fresh[1:] = (kind[1:] != kind[:-1]) | (stack[1:] != stack[:-1])
    starts = np.flatnonzero(fresh)
    sizes = np.add.reduceat(segment.block_bytes, starts)
    rows = zip(sizes.tolist(), kind[starts].tolist(), stack[starts].tolist(), strict=True)
    return tuple(
        # A state of a newer PyTorch counts as live, as in the figures.
        SegmentRun(n, _KINDS.get(k, RunKind.LIVE), None if s == NO_PIN else place.get(s))
        for n, k, s in rows
    )
