"""Key figures of each device, from whichever input has them."""

from __future__ import annotations

from fragdoctor.model.case import MemoryStats
from fragdoctor.model.diagnosis import DeviceFigures, HolderReport, PinReport
from fragdoctor.rules.context import Context

MAX_PINS = 20
"""Groups of pins that a report carries; the rest frees less than each of these."""

MAX_HOLDERS = 30
"""Lines that a report carries."""


def device_figures(context: Context) -> DeviceFigures | None:
    """Return the figures of one device; None where no input has any."""
    if context.analysis is not None:
        return _from_snapshot(context)
    if context.refusal is not None:
        return _from_message(context)
    if context.stats:
        return _from_stats(context, context.stats[-1])
    return None


def _from_snapshot(context: Context) -> DeviceFigures:
    a = context.analysis
    assert a is not None  # noqa: S101 - checked by the caller
    space = a.free_space
    retries = context.retries
    return DeviceFigures(
        device=a.device,
        reserved_bytes=a.reserved_bytes,
        allocated_bytes=a.allocated_bytes,
        active_bytes=a.active_bytes,
        requested_bytes=a.requested_bytes or None,
        free_cached_bytes=space.free_cached_bytes,
        releasable_bytes=space.releasable_bytes,
        pinned_free_bytes=space.pinned_free_bytes,
        largest_free_block_bytes=space.largest_free_block_bytes,
        peak_allocated_bytes=_peak(context, "allocated"),
        peak_reserved_bytes=_peak(context, "reserved"),
        alloc_retries=retries[0] if retries else None,
        ooms=_n_ooms(context),
        capacity_bytes=_capacity(context),
        n_events=a.n_events,
        peak_active_bytes=_peak(context, "active"),
        private_pools_bytes=space.private_pools_reserved_bytes,
        pending_free_bytes=space.pending_free_bytes,
    )


def _peak(context: Context, name: str) -> int | None:
    """Return the higher of the trace's peak and the counter's, which saw what a trace lost."""
    line = context.analysis.timeline if context.analysis is not None else None
    figures = [] if line is None else [int(getattr(line, f"peak_{name}_bytes"))]
    if context.stats:
        counted = context.stats[-1].get(f"{name}_bytes.all.peak")
        figures += [] if counted is None else [counted]
    return max(figures, default=None)


def _capacity(context: Context) -> int | None:
    if context.total_bytes is not None:
        return context.total_bytes
    return context.analysis.capacity_estimate_bytes if context.analysis is not None else None


def _n_ooms(context: Context) -> int | None:
    if context.stats and context.stats[-1].n_ooms is not None:
        return context.stats[-1].n_ooms
    a = context.analysis
    return len(a.ooms) if a is not None and a.capture.has_trace else None


def _from_message(context: Context) -> DeviceFigures:
    r = context.refusal
    assert r is not None  # noqa: S101 - checked by the caller
    retries = context.retries
    return DeviceFigures(
        device=0 if context.device is None else context.device,
        reserved_bytes=r.reserved_bytes,
        allocated_bytes=None if r.live_bytes is None else r.live_bytes - r.pending_bytes,
        active_bytes=r.live_bytes,
        free_cached_bytes=r.cache_bytes,
        capacity_bytes=r.total_bytes,
        private_pools_bytes=r.pools_free_bytes or None,
        alloc_retries=retries[0] if retries else None,
        ooms=_n_ooms(context),
    )


def _from_stats(context: Context, s: MemoryStats) -> DeviceFigures:
    reserved, active = s.reserved_bytes, s.active_bytes
    return DeviceFigures(
        device=0 if context.device is None else context.device,
        reserved_bytes=reserved,
        allocated_bytes=s.allocated_bytes,
        active_bytes=active,
        requested_bytes=s.requested_bytes,
        free_cached_bytes=None if reserved is None or active is None else reserved - active,
        pinned_free_bytes=s.inactive_split_bytes,
        peak_allocated_bytes=s.get("allocated_bytes.all.peak"),
        peak_reserved_bytes=s.get("reserved_bytes.all.peak"),
        peak_active_bytes=s.get("active_bytes.all.peak"),
        alloc_retries=s.n_alloc_retries,
        ooms=s.n_ooms,
        capacity_bytes=context.total_bytes,
    )


def pin_reports(context: Context) -> tuple[PinReport, ...]:
    """Return who pins free memory on one device, the most costly first."""
    if context.analysis is None:
        return ()
    return tuple(
        PinReport(
            device=context.analysis.device,
            n_blocks=pin.n_blocks,
            block_bytes=pin.block_bytes,
            pinned_bytes=pin.pinned_bytes,
            stack=context.user_stack(pin.stack),
            location=context.user_line(pin.stack),
            age_events=_age(context, pin.oldest_event),
        )
        for pin in context.analysis.pins[:MAX_PINS]
    )


def _age(context: Context, row: int | None) -> int | None:
    if row is None or context.snapshot is None or context.analysis is None:
        return None
    rows = context.snapshot.events.device_slice(context.analysis.device)
    return int(rows.stop) - row


def holder_reports(context: Context) -> tuple[HolderReport, ...]:
    """Return live memory by line on one device, the largest first."""
    if context.analysis is None:
        return ()
    return tuple(
        HolderReport(
            device=context.analysis.device,
            location=context.frame(h.frame) or context.user_line(h.stack),
            now_bytes=h.now_bytes,
            peak_bytes=h.peak_bytes,
            n_blocks=h.n_now,
            stack=context.user_stack(h.stack),
        )
        for h in context.analysis.holders[:MAX_HOLDERS]
    )
