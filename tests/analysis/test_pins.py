from __future__ import annotations

import numpy as np
from builders import BASE, MIB, block, frame, segment, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python

from fragdoctor.analysis.attribution import MAX_BLOCKS, MAX_SEGMENTS, NO_PIN
from fragdoctor.analysis.device import analyze_device
from fragdoctor.model.snapshot import BlockState

LIVE, PENDING = "active_allocated", "active_pending_free"


def at(line):
    return [frame(line=line)]


def pins_of(*segments):
    read = from_python(snapshot(*segments))
    result = analyze_device(read, 0)
    return {read.stack(p.stack)[0].line: p for p in result.pins}, result


def test_find_pins_group_alone_in_its_segments_pins_their_free_bytes():
    pins, _ = pins_of(
        segment(BASE, block(MIB, LIVE, frames=at(1)), block(19 * MIB)),
        segment(BASE * 2, block(9 * MIB), block(MIB, LIVE, frames=at(1)), block(10 * MIB)),
    )

    assert list(pins) == [1]
    assert (
        pins[1].n_blocks,
        pins[1].block_bytes,
        pins[1].pinned_bytes,
        pins[1].n_segments,
    ) == (2, 2 * MIB, 38 * MIB, 2)
    assert pins[1].oldest_event is None


def test_find_pins_segment_with_two_groups_is_shared():
    pins, _ = pins_of(
        segment(
            BASE, block(MIB, LIVE, frames=at(1)), block(MIB, PENDING, frames=at(2)), block(18 * MIB)
        )
    )

    assert [p.pinned_bytes for p in pins.values()] == [0, 0]


def test_find_pins_full_segment_pins_nothing():
    pins, _ = pins_of(segment(BASE, block(20 * MIB, LIVE, frames=at(1))))

    assert pins == {}


def test_find_pins_private_pool_is_left_out():
    pins, _ = pins_of(segment(BASE, block(MIB, LIVE, frames=at(1)), block(19 * MIB), pool=(0, 1)))

    assert pins == {}


def test_find_pins_expandable_counts_only_pages_the_group_keeps():
    # Pages of 20 MiB: line 1 in page 0 (with line 2), line 2 in pages 0-1, page 2 free.
    pins, result = pins_of(
        segment(
            BASE,
            block(MIB, LIVE, frames=at(1)),
            block(17 * MIB),
            block(4 * MIB, LIVE, frames=at(2)),
            block(38 * MIB),
            is_expandable=True,
        )
    )

    assert pins[1].pinned_bytes == 0
    assert pins[2].pinned_bytes == 18 * MIB
    assert result.free_space.pinned_free_bytes == 35 * MIB


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_find_pins_removing_the_group_makes_its_pinned_bytes_releasable(parts, is_expandable):
    """The definition itself: take the group away and see what becomes releasable."""

    def build(without):
        blocks: list[dict] = []
        for units, line, is_free in parts:
            size = units * MIB // 2
            if is_free or line == without:
                if blocks and blocks[-1]["state"] == "inactive":
                    blocks[-1]["size"] += size
                else:
                    blocks.append(block(size))
            else:
                blocks.append(block(size, LIVE, frames=at(line)))
        total = sum(b["size"] for b in blocks)
        rest = -total % (20 * MIB)
        if rest:
            blocks.append(block(rest, LIVE, frames=at(99)))
        return segment(BASE, *blocks, is_expandable=is_expandable, kind="large")

    pins, before = pins_of(build(None))

    for line, pin in pins.items():
        if line == 99:
            continue
        _, after = pins_of(build(line))
        gained = after.free_space.releasable_bytes - before.free_space.releasable_bytes
        own = sum(units * MIB // 2 for units, of, is_free in parts if of == line and not is_free)
        # What becomes releasable is the pinned free bytes and at most the blocks themselves.
        assert pin.pinned_bytes <= gained <= pin.pinned_bytes + own


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
