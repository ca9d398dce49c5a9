"""The shape of a rank's work: which sizes it asks for, where, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Action, BlockState, Snapshot
from fragdoctor.trace.stacks import frames_of, user_frames

MAX_SIZES: Final = 16
MAX_SITES: Final = 6
_ENDLESS: Final = 2**63 - 1


@frozen
class TraceShape:
    """What a trace (or, without one, the live blocks) asks for; fields as in ``RankSummary``."""

    sites: Sequence[tuple[Location | None, int, int]] = ()
    large_sizes: tuple[tuple[int, int], ...] = ()
    size_histogram: tuple[tuple[int, int], ...] = ()
    n_events: int | None = None
    n_allocs: int | None = None
    first_us: int | None = None
    last_us: int | None = None
    failed_us: int | None = None
    refused_bytes: int | None = None


def trace_shape(snapshot: Snapshot, device: int) -> TraceShape:
    """Return the shape of one device's trace."""
    rows = snapshot.events.device_slice(device)
    events = snapshot.events
    action = events.action[rows]
    is_alloc = action == Action.ALLOC
    if is_alloc.any():
        sizes, stacks = events.size_bytes[rows][is_alloc], events.stack[rows][is_alloc]
    else:
        blocks = snapshot.blocks
        owner = np.repeat(snapshot.segments.device, np.diff(snapshot.segments.block_offsets))
        live = (blocks.state != BlockState.INACTIVE) & (owner == device)
        sizes, stacks = blocks.size_bytes[live], blocks.stack[live]
    times = events.time_us[rows]
    timed = times[times >= 0]
    ooms = np.flatnonzero(action == Action.OOM)
    first_oom = int(ooms[0]) if len(ooms) else None
    distinct, counts = np.unique(sizes, return_counts=True)
    by_bytes = np.argsort(-(distinct.astype(np.float64) * counts), kind="stable")[:MAX_SIZES]
    powers = np.log2(sizes[sizes > 0].astype(np.float64)).astype(np.int64)
    return TraceShape(
        sites=_sites(snapshot, sizes, stacks),
        large_sizes=tuple((min(int(distinct[i]), _ENDLESS), int(counts[i])) for i in by_bytes),
        size_histogram=tuple((i, n) for i, n in enumerate(np.bincount(powers).tolist()) if n),
        n_events=len(action),
        n_allocs=int(is_alloc.sum()),
        first_us=int(timed[0]) if len(timed) else None,
        last_us=int(timed[-1]) if len(timed) else None,
        failed_us=None if first_oom is None or times[first_oom] < 0 else int(times[first_oom]),
        refused_bytes=None if first_oom is None else int(events.size_bytes[rows][first_oom]),
    )


def _sites(
    snapshot: Snapshot, sizes: np.ndarray[tuple[int], np.dtype[np.uint64]], stacks: object
) -> list[tuple[Location | None, int, int]]:
    """Return the lines that ask for most bytes, as (line, bytes, requests)."""
    if not len(sizes):
        return []
    lines = frames_of(np.asarray(stacks, np.int32), user_frames(snapshot))
    n = int(lines.max()) + 2
    n_bytes = np.bincount(lines + 1, weights=sizes.astype(np.float64), minlength=n)
    counts = np.bincount(lines + 1, minlength=n)
    order = np.argsort(-n_bytes, kind="stable")[:MAX_SITES]
    return [
        (snapshot.location(int(i) - 1), min(int(n_bytes[i]), _ENDLESS), int(counts[i]))
        for i in order
        if counts[i]
    ]
