"""Key figures of each device, from whichever input has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from fragdoctor.analysis.free_space import free_space
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis.moments import DecidingMoment, categories_at
from fragdoctor.model.arrays import distinct
from fragdoctor.model.case import MemoryStats
from fragdoctor.model.diagnosis import (
    DeviceFigures,
    MomentFigures,
    TimelinePoint,
    TimelineStrip,
)
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.rules.rule import Context
from fragdoctor.trace.lives import Totals, stretch_starts
from fragdoctor.units import format_size


def device_figures(context: Context, moment: DecidingMoment | None) -> DeviceFigures | None:
    """Return the figures of one device, or None if no input has any."""
    r, retries = context.failed_request, context.retries
    told = DeviceFigures(
        device=0 if context.device is None else context.device,
        alloc_retries=retries[0] if retries else None,
        ooms=context.n_ooms,
        peak_allocated_bytes=peak_of(context, "allocated")[0],
        peak_reserved_bytes=peak_of(context, "reserved")[0],
        peak_active_bytes=peak_of(context, "active")[0],
        capacity_bytes=_capacity(context),
        limit_bytes=context.limit_bytes,
    )
    if moment is not None:
        return _from_snapshot(replace(told, moment=_at(context, moment)), moment.analysis)
    if r is not None:
        return _from_message(told, r)
    return _from_stats(told, context.stats[-1]) if context.stats else None


def _from_snapshot(told: DeviceFigures, a: DeviceAnalysis) -> DeviceFigures:
    space = a.free_space
    return replace(
        told,
        device=a.device,
        reserved_bytes=a.reserved_bytes,
        allocated_bytes=a.allocated_bytes,
        active_bytes=a.active_bytes,
        requested_bytes=a.requested_bytes or None,
        free_cached_bytes=space.free_cached_bytes,
        releasable_bytes=space.releasable_bytes,
        stranded_free_bytes=space.stranded_free_bytes,
        largest_free_block_bytes=space.largest_free_block_bytes,
        n_events=a.n_events,
        private_pools_bytes=space.private_pools_reserved_bytes,
        pending_free_bytes=space.pending_free_bytes,
    )


def _from_message(told: DeviceFigures, r: FailedRequest) -> DeviceFigures:
    return replace(
        told,
        reserved_bytes=r.reserved_bytes,
        allocated_bytes=None if r.live_bytes is None else r.live_bytes - r.pending_bytes,
        active_bytes=r.live_bytes,
        free_cached_bytes=r.cache_bytes,
        capacity_bytes=r.total_bytes,
        private_pools_bytes=r.pools_free_bytes or None,
    )


def _from_stats(told: DeviceFigures, s: MemoryStats) -> DeviceFigures:
    reserved, active = s.reserved_bytes, s.active_bytes
    return replace(
        told,
        reserved_bytes=reserved,
        allocated_bytes=s.allocated_bytes,
        active_bytes=active,
        requested_bytes=s.requested_bytes,
        free_cached_bytes=None if reserved is None or active is None else reserved - active,
        stranded_free_bytes=s.inactive_split_bytes,
    )


def _at(context: Context, moment: DecidingMoment) -> MomentFigures:
    """Return what the device's memory consisted of at a moment."""
    a, layout = moment.analysis, moment.layout
    space = free_space(layout)
    active = int(layout.live_bytes.sum())
    failed = context.failed_request if moment.failed is not None else None
    return MomentFigures(
        moment=moment.kind,
        reserved_bytes=layout.reserved_bytes,
        allocated_bytes=active - space.pending_free_bytes,
        active_bytes=active,
        releasable_bytes=space.releasable_bytes,
        stranded_free_bytes=space.stranded_free_bytes,
        private_pools_free_bytes=space.private_pools_free_bytes,
        device_free_bytes=None if failed is None else failed.free_bytes,
        event=moment.state if a.timeline is not None else None,
        is_end=moment.is_end,
        categories=categories_at(a, moment.state),
    )


def peak_of(context: Context, name: str) -> tuple[int | None, str]:
    """Return the higher of the trace's peak and the counter's, which covers lost events too.

    Also return the input that says it.
    """
    line = None if context.analysis is None else context.analysis.timeline
    found = [] if line is None else [(int(getattr(line, f"peak_{name}_bytes")), "snapshot")]
    for stats in context.stats[-1:]:
        counted = stats.get(f"{name}_bytes.all.peak")
        found += [] if counted is None else [(counted, stats.origin)]
    return max(found, default=(None, ""))


def _capacity(context: Context) -> int | None:
    if context.total_bytes is not None:
        return context.total_bytes
    return context.analysis.capacity_estimate_bytes if context.analysis is not None else None


I64 = npt.NDArray[np.int64]

MAX_COLUMNS: Final = 240
"""Twice the widest page: a renderer takes the highest of neighboring columns."""

MAX_POINTS: Final = 20
"""The most flushes, and the most OOMs, that get a name of their own."""


def timeline_strip(context: Context) -> TimelineStrip | None:
    """Return the device's memory over its trace, or None without a trace."""
    a = context.analysis
    if a is None or a.timeline is None:
        return None
    line = a.timeline
    n_states = a.n_events + 1
    starts = stretch_starts(n_states, MAX_COLUMNS)
    first, last = line.at([0, a.n_events]).tolist()
    return TimelineStrip(
        device=a.device,
        n_events=a.n_events,
        allocated_bytes=tuple(line.envelope("allocated_bytes", starts)[1].tolist()),
        reserved_bytes=tuple(line.envelope("reserved_bytes", starts)[1].tolist()),
        first_bytes=(first[0], first[2]),
        last_bytes=(last[0], last[2]),
        peak_bytes=(line.peak_allocated_bytes, line.peak_reserved_bytes),
        capacity_bytes=_capacity(context),
        oom_columns=_columns((o.row + 1 for o in a.ooms), starts),
        flush_columns=_columns((f.first_row + 1 for f in a.flushes), starts),
        n_ooms=len(a.ooms),
        n_flushes=len(a.flushes),
        points=_points(a, line),
    )


def _points(a: DeviceAnalysis, line: Totals) -> tuple[TimelinePoint, ...]:
    """Return the moments worth naming, in order: start, peaks, flushes, OOMs, end."""
    places = [
        ("Start of the trace", 0, ""),
        ("Peak allocated", line.peak_allocated_state, ""),
        ("Peak reserved", line.peak_reserved_state, ""),
    ]
    for oom in a.ooms[-MAX_POINTS:]:
        note = f"{format_size(oom.rounded_bytes)} requested"
        if oom.device_free_bytes is not None:
            note += f", {format_size(oom.device_free_bytes)} free at the driver"
        places.append(("Out of memory", oom.row + 1, note))
    for flush in sorted(a.flushes, key=lambda f: -f.released_bytes)[:MAX_POINTS]:
        note = f"{format_size(flush.released_bytes)} returned"
        places.append((f"Flush ({flush.cause})", flush.last_row + 1, note))
    places.sort(key=lambda place: place[1])
    places.append(("End of the trace", a.n_events, ""))
    values = line.at([event for _, event, _ in places]).tolist()
    return tuple(
        TimelinePoint(what, event, allocated, active, reserved, note)
        for (what, event, note), (allocated, active, reserved) in zip(places, values, strict=True)
    )


def _columns(states: Iterable[int], starts: I64) -> tuple[int, ...]:
    """Return the columns that these states fall in, without duplicates."""
    at = np.fromiter(states, np.int64)
    return tuple(distinct(np.searchsorted(starts, at, side="right") - 1).tolist())
