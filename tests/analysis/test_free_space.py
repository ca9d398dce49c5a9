from __future__ import annotations

import pytest
from builders import BASE, MIB, block, segment, snapshot
from stock import from_python

from fragdoctor.analysis.device import analyze_device

LIVE, PENDING = "active_allocated", "active_pending_free"


def free_of(*segments):
    result = analyze_device(from_python(snapshot(*segments)), 0)
    free = result.free_space
    assert free.free_cached_bytes == result.reserved_bytes - result.active_bytes
    parts = free.releasable_bytes + free.stranded_free_bytes + free.private_pools_free_bytes
    assert free.free_cached_bytes == parts
    return free


def test_free_space_whole_free_segment_is_releasable():
    free = free_of(segment(BASE, block(20 * MIB)))

    assert (free.releasable_bytes, free.stranded_free_bytes) == (20 * MIB, 0)


@pytest.mark.parametrize("state", [LIVE, PENDING])
def test_free_space_segment_with_an_active_block_is_stranded(state):
    free = free_of(segment(BASE, block(MIB, state), block(19 * MIB)))

    assert (free.releasable_bytes, free.stranded_free_bytes) == (0, 19 * MIB)
    assert (MIB if state == PENDING else 0) == free.pending_free_bytes


def test_free_space_expandable_sliver_stays_mapped():
    # The golden example of the allocator: 0-16 and 16-21 freed, 21-51 live, 20 MiB pages.
    free = free_of(
        segment(BASE, block(21 * MIB), block(30 * MIB, LIVE), block(9 * MIB), is_expandable=True)
    )

    assert (free.releasable_bytes, free.stranded_free_bytes) == (20 * MIB, 10 * MIB)


def test_free_space_expandable_small_pool_has_pages_of_2_mib():
    free = free_of(
        segment(
            BASE,
            block(5 * MIB),
            block(MIB, LIVE),
            block(4 * MIB),
            is_expandable=True,
            kind="small",
        )
    )

    assert (free.releasable_bytes, free.stranded_free_bytes) == (8 * MIB, MIB)


def test_free_space_private_pool_is_never_releasable():
    free = free_of(segment(BASE, block(20 * MIB), pool=(0, 3)), segment(BASE * 2, block(2 * MIB)))

    assert (free.releasable_bytes, free.stranded_free_bytes) == (2 * MIB, 0)
    assert 20 * MIB == free.private_pools_free_bytes == free.private_pools_reserved_bytes
