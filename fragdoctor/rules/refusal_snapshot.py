"""From an ``oom`` event of a trace, or a what-if request, to the figures of a refusal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fragdoctor.analysis.result import DeviceAnalysis, OomEvent
from fragdoctor.model.case import Overrides
from fragdoctor.model.oom import OomMessage
from fragdoctor.model.snapshot import Action, Snapshot
from fragdoctor.rules.refusal import Refusal, rounding_bytes
from fragdoctor.rules.refusal_message import refusal_from_message
from fragdoctor.units import MIB

SMALL_BYTES = MIB
"""Largest rounded request of the small pool."""


def matching_oom(analysis: DeviceAnalysis, message: OomMessage | None) -> OomEvent | None:
    """Return the event that a message is about, else the last one; None without any.

    A message prints the segment size to two decimals, so that is what is compared.
    """
    if not analysis.ooms:
        return None
    if message is not None and message.requested_bytes is not None:
        wanted, slack = message.requested_bytes, rounding_bytes(message.requested_bytes)
        for event in reversed(analysis.ooms):
            if abs(asked_bytes(event) - wanted) <= slack:
                return event
    return analysis.ooms[-1]


def asked_bytes(event: OomEvent) -> int:
    """Return what the message prints for an event; under expandable segments it ignores pages."""
    return event.segment_bytes if event.message_bytes is None else event.message_bytes


def refusal_from_event(
    snapshot: Snapshot,
    analysis: DeviceAnalysis,
    event: OomEvent,
    message: OomMessage | None,
    overrides: Overrides,
) -> Refusal:
    """Return the figures of an ``oom`` event, with what only a message or the user can tell.

    Live bytes are active bytes: a block that waits for another stream cannot be used either.
    """
    told = refusal_from_message(message) if message is not None else None
    pools_free = _pools_free(analysis, event)
    total = overrides.capacity_bytes
    if total is None and told is not None:
        total = told.total_bytes
    limit = told.limit_bytes if told is not None else None
    fraction = overrides.memory_fraction
    if fraction is not None and total is not None:
        limit = int(fraction * total)
    settings = snapshot.settings
    is_small = event.rounded_bytes <= SMALL_BYTES
    return Refusal(
        source="trace" if told is None else "trace and oom message",
        requested_bytes=asked_bytes(event),
        block_bytes=event.rounded_bytes,
        total_bytes=total,
        free_bytes=event.device_free_bytes
        if event.device_free_bytes is not None
        else (told.free_bytes if told is not None else None),
        live_bytes=event.active_bytes,
        unallocated_bytes=max(0, event.reserved_bytes - event.active_bytes - pools_free),
        pools_free_bytes=pools_free,
        pending_bytes=max(0, event.active_bytes - event.allocated_bytes),
        reserved_bytes=event.reserved_bytes,
        limit_bytes=limit,
        process_bytes=told.process_bytes if told is not None else None,
        other_processes=told.other_processes if told is not None else (),
        own_pid=told.own_pid if told is not None else None,
        is_exact=True,
        may_hide_limit=told is None or told.may_hide_limit,
        expandable=settings.expandable_segments if settings.is_recorded else None,
        page_bytes=2 * MIB if is_small else settings.large_segment_bytes,
        largest_free_block_bytes=event.largest_free_block_bytes,
        n_late_free_bytes=late_frees(snapshot, analysis.device, event.row),
        device=analysis.device,
        hint=told.hint if told is not None else "",
        is_caught=was_caught(snapshot, analysis.device, event.row),
    )


def what_if_refusal(analysis: DeviceAnalysis, overrides: Overrides) -> Refusal | None:
    """Return a request that the user asks about, against the final state of the snapshot."""
    if overrides.request_bytes is None or overrides.capacity_bytes is None:
        return None
    space = analysis.free_space
    pools_free = space.private_pools_free_bytes
    # A flush gives back what is releasable before the request can fail.
    reserved = analysis.reserved_bytes - space.releasable_bytes
    return Refusal(
        source="user",
        requested_bytes=overrides.request_bytes,
        total_bytes=overrides.capacity_bytes,
        free_bytes=max(0, overrides.capacity_bytes - reserved),
        live_bytes=analysis.active_bytes,
        unallocated_bytes=max(0, reserved - analysis.active_bytes - pools_free),
        pools_free_bytes=pools_free,
        pending_bytes=space.pending_free_bytes,
        reserved_bytes=reserved,
        is_exact=True,
        largest_free_block_bytes=space.largest_free_block_bytes,
        device=analysis.device,
    )


def with_overrides(refusal: Refusal, overrides: Overrides) -> Refusal:
    """Return a message's figures with what the user adds where the message is silent."""
    total = refusal.total_bytes if refusal.total_bytes is not None else overrides.capacity_bytes
    limit = refusal.limit_bytes
    if limit is None and overrides.memory_fraction is not None and total is not None:
        limit = int(overrides.memory_fraction * total)
    return replace(refusal, total_bytes=total, limit_bytes=limit)


def late_frees(snapshot: Snapshot, device: int, row: int) -> int:
    """Return the bytes that came free between the last request and the failure.

    The allocator does not search its cache again after the flush that ends cross-stream waits. A
    free that directly follows its own request counts too: had it been done at once, the search
    would have found its block, so beside a large enough free block it must have waited.
    """
    rows = snapshot.events.device_slice(device)
    if not rows.start <= row < rows.stop:
        return 0
    actions = snapshot.events.action[rows.start : row]
    calls = np.flatnonzero((actions == Action.ALLOC) | (actions == Action.FREE_REQUESTED))
    start = rows.start + (int(calls[-1]) + 1 if len(calls) else 0)
    done = snapshot.events.action[start:row] == Action.FREE_COMPLETED
    return int(snapshot.events.size_bytes[start:row][done].sum())


def was_caught(snapshot: Snapshot, device: int, row: int) -> bool:
    """Tell whether the program went on allocating on this device after the failure."""
    return row < last_request(snapshot, device)


def last_request(snapshot: Snapshot, device: int) -> int:
    """Return the row of the last successful allocation of a device, -1 without any."""
    rows = snapshot.events.device_slice(device)
    allocs = np.flatnonzero(snapshot.events.action[rows] == Action.ALLOC)
    return int(rows.start) + int(allocs[-1]) if len(allocs) else -1


def _pools_free(analysis: DeviceAnalysis, event: OomEvent) -> int:
    """Return the free bytes of private pools at the failure.

    The layout is known exactly at the end of the trace; for an earlier failure the present figure
    is an upper bound, cut to what was free then.
    """
    free = max(0, event.reserved_bytes - event.active_bytes)
    return min(free, analysis.free_space.private_pools_free_bytes)
