"""Where the figures of a failed request come from: a message, a trace, a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.analysis.result import DeviceAnalysis, OomEvent
from fragdoctor.future.steps import Steps
from fragdoctor.model.case import (
    BundleFacts,
    Case,
    OomMessage,
    OtherProcess,
    Overrides,
)
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.failed_request import (
    CONTEXT_ALLOWANCE_BYTES,
    SIZE_BUG_BYTES,
    FailedRequest,
    known,
    rounding_bytes,
)
from fragdoctor.rules.traceback_signs import sign_of
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

SMALL_BYTES = MIB
"""Largest rounded request of the small pool."""


def find_failed_request(
    case: Case, analysis: DeviceAnalysis | None, message: OomMessage | None
) -> FailedRequest | None:
    """Return the failed request of one device from all inputs together, or None.

    A trace that recorded the failure takes precedence over the message. A bundle adds what the
    driver reported at that moment.
    """
    event = None if analysis is None else matching_oom(analysis, message)
    found = None if message is None else request_of_message(message)
    if analysis is not None and event is not None:
        found = request_of_event(analysis, event, found)
    elif message is None or not message.is_of_caching_allocator:
        return None
    # Where a bundle knows the size, one from the user is that of another card, and only a question.
    user = case.overrides
    return found and with_overrides(with_bundle(found, case.bundle, user), user)


def request_of_message(message: OomMessage) -> FailedRequest | None:
    """Return the figures that a message prints, or None if it prints no size."""
    requested = message.requested_bytes
    if requested is None:
        return None
    allocated = known(message.allocated_bytes)
    reserved = known(message.reserved_bytes)
    if reserved is None and message.backend != "mps":
        reserved = allocated
    unallocated = message.reserved_unallocated_bytes
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    total, free = known(message.total_bytes), known(message.true_free_bytes)
    ours, in_use = known(message.process_bytes), in_use_bytes(total, free)
    own, others, own_pid = split_processes(ours, message.other_processes, reserved, in_use)
    if (
        total is not None
        and message.free_bytes is not None
        and (total < message.free_bytes < SIZE_BUG_BYTES)
    ):
        # An integrated GPU: its size is what the BIOS carved out; free memory includes the host's.
        total, free = None, message.free_bytes
    sign = sign_of(message)
    active = message.active_bytes
    live = message.live_bytes if known(message.allocated_bytes) is not None else None
    pending = max(0, active - live) if active is not None and live is not None else 0
    return FailedRequest(
        source="oom message",
        requested_bytes=requested,
        total_bytes=total,
        free_bytes=free,
        live_bytes=live if live is None else live + pending,
        unallocated_bytes=unallocated if unallocated is None else max(0, unallocated - pending),
        pools_free_bytes=message.private_pools_bytes or 0,
        pending_bytes=pending,
        reserved_bytes=reserved,
        limit_bytes=known(message.limit_bytes),
        process_bytes=own,
        other_processes=others,
        own_pid=own_pid,
        may_hide_limit=_may_hide_limit(message),
        expandable=message.expandable_is_on,
        backend=message.backend,
        device=message.device_index,
        hint=message.free_allocated_hint,
        doing="" if sign is None else sign.doing,
        pool_is_unprinted=message.variant == "cudaMallocAsync",
        cache_is_unprinted=_lacks_cache(message),
    )


def _lacks_cache(message: OomMessage) -> bool:
    """Return whether a message was cut, since it lacks the reserved figure of its kind."""
    is_ours = message.backend in ("cuda", "rocm") and message.variant != "cudaMallocAsync"
    return is_ours and known(message.allocated_bytes) is not None and message.reserved_bytes is None


def in_use_bytes(total: int | None, free: int | None) -> int | None:
    """Return what is in use on a device, by all processes together."""
    return None if total is None or free is None else total - free


LEAST_CONTEXT_BYTES: Final = 100 * MIB
"""The smallest context seen with CUDA 10 to 13 (model/gpus.py has the usual size)."""


def split_processes(
    own: int | None,
    listed: Sequence[OtherProcess],
    reserved: int | None,
    in_use: int | None = None,
) -> tuple[int | None, tuple[OtherProcess, ...], int | None]:
    """Return our own bytes, the other processes, and our id in the list.

    Inside a container NVML's process ids differ from ours. A process whose memory plus PyTorch's
    reserved memory exceeds what is ``in_use`` on the device must be this process, whatever NCCL,
    CUDA graphs and libraries add to it. If there is no such process, the one that holds what
    PyTorch reserved plus a context is this one; of several candidates, the closest.
    """
    others = tuple(p for p in listed if known(p.n_bytes) is not None)
    if own is not None and reserved is not None and own < reserved - 2 * rounding_bytes(reserved):
        own = None  # wrong due to a container's process ids: no process holds less than its cache
    if own is None and reserved is None and in_use is not None:
        # Every process has a context: a process that leaves no room for ours must be us.
        alone = [p for p in others if in_use - p.n_bytes < LEAST_CONTEXT_BYTES]
        if len(alone) == 1:
            rest = tuple(p for p in others if p is not alone[0])
            return alone[0].n_bytes, rest, alone[0].pid
    if own is not None or reserved is None or reserved == 0:
        return own, others, None
    low = reserved - rounding_bytes(reserved) * 2
    fitting = [p for p in others if low <= p.n_bytes <= reserved + CONTEXT_ALLOWANCE_BYTES]
    if in_use is not None:
        slack = 2 * (rounding_bytes(in_use) + rounding_bytes(reserved))
        cannot_be_beside = [p for p in others if p.n_bytes + reserved > in_use + slack]
        fitting = [p for p in cannot_be_beside if p.n_bytes >= low] or fitting
    if not fitting:
        return None, others, None
    ourselves = min(fitting, key=lambda p: abs(p.n_bytes - reserved))
    rest = tuple(p for p in others if p is not ourselves)
    return ourselves.n_bytes, rest, ourselves.pid


def _may_hide_limit(message: OomMessage) -> bool:
    """Return whether this wording omits ``allowed`` although a fraction may be set (2.1-2.4)."""
    if message.limit_bytes is not None or message.backend not in ("cuda", "rocm"):
        return False
    low, high = message.version_low, message.version_high
    return (not low or parse_version(low)[:2] <= (2, 4)) and (
        not high or parse_version(high)[:2] >= (2, 1)
    )


def matching_oom(analysis: DeviceAnalysis, message: OomMessage | None) -> OomEvent | None:
    """Return the event that a message is about, else the last event, or None without events.

    Messages print the size of the segment to two decimals, so the rounded sizes are compared.
    """
    if not analysis.ooms:
        return None
    told = (oom for oom in reversed(analysis.ooms) if message and is_about(oom, message))
    return next(told, analysis.ooms[-1])


def is_about(event: OomEvent, message: OomMessage) -> bool:
    """Return whether a message prints the size of the segment that an event asked for."""
    asked = message.requested_bytes
    return asked is not None and abs(event.segment_bytes - asked) <= rounding_bytes(asked)


def request_of_event(
    analysis: DeviceAnalysis, event: OomEvent, told: FailedRequest | None
) -> FailedRequest:
    """Return the figures of an ``oom`` event, and from the message what no trace records.

    Live bytes are active bytes, since a block that waits for another stream is not usable either.
    """
    printed = told or FailedRequest("", 0, may_hide_limit=True)  # nothing was printed
    pools_free, free = event.private_pools_free_bytes, event.device_free_bytes
    trace, settings = analysis.trace, analysis.trace.snapshot.settings
    is_small = event.rounded_bytes <= SMALL_BYTES
    return replace(
        printed,
        source="trace" if told is None else "trace and oom message",
        requested_bytes=event.segment_bytes,
        block_bytes=event.rounded_bytes,
        free_bytes=printed.free_bytes if free is None else free,
        live_bytes=event.active_bytes,
        unallocated_bytes=max(0, event.reserved_bytes - event.active_bytes - pools_free),
        pools_free_bytes=pools_free,
        pending_bytes=max(0, event.active_bytes - event.allocated_bytes),
        unsplit_bytes=_unsplit_bytes(trace, event.row),
        reserved_bytes=event.reserved_bytes,
        is_exact=True,
        expandable=settings.expandable_segments if settings.is_recorded else None,
        page_bytes=2 * MIB if is_small else settings.large_segment_bytes,
        largest_free_block_bytes=event.largest_free_block_bytes,
        late_free_bytes=late_frees(trace, event.row),
        device=analysis.device,
        is_caught=event.row < last_request(trace) or is_one_of_several(analysis),
        pool_is_unprinted=False,
        cache_is_unprinted=False,
    )


def _unsplit_bytes(trace: Trace, state: int) -> int:
    """Return the bytes of allocated blocks beyond their requests, which are rounded to 512."""
    rows = trace.lives.allocated_at(state)
    asked = trace.lives.requested_bytes[rows]
    rest = trace.lives.size_bytes[rows] - (asked + 511) // 512 * 512
    return int(rest[asked > 0].clip(min=0).sum())


def with_overrides(failed: FailedRequest, overrides: Overrides) -> FailedRequest:
    """Return a request with the user's size and limit where no input has them.

    If a trace says what PyTorch could have, a size from elsewhere is that of another card; but a
    fraction refers to it.
    """
    total, limit, fraction = failed.total_bytes, failed.limit_bytes, overrides.memory_fraction
    is_known = failed.is_exact and failed.free_bytes is not None
    if total is None and (fraction is not None or not is_known):
        total = overrides.capacity_bytes
    if limit is None and fraction is not None and total is not None:
        limit = int(fraction * total)
    return replace(failed, total_bytes=total, limit_bytes=limit)


def late_frees(trace: Trace, row: int) -> int:
    """Return the bytes that came free between the last request and the failure.

    The allocator does not search its cache again after the flush that ends cross-stream waits. A
    free that completes right after it was requested counts too: if it had completed at once, the
    search would have found its block.
    """
    actions = trace.events.action[:row]
    calls = np.flatnonzero((actions == Action.ALLOC) | (actions == Action.FREE_REQUESTED))
    start = int(calls[-1]) + 1 if len(calls) else 0
    done = actions[start:] == Action.FREE_COMPLETED
    return int(trace.events.size_bytes[start:row][done].sum())


OVERCOME_STEPS: Final = 2
"""Steps begun between two caught failures, so that at least the first one was completed."""

LEFT_SHARE: Final = 0.1
"""A program that has freed its work holds less than this share of the peak of live memory."""


def is_one_of_several(analysis: DeviceAnalysis) -> bool:
    """Return whether the last failure is one of several that the program expects, as trials do.

    It completed steps after an earlier failure, and freed its memory after the last failure.
    """
    if analysis.timeline is None or len(analysis.ooms) < 2:
        return False
    rows = np.array([oom.row for oom in analysis.ooms])
    n_steps = np.diff(np.searchsorted(Steps.of(analysis.trace).rows, rows))
    active = analysis.timeline.active_bytes
    is_gone = int(active[-1]) <= LEFT_SHARE * int(active[: rows[-1] + 1].max())
    return is_gone and bool((n_steps >= OVERCOME_STEPS).any())


def last_request(trace: Trace) -> int:
    """Return the row of the last successful allocation of a device, or -1 without any."""
    allocs = np.flatnonzero(trace.events.action == Action.ALLOC)
    return int(allocs[-1]) if len(allocs) else -1


def with_bundle(
    failed: FailedRequest, facts: BundleFacts | None, overrides: Overrides
) -> FailedRequest:
    """Return a request with what only a bundle records; message and user take precedence.

    The bundle's limit counts if the user gave no fraction. Its free memory and processes count if
    it was written at the failure and no message of that moment has them.
    """
    device = facts.device(failed.device) if facts is not None else None
    if facts is None or device is None:
        return failed
    limit = failed.limit_bytes
    if limit is None and overrides.memory_fraction is None:
        limit = device.limit_bytes
    # The recorder read the fraction from PyTorch, so the wording cannot hide one.
    failed = replace(
        failed,
        total_bytes=failed.total_bytes or device.total_bytes,
        limit_bytes=limit,
        may_hide_limit=False,
    )
    if facts.reason != "oom" or facts.oom_device != failed.device:
        return failed
    if failed.free_bytes is None:
        failed = replace(failed, free_bytes=device.free_bytes)
    if failed.process_bytes is not None or failed.other_processes:
        return failed
    ours, in_use = known(device.process_bytes), in_use_bytes(failed.total_bytes, failed.free_bytes)
    listed, reserved = device.other_processes, failed.reserved_bytes
    own, others, own_pid = split_processes(ours, listed, reserved, in_use)
    return replace(failed, process_bytes=own, other_processes=others, own_pid=own_pid)
