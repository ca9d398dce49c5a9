"""Free blocks by how they came about, and by the segments they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.snapshot import BlockState, Snapshot


@frozen
class Holes:
    """Free blocks of a device in bytes.

    Attributes:
        free_bytes: all of them.
        used_before_bytes: those that were blocks of their own before they were freed; the others
            are tails that were never used, or rests of larger blocks.
        largest_used_before_bytes: the largest of these.
        by_segment_bytes: segment size -> free bytes in segments of that size.
    """

    free_bytes: int = 0
    used_before_bytes: int = 0
    largest_used_before_bytes: int = 0
    by_segment_bytes: Mapping[int, int] = field(default_factory=dict)

    def in_segments_from(self, n_bytes: int) -> int:
        """Return the free bytes that lie in segments of at least this size."""
        return sum(free for size, free in self.by_segment_bytes.items() if size >= n_bytes)


def find_holes(snapshot: Snapshot, device: int) -> Holes:
    """Return the free blocks of a device at the end of the recording.

    A free block keeps the requested size of its last user: 0 where it never had one, more than
    its own size where it is the rest of a larger block that was split.
    """
    blocks, segments = snapshot.blocks, snapshot.segments
    on_device = segments.device[blocks.segment] == device
    free = on_device & (blocks.state == BlockState.INACTIVE)
    if not free.any():
        return Holes()
    asked = blocks.requested_bytes
    used = free & (asked > 0) & (asked <= blocks.size_bytes)
    sizes, sums, _ = largest_groups(
        segments.total_bytes[blocks.segment[free]], blocks.size_bytes[free].astype(np.int64)
    )
    return Holes(
        free_bytes=int(blocks.size_bytes[free].sum()),
        used_before_bytes=int(blocks.size_bytes[used].sum()),
        largest_used_before_bytes=int(blocks.size_bytes[used].max(initial=0)),
        by_segment_bytes=dict(zip(sizes.tolist(), sums.tolist(), strict=True)),
    )
