"""The shape of a rank's work: the sizes it asks for, and when it was first refused one."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.model.snapshot import Action, BlockState, Snapshot

MAX_SIZES: Final = 16
_ENDLESS: Final = 2**63 - 1


def trace_shape(
    snapshot: Snapshot | None, device: int
) -> tuple[tuple[tuple[int, int], ...], int | None, int | None]:
    """Return what one device's trace (or, without one, its live blocks) asked for.

    These are ``large_sizes``, ``failed_us`` and ``refused_bytes`` of ``RankSummary``.
    """
    if snapshot is None:
        return (), None, None
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
        return large, None, None
    time_us, refused = int(events.time_us[rows][ooms[0]]), int(events.size_bytes[rows][ooms[0]])
    return large, None if time_us < 0 else time_us, refused
