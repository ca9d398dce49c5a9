"""Snapshots that end in an out-of-memory event, a few segments each."""

from __future__ import annotations

from typing import Any

from builders import MIB, alloc, block, columns, event, frame, free, oom, segment, segment_alloc
from builders import settings as recorded
from builders import snapshot as assembled

from fragdoctor.model.snapshot import Snapshot

START = 0x7F0000000000
STEP = 0x10000000
LINE = [frame("train.py", 88, "keep"), frame("train.py", 10, "main")]
OTHER_LINE = [frame("model.py", 7, "forward"), frame("train.py", 10, "main")]


def at(i: int) -> int:
    """Return the address of the i-th segment."""
    return START + i * STEP


def holes(
    n: int = 10,
    live_mib: int = 60,
    hole_mib: int = 40,
    asked_mib: int = 200,
    free_mib: int = 50,
    *,
    conf: str = "",
    **settings: Any,
) -> Snapshot:
    """Return n segments, each with one live block and a freed hole, and a failed request."""
    segments, events = [], []
    for i in range(n):
        low, high = at(i), at(i) + live_mib * MIB
        segments.append(
            segment(
                low,
                block(live_mib * MIB, "active_allocated", frames=LINE),
                block(hole_mib * MIB, requested=hole_mib * MIB),
            )
        )
        events += [
            segment_alloc(low, (live_mib + hole_mib) * MIB),
            alloc(low, live_mib * MIB, frames=LINE),
            alloc(high, hole_mib * MIB, frames=OTHER_LINE),
        ]
    for i in range(n):
        events += free(at(i) + live_mib * MIB, hole_mib * MIB)
    events.append(oom(asked_mib * MIB, free_mib * MIB, frames=OTHER_LINE))
    conf_dict = recorded(PYTORCH_CUDA_ALLOC_CONF=conf, **settings)
    return columns(assembled(*segments, events=events, conf=conf_dict))


def full(
    n: int = 10,
    live_mib: int = 100,
    asked_mib: int = 200,
    free_mib: int = 50,
    *,
    frames: list[Any] | None = None,
    device: int = 0,
) -> Snapshot:
    """Return n segments without a hole and a failed request."""
    stack = LINE if frames is None else frames
    segments, events = [], []
    for i in range(n):
        segments.append(
            segment(
                at(i),
                block(live_mib * MIB, "active_allocated", frames=LINE),
                device=device,
            )
        )
        events += [segment_alloc(at(i), live_mib * MIB), alloc(at(i), live_mib * MIB, frames=LINE)]
    events.append(oom(asked_mib * MIB, free_mib * MIB, frames=stack))
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device)]
    return columns(assembled(*segments, traces=[*traces, events]))


def calm(n: int = 4, live_mib: int = 20, cached_mib: int = 200) -> Snapshot:
    """Return a snapshot without a failure: some live segments, much harmless cache."""
    segments, events = [], []
    for i in range(n):
        segments.append(segment(at(i), block(live_mib * MIB, "active_allocated", frames=LINE)))
        events += [segment_alloc(at(i), live_mib * MIB), alloc(at(i), live_mib * MIB, frames=LINE)]
    cache = at(n)
    segments.append(segment(cache, block(cached_mib * MIB, requested=cached_mib * MIB)))
    events += [segment_alloc(cache, cached_mib * MIB), alloc(cache, cached_mib * MIB)]
    events += free(cache, cached_mib * MIB)
    return columns(assembled(*segments, events=events))


def late_free(asked_mib: int = 80, hole_mib: int = 100, free_mib: int = 10) -> Snapshot:
    """Return a failure right after a block that waited for another stream came free."""
    low, high = at(0), at(0) + 20 * MIB
    live = block(20 * MIB, "active_allocated", frames=LINE)
    hole = block(hole_mib * MIB, requested=hole_mib * MIB)
    events = [
        segment_alloc(low, (20 + hole_mib) * MIB),
        alloc(low, 20 * MIB, frames=LINE),
        alloc(high, hole_mib * MIB, frames=LINE),
        event("free_requested", high, hole_mib * MIB),
        alloc(at(1), 512),
        event("free_completed", high, hole_mib * MIB),
        oom(asked_mib * MIB, free_mib * MIB),
    ]
    events.insert(0, segment_alloc(at(1), 2 * MIB))
    small = segment(at(1), block(512, "active_allocated"), block(2 * MIB - 512), kind="small")
    return columns(assembled(segment(low, live, hole), small, events=events))
