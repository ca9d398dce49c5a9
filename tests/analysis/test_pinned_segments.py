from __future__ import annotations

import numpy as np
from builders import BASE, MIB, block, frame, segment, snapshot
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.pinned_segments import MAX_BLOCKS, MAX_SEGMENTS, NO_PIN
from fragdoctor.model.snapshot import BlockState

LIVE, PENDING = "active_allocated", "active_pending_free"


def at(line):
    return [frame(line=line)]


def analyzed(*segments):
    return analyze_device(from_python(snapshot(*segments)), 0)


def test_find_pinned_segments_worst_first_block_by_block():
    result = analyzed(
        segment(BASE, block(19 * MIB, LIVE, frames=at(1)), block(MIB)),
        segment(
            BASE * 2, block(4 * MIB), block(MIB, LIVE, frames=at(1)), block(2 * MIB, PENDING),
            block(13 * MIB),
        ),
        segment(BASE * 3, block(20 * MIB)),
        segment(BASE * 4, block(20 * MIB, LIVE)),
    )  # fmt: skip

    worst, other = result.pinned_segments

    assert result.n_pinned_segments == 2
    assert (worst.total_bytes, worst.free_bytes, worst.pinned_bytes, worst.largest_hole_bytes) == (
        20 * MIB,
        17 * MIB,
        17 * MIB,
        13 * MIB,
    )
    assert worst.block_bytes.tolist() == [4 * MIB, MIB, 2 * MIB, 13 * MIB]
    assert worst.block_kind.tolist() == [
        BlockState.INACTIVE,
        BlockState.ALLOCATED,
        BlockState.PENDING_FREE,
        BlockState.INACTIVE,
    ]
    assert [s == NO_PIN for s in worst.block_stack.tolist()] == [True, False, False, True]
    assert other.pinned_bytes == MIB


def test_find_pinned_segments_private_pool_is_left_out():
    result = analyzed(segment(BASE, block(MIB, LIVE), block(19 * MIB), pool=(0, 1)))

    assert (result.pinned_segments, result.n_pinned_segments) == ((), 0)


def test_find_pinned_segments_of_many_keeps_the_worst():
    result = analyzed(
        *(
            segment(BASE * (i + 1), block((20 - i) * MIB, LIVE), block(i * MIB))
            for i in range(1, 18)
        )
    )

    assert result.n_pinned_segments == 17
    pinned = [s.pinned_bytes // MIB for s in result.pinned_segments]
    assert pinned == list(range(17, 17 - MAX_SEGMENTS, -1))


def test_find_pinned_segments_with_very_many_blocks_keeps_the_shares():
    n = 3 * MAX_BLOCKS
    quarter = [block(1024), *(block(512, LIVE, frames=at(1)) for _ in range(2))]
    result = analyzed(segment(BASE, *(b for _ in range(n) for b in quarter)))

    (one,) = result.pinned_segments

    assert len(one.block_bytes) == MAX_BLOCKS
    assert int(one.block_bytes.sum()) == one.total_bytes == n * 2048
    free = int(one.block_bytes[one.block_kind == BlockState.INACTIVE].sum())
    assert abs(free / one.total_bytes - 0.5) < 0.05
    assert one.largest_hole_bytes == 1024
    assert np.all(one.block_bytes > 0)
