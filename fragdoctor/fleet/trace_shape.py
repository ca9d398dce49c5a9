"""The shape of a rank's work: which sizes it asks for, and when it was first refused one."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.snapshot import Action, BlockState, Snapshot

MAX_SIZES: Final = 16
_ENDLESS: Final = 2**63 - 1


@frozen
class TraceShape:
    """What a trace (or, without one, the live blocks) asks for; fields as in ``RankSummary``."""

    large_sizes: tuple[tuple[int, int], ...] = ()
    failed_us: int | None = None
    refused_bytes: int | None = None


def trace_shape(snapshot: Snapshot, device: int) -> TraceShape:
    """Return the shape of one device's trace."""
    rows = snapshot.events.device_slice(device)
    events = snapshot.events
    action = events.action[rows]
    sizes = events.size_bytes[rows][action == Action.ALLOC]
    if not len(sizes):
        blocks = snapshot.blocks
        owner = np.repeat(snapshot.segments.device, np.diff(snapshot.segments.block_offsets))
        sizes = blocks.size_bytes[(blocks.state != BlockState.INACTIVE) & (owner == device)]
    distinct, counts = np.unique(sizes, return_counts=True)
    by_bytes = np.argsort(-(distinct.astype(np.float64) * counts), kind="stable")[:MAX_SIZES]
    large = tuple((min(int(distinct[i]), _ENDLESS), int(counts[i])) for i in by_bytes)
    ooms = np.flatnonzero(action == Action.OOM)
    if not len(ooms):
        return TraceShape(large)
    time_us, refused = int(events.time_us[rows][ooms[0]]), int(events.size_bytes[rows][ooms[0]])
    return TraceShape(large, None if time_us < 0 else time_us, refused)
