from __future__ import annotations

import pytest
from analysis.recordings import recording, recordings, stats_of
from builders import (
    BASE,
    MIB,
    alloc,
    block,
    free,
    oom,
    segment,
    segment_alloc,
    segment_free,
    snapshot,
)
from builders import settings as recorded
from stock import from_python

from fragdoctor.analysis.device import analyze_device

LIVE = "active_allocated"
A, B = BASE, BASE + 40 * MIB


def run(events, *segments, **more):
    return analyze_device(from_python(snapshot(*segments, events=events, **more)), 0)


def one_freed(then):
    """A 40 MiB segment, used and freed; it is returned, and then something follows."""
    return [
        segment_alloc(A, 40 * MIB),
        alloc(A, 40 * MIB),
        *free(A, 40 * MIB),
        segment_free(A, 40 * MIB),
        *then,
    ]


def test_find_flushes_new_memory_beyond_the_peak_is_a_retry():
    then = [segment_alloc(B, 60 * MIB), alloc(B, 60 * MIB)]

    result = run(one_freed(then), segment(B, block(60 * MIB, LIVE)))

    assert [(f.cause, f.released_bytes, f.first_row, f.last_row) for f in result.flushes] == [
        ("retry", 40 * MIB, 4, 4)
    ]
    assert result.n_inferred_retries == 1


def test_find_flushes_nothing_new_afterwards_is_empty_cache():
    result = run(one_freed([]))

    assert [f.cause for f in result.flushes] == ["empty_cache"]
    assert result.n_inferred_retries == 0


def test_find_flushes_memory_the_driver_gave_before_is_empty_cache():
    # 100 MiB were reserved once, so 40 + 20 MiB cannot have been refused.
    events = [
        segment_alloc(B, 60 * MIB),
        alloc(B, 60 * MIB),
        *one_freed([])[:-1],
        *free(B, 60 * MIB),
        segment_free(B, 60 * MIB),
        segment_free(A, 40 * MIB),
        segment_alloc(A, 20 * MIB),
        alloc(A, 20 * MIB),
    ]
    events[6:6] = [segment_alloc(B * 2, 90 * MIB), alloc(B * 2, 90 * MIB)]
    events += [*free(B * 2, 90 * MIB), segment_free(B * 2, 90 * MIB), segment_alloc(B, 2 * MIB)]

    result = run(events, segment(A, block(20 * MIB, LIVE)), segment(B, block(2 * MIB)))

    assert result.flushes[-1].cause == "empty_cache"


def test_find_flushes_followed_by_oom_counts_one_retry():
    result = run(one_freed([oom(900 * MIB, 800 * MIB)]))

    assert [f.cause for f in result.flushes] == ["retry"]
    assert result.n_inferred_retries == 1


def test_find_flushes_oversize_block_under_max_split_is_no_retry():
    then = [segment_alloc(A, 40 * MIB), alloc(A, 39 * MIB)]
    conf = recorded(max_split_size=20 * MIB)

    result = run(one_freed(then), segment(A, block(40 * MIB, LIVE)), allocator_settings=conf)

    assert [f.cause for f in result.flushes] == ["max_split"]
    assert result.n_inferred_retries == 0


@pytest.mark.shared
def test_find_flushes_recordings_retries_equal_memory_stats(shared):
    for folder in recordings(shared):
        for result in recording(folder)[1]:
            retries = stats_of(folder, result.device).get("num_alloc_retries", 0)
            # A trace that begins late, or none, does not hold what was before.
            if result.capture.is_late_start or not result.capture.has_trace:
                assert result.n_inferred_retries <= retries
            else:
                assert retries == result.n_inferred_retries, folder.name
