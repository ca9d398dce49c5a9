"""The segments with most pinned free memory, block by block, to be drawn."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.pins import Holds, find_holds
from fragdoctor.analysis.result import PinnedSegment
from fragdoctor.model.snapshot import I64, BlockState
from fragdoctor.trace.lives import Layout

NO_PIN: Final = -2
"""In the place of a stack id, whose -1 is "no stack recorded"."""

MAX_SEGMENTS: Final = 12
MAX_BLOCKS: Final = 1024
"""Blocks of one segment that are told apart: finer than any screen."""


def find_pinned_segments(layout: Layout) -> tuple[tuple[PinnedSegment, ...], int]:
    """Return the segments with most pinned free bytes, at most 12, and how many have any."""
    holds = find_holds(layout)
    unit, once = np.unique(holds.unit, return_index=True)
    pinned = np.zeros(len(layout.segment_address), np.int64)
    np.add.at(pinned, holds.segment[once], holds.free[unit])
    order = np.lexsort((layout.segment_address, -pinned))[:MAX_SEGMENTS]
    worst = order[pinned[order] > 0]
    segments = tuple(_segment(layout, holds, int(s), int(pinned[s])) for s in worst)
    return segments, int(np.count_nonzero(pinned))


def _segment(layout: Layout, holds: Holds, segment: int, pinned: int) -> PinnedSegment:
    live = np.flatnonzero(layout.live_segment == segment)
    free = np.flatnonzero(layout.free_segment == segment)
    is_pending = layout.live_is_pending[live]
    stack = np.where(
        np.isin(live, holds.block[holds.segment == segment]),
        layout.live_stack[live].astype(np.int64),
        NO_PIN,
    )
    offset = np.concatenate([layout.live_offset[live], layout.free_offset[free]])
    order = np.argsort(offset, kind="stable")
    size = np.concatenate([layout.live_bytes[live], layout.free_bytes[free]])[order]
    live_kind = np.where(is_pending, BlockState.PENDING_FREE, BlockState.ALLOCATED)
    kind = np.concatenate([live_kind, np.full(len(free), BlockState.INACTIVE)])[order]
    owner = np.concatenate([stack, np.full(len(free), NO_PIN)])[order]
    size, kind, owner = _fewer(size, kind, owner)
    return PinnedSegment(
        total_bytes=int(layout.segment_bytes[segment]),
        free_bytes=int(layout.free_bytes[free].sum()),
        pinned_bytes=pinned,
        largest_hole_bytes=int(layout.free_bytes[free].max(initial=0)),
        block_bytes=size,
        block_kind=kind.astype(np.uint8),
        block_stack=owner,
    )


def _fewer(size: I64, kind: I64, owner: I64) -> tuple[I64, I64, I64]:
    """Return at most ``MAX_BLOCKS`` blocks: as they are, or what equal slots hold at their middle.

    Slots keep the shares of the kinds to within the fineness of a screen.
    """
    if len(size) <= MAX_BLOCKS:
        return size, kind, owner
    ends = np.cumsum(size)
    edges = np.linspace(0, ends[-1], MAX_BLOCKS + 1).astype(np.int64)
    middle = (edges[1:] + edges[:-1]) // 2
    at = np.minimum(np.searchsorted(ends, middle, side="right"), len(size) - 1)
    return np.diff(edges), kind[at], owner[at]
