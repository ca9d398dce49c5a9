from __future__ import annotations

from builders import BASE, MIB, block, frame, segment, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python

from fragdoctor.analysis.attribution import MAX_SEGMENTS, find_stranded_segments
from fragdoctor.analysis.device import analyze_device

LIVE, PENDING = "active_allocated", "active_pending_free"


def at(line):
    return [frame(line=line)]


def stranders_of(*segments):
    read = from_python(snapshot(*segments))
    result = analyze_device(read, 0)
    return {read.stack(p.stack)[0].line: p for p in result.stranders}, result


def test_find_stranders_group_alone_in_its_segments_strands_their_free_bytes():
    stranders, _ = stranders_of(
        segment(BASE, block(MIB, LIVE, frames=at(1)), block(19 * MIB)),
        segment(BASE * 2, block(9 * MIB), block(MIB, LIVE, frames=at(1)), block(10 * MIB)),
    )

    assert list(stranders) == [1]
    assert (
        stranders[1].n_blocks,
        stranders[1].block_bytes,
        stranders[1].stranded_bytes,
        stranders[1].n_segments,
    ) == (2, 2 * MIB, 38 * MIB, 2)
    assert stranders[1].oldest_event is None


def test_find_stranders_segment_with_two_groups_is_shared():
    stranders, _ = stranders_of(
        segment(
            BASE, block(MIB, LIVE, frames=at(1)), block(MIB, PENDING, frames=at(2)), block(18 * MIB)
        )
    )

    assert [p.stranded_bytes for p in stranders.values()] == [0, 0]


def test_find_stranders_full_segment_strands_nothing():
    stranders, _ = stranders_of(segment(BASE, block(20 * MIB, LIVE, frames=at(1))))

    assert stranders == {}


def test_find_stranders_private_pool_is_left_out():
    stranders, _ = stranders_of(
        segment(BASE, block(MIB, LIVE, frames=at(1)), block(19 * MIB), pool=(0, 1))
    )

    assert stranders == {}


def test_find_stranders_expandable_counts_only_pages_the_group_keeps():
    # Pages of 20 MiB: line 1 in page 0 (with line 2), line 2 in pages 0-1, page 2 free.
    stranders, result = stranders_of(
        segment(
            BASE,
            block(MIB, LIVE, frames=at(1)),
            block(17 * MIB),
            block(4 * MIB, LIVE, frames=at(2)),
            block(38 * MIB),
            is_expandable=True,
        )
    )

    assert stranders[1].stranded_bytes == 0
    assert stranders[2].stranded_bytes == 18 * MIB
    assert result.free_space.stranded_free_bytes == 35 * MIB


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_find_stranders_removing_the_group_makes_its_stranded_bytes_releasable(
    parts, is_expandable
):
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

    stranders, before = stranders_of(build(None))

    for line, strander in stranders.items():
        if line == 99:
            continue
        _, after = stranders_of(build(line))
        gained = after.free_space.releasable_bytes - before.free_space.releasable_bytes
        own = sum(units * MIB // 2 for units, of, is_free in parts if of == line and not is_free)
        # What becomes releasable is the stranded free bytes and at most the blocks themselves.
        assert strander.stranded_bytes <= gained <= strander.stranded_bytes + own


def stranded_in(*segments):
    """Return the segments with stranded memory, and how many have any."""
    result = analyze_device(from_python(snapshot(*segments)), 0)
    return find_stranded_segments(result.trace.layout, 0)


def test_find_stranded_segments_private_pool_is_left_out():
    found = stranded_in(segment(BASE, block(MIB, LIVE), block(19 * MIB), pool=(0, 1)))

    assert found == ((), 0)


def test_find_stranded_segments_of_many_keeps_the_worst():
    found, n = stranded_in(
        *(
            segment(BASE * (i + 1), block((20 - i) * MIB, LIVE), block(i * MIB))
            for i in range(1, 18)
        )
    )

    assert n == 17
    stranded = [s.stranded_bytes // MIB for s in found]
    assert stranded == list(range(17, 17 - MAX_SEGMENTS, -1))
