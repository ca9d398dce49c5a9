"""Snapshots of a few segments each that end in an out-of-memory event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import (
    MIB,
    alloc,
    block,
    columns,
    event,
    frame,
    free,
    oom,
    segment,
    segment_alloc,
    segment_free,
)
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
    line: Sequence[dict[str, Any]] = LINE,
    **settings: Any,
) -> Snapshot:
    """Return n segments whose block was replaced by a smaller one, and a failed request.

    As in the real allocator, the rest of each segment is free behind a live block.
    """
    whole = (live_mib + hole_mib) * MIB
    made, freed, kept, segments = [], [], [], []
    for i in range(n):
        made += [segment_alloc(at(i), whole), alloc(at(i), whole, frames=OTHER_LINE)]
        freed += free(at(i), whole)
        kept.append(alloc(at(i), live_mib * MIB, frames=line))
        live = block(live_mib * MIB, "active_allocated", frames=line)
        segments.append(segment(at(i), live, block(hole_mib * MIB, requested=whole)))
    events = [*made, *freed, *kept, oom(asked_mib * MIB, free_mib * MIB, frames=OTHER_LINE)]
    conf_dict = recorded(PYTORCH_CUDA_ALLOC_CONF=conf, **settings)
    return columns(assembled(*segments, events=events, conf=conf_dict))


def interleaved(n: int = 10, asked_mib: int = 60, free_mib: int = 20) -> Snapshot:
    """Return n segments of five 4 MiB blocks, the second and fourth freed, and a failed request."""
    events, segments, frees = [], [], []
    for i in range(n):
        events.append(segment_alloc(at(i), 20 * MIB))
        blocks = []
        for k in range(5):
            address = at(i) + 4 * k * MIB
            is_live = k % 2 == 0
            events.append(alloc(address, 4 * MIB, frames=LINE if is_live else OTHER_LINE))
            frees += [] if is_live else free(address, 4 * MIB)
            state = "active_allocated" if is_live else "inactive"
            blocks.append(block(4 * MIB, state, requested=4 * MIB, frames=LINE))
        segments.append(segment(at(i), *blocks))
    events += [*frees, oom(asked_mib * MIB, free_mib * MIB)]
    return columns(assembled(*segments, events=events))


def full(
    n: int = 10,
    live_mib: int = 100,
    asked_mib: int = 200,
    free_mib: int = 50,
    *,
    frames: list[Any] | None = None,
    device: int = 0,
) -> Snapshot:
    """Return n segments without holes, and a failed request."""
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
    """Return a snapshot without a failure: some live segments and a large, harmless cache."""
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
    """Return a failure right after the release of a block that had waited for another stream."""
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


def leaking(
    n_steps: int = 12,
    kept_mib: int = 24,
    free_mib: int = 10,
    *,
    function: str = "step",
    fails: bool = True,
    hole_mib: int = 0,
    pool_mib: int = 0,
    asked_mib: int = 0,
) -> Snapshot:
    """Return steps that each keep one block forever, until a request fails.

    Each block is in a segment with a hole behind it, if ``hole_mib`` is given, and ``pool_mib`` are
    free in the private pool of a graph. Unless ``asked_mib``
    is given, the failing request is as large as a block.
    """
    keep = [frame("loop.py", 5, function), frame("train.py", 10, "main")]
    uses = [[frame("model.py", line, "forward"), frame("train.py", 10, "main")] for line in (7, 9)]
    scratch = at(0)
    events, segments = [segment_alloc(scratch, 40 * MIB, frames=uses[0])], []
    for i in range(1, n_steps + 1):
        events += [
            alloc(scratch, 20 * MIB, frames=uses[0]),
            alloc(scratch + 20 * MIB, 20 * MIB, frames=uses[1]),
            segment_alloc(at(i), (kept_mib + hole_mib) * MIB, frames=keep),
            alloc(at(i), kept_mib * MIB, frames=keep),
            *free(scratch + 20 * MIB, 20 * MIB),
            *free(scratch, 20 * MIB),
        ]
        live = block(kept_mib * MIB, "active_allocated", frames=keep)
        segments.append(segment(at(i), live, *([block(hole_mib * MIB)] if hole_mib else ())))
    events.append(segment_free(scratch, 40 * MIB))
    if pool_mib:
        segments.append(segment(at(n_steps + 1), block(pool_mib * MIB), pool=(0, 1)))
    if fails:
        events.append(oom((asked_mib or kept_mib) * MIB, free_mib * MIB, frames=keep))
    return columns(assembled(*segments, events=events))


def model_building(n: int = 40, free_mib: int = 10) -> Snapshot:
    """Return weights that are made one after another, without a free, until a request fails."""
    weights = [frame("model.py", 3, "__init__"), frame("train.py", 2, "main")]
    events, segments = [], []
    for i in range(n):
        events += [segment_alloc(at(i), 20 * MIB), alloc(at(i), 20 * MIB, frames=weights)]
        segments.append(segment(at(i), block(20 * MIB, "active_allocated", frames=weights)))
    events.append(oom(20 * MIB, free_mib * MIB, frames=weights))
    return columns(assembled(*segments, events=events))
