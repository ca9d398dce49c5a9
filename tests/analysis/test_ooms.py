from __future__ import annotations

import pytest
from builders import (
    BASE,
    MIB,
    alloc,
    block,
    event,
    free,
    oom,
    segment,
    segment_alloc,
    snapshot,
)
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.free_space import segment_bytes
from fragdoctor.model.settings import AllocatorSettings

LIVE = "active_allocated"
A, B = BASE, BASE + 64 * MIB


@pytest.mark.parametrize(
    ("rounded", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (16 * MIB + 512, 18 * MIB),
    ],
)
def test_segment_bytes_request_gives_what_the_driver_is_asked_for(rounded, expected):
    assert expected == segment_bytes(rounded, AllocatorSettings())


def run(events, *segments):
    return analyze_device(from_python(snapshot(*segments, events=events)), 0)


def test_find_ooms_at_the_end_has_the_recorded_state():
    events = [
        segment_alloc(A, 20 * MIB),
        alloc(A, 5 * MIB),
        oom(30 * MIB, 8 * MIB),
        event("snapshot", 0, 0),
    ]

    result = run(events, segment(A, block(5 * MIB, LIVE), block(15 * MIB)))
    (found,) = result.ooms

    assert (
        found.row,
        found.rounded_bytes,
        found.segment_bytes,
        found.device_free_bytes,
    ) == (2, 30 * MIB, 30 * MIB, 8 * MIB)
    assert (found.allocated_bytes, found.reserved_bytes) == (5 * MIB, 20 * MIB)
    assert found.largest_free_block_bytes == 15 * MIB
    assert result.capacity_estimate_bytes == 28 * MIB


def test_find_ooms_largest_block_counts_only_what_could_serve():
    events = [segment_alloc(A, 20 * MIB), alloc(A, 5 * MIB), oom(30 * MIB, 0)]

    (found,) = run(
        events,
        segment(A, block(5 * MIB, LIVE), block(15 * MIB)),
        segment(B, block(5 * MIB, LIVE), block(45 * MIB), stream=7),
        segment(B * 2, block(45 * MIB), pool=(0, 1)),
    ).ooms

    assert found.largest_free_block_bytes == 15 * MIB


def test_find_ooms_absurd_size_is_kept_as_it_is():
    (found,) = run(
        [segment_alloc(A, 2 * MIB), oom(2**64 - 512, 5)], segment(A, block(2 * MIB))
    ).ooms

    assert found.rounded_bytes == 2**64 - 512


def test_find_ooms_knows_what_was_free_in_pools_that_are_gone_by_the_end():
    events = [
        segment_alloc(A, 20 * MIB, pool=(0, 1)),
        alloc(A, 12 * MIB, pool=(0, 1)),
        segment_alloc(B, 20 * MIB),
        alloc(B, 5 * MIB),
        oom(30 * MIB, 8 * MIB),
        *free(A, 12 * MIB, pool=(0, 1)),
        event("segment_free", A, 20 * MIB, pool=(0, 1)),
    ]

    (found,) = run(events, segment(B, block(5 * MIB, LIVE), block(15 * MIB))).ooms

    assert found.private_pools_free_bytes == 8 * MIB
