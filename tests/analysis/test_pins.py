from __future__ import annotations

from builders import BASE, MIB, block, frame, segment, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python

from fragdoctor.analysis.device import analyze_device

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
        pins[1].shared_bytes,
        pins[1].n_segments,
    ) == (2, 2 * MIB, 38 * MIB, 0, 2)
    assert pins[1].oldest_event is None


def test_find_pins_segment_with_two_groups_is_shared():
    pins, _ = pins_of(
        segment(
            BASE, block(MIB, LIVE, frames=at(1)), block(MIB, PENDING, frames=at(2)), block(18 * MIB)
        )
    )

    assert [(p.pinned_bytes, p.shared_bytes) for p in pins.values()] == [(0, 18 * MIB)] * 2


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

    assert (pins[1].pinned_bytes, pins[1].shared_bytes) == (0, 17 * MIB)
    assert (pins[2].pinned_bytes, pins[2].shared_bytes) == (18 * MIB, 17 * MIB)
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
