"""What a file does not record about its allocator, as far as its trace shows it.

The order of equal free blocks (by version), the memory that PyTorch could have, the device's
memory, a memory fraction, and settings that only the trace betrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fragdoctor.model.settings import Era, era_of
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

N_LIMITS_TRIED = 24


def eras_of(trace: Trace, torch_version: str | None) -> list[Era]:
    """Return the orders to try, likeliest first."""
    if torch_version is not None:
        return [era_of(torch_version)]
    snapshot = trace.snapshot
    low = snapshot.provenance.version_low
    rows = snapshot.events.device_slice(trace.device)
    has_pools = bool((snapshot.events.pool[rows] >= 0).any())
    has_new = bool((snapshot.events.action[rows] == Action.ANNOTATE).any())
    if has_new or low.startswith(("2.13", "2.14", "2.15")):
        return [Era.SEGMENT_COUNTER, Era.BLOCK_COUNTER, Era.ADDRESS]
    if has_pools:
        return [Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER, Era.ADDRESS]
    return [Era.ADDRESS, Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER]


def recorded_capacity(trace: Trace) -> int | None:
    """Return what PyTorch could have when a request failed (the last that says), if any did."""
    known = trace.oom_capacity_bytes[trace.oom_capacity_bytes >= 0]
    if not len(known):
        return None
    return max(int(known[-1]), trace.totals.peak_reserved_bytes)


def total_by_reservations(trace: Trace) -> int | None:
    """Return the device's memory as the distance of its address reservations shows it.

    Expandable segments reserve 9/8 of it per stream and pool class; None where fewer than two
    reservations are seen, or they lie closer than the memory that was in use.
    """
    events, initial = trace.events, trace.initial
    maps = np.flatnonzero(events.action == Action.SEGMENT_MAP)
    starts = events.address[maps].astype(np.float64)
    keys = events.stream[maps].astype(np.int64) * 2 + (events.size_bytes[maps] == 2 * MIB)
    bases = [float(starts[keys == key].min()) for key in np.unique(keys)]
    old = initial.segment_is_expandable
    bases += [float(a) for a in initial.segment_address[old & initial.segment_is_small]][:1]
    bases += [float(a) for a in initial.segment_address[old & ~initial.segment_is_small]][:1]
    gaps = np.diff(np.unique(bases))
    if not len(gaps):
        return None
    total = int(gaps.min() * 8 / 9)
    return total if total >= trace.totals.peak_reserved_bytes else None


def with_shown_settings(trace: Trace) -> Trace | None:
    """Return the trace under settings that it shows and its settings do not say, if it does."""
    settings = trace.settings
    changes: dict[str, Any] = {}
    has_maps = bool((trace.events.action == Action.SEGMENT_MAP).any())
    if has_maps and not settings.expandable_segments:
        changes["expandable_segments"] = True
    size = _large_segment_bytes(trace)
    if size is not None and size != settings.large_segment_bytes:
        changes["large_segment_bytes"] = size
        changes["max_non_split_rounding_bytes"] = size
    if not changes:
        return None
    return Trace.of(trace.snapshot, trace.device, replace(settings, **changes), trace.stacks)


def _large_segment_bytes(trace: Trace) -> int | None:
    """Return the segment size of requests of 1 to 10 MiB as the trace shows it, if it does."""
    action, size = trace.events.action, trace.events.size_bytes
    first = np.nonzero((action[:-1] == Action.SEGMENT_ALLOC) & (action[1:] == Action.ALLOC))[0]
    first = first[(size[first + 1] > MIB) & (size[first + 1] < 9 * MIB)]
    if not len(first):
        return None
    sizes, counts = np.unique(size[first], return_counts=True)
    likeliest = int(sizes[counts.argmax()])
    return likeliest if 10 * MIB < likeliest < 2**40 else None


def limits_of(
    trace: Trace, lowest_need_bytes: int | None, device_total_bytes: int | None
) -> Iterator[int]:
    """Yield what a memory fraction may have allowed, likeliest first.

    It lies between the peak of reserved memory and the least that a failed request would have
    needed. People set round fractions, so these come first.
    """
    low = trace.totals.peak_reserved_bytes
    high = _highest_limit(trace, lowest_need_bytes)
    seen: set[int] = set()
    said = trace.settings.memory_fraction
    fractions = [p / 100 for p in (*range(10, 100, 10), *range(5, 100, 10), *range(1, 100))]
    for total in _totals(trace, device_total_bytes):
        for fraction in fractions if said is None else [said, *fractions]:
            limit = int(fraction * total)
            if low <= limit < high and limit not in seen and len(seen) < N_LIMITS_TRIED:
                seen.add(limit)
                yield limit
    for end in (min(high, _collection_bound(trace)), high):
        for i in range(N_LIMITS_TRIED if end > low else 0):
            yield low + (end - low) * i // N_LIMITS_TRIED


def _totals(trace: Trace, device_total_bytes: int | None) -> list[int]:
    if device_total_bytes is not None:
        return [device_total_bytes]
    capacity = recorded_capacity(trace)
    return [] if capacity is None else [capacity]


def _highest_limit(trace: Trace, need: int | None) -> int:
    """Return a bound (excluded) of what a memory fraction can have allowed."""
    low = trace.totals.peak_reserved_bytes
    if not len(trace.oom_rows) or need is None:
        return 2 * low + 1
    return max(min(2 * low + 1, need), low + 1)


def _collection_bound(trace: Trace) -> int:
    """Return what was allowed at most (excluded) if every run of frees was a collection.

    A collection starts above threshold x allowed. A flush may start below, so this bound only
    says where to look first.
    """
    threshold = trace.settings.garbage_collection_threshold
    is_free = trace.events.action == Action.SEGMENT_FREE
    first = np.nonzero(is_free[1:] & ~is_free[:-1])[0]  # the event before each run
    if threshold <= 0 or not len(first):
        return 0
    lowest = int(trace.totals.at(first + 1)[:, 2].min())
    return int(lowest / threshold) + 1
