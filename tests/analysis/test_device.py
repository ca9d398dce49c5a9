from __future__ import annotations

import pytest
from analysis.recordings import recording, recordings, stats_of
from builders import BASE, MIB, block, segment, snapshot
from stock import from_python

from fragdoctor.analysis.attribution import find_holders
from fragdoctor.analysis.device import analyze_device


def test_analyze_device_gives_each_device_its_own_memory():
    read = from_python(
        snapshot(
            segment(BASE, block(MIB, "active_allocated", requested=MIB - 5), block(MIB)),
            segment(BASE, block(20 * MIB), device=3),
        )
    )

    first, second = (analyze_device(read, device) for device in read.devices)

    assert (
        first.device,
        first.reserved_bytes,
        first.allocated_bytes,
        first.requested_bytes,
    ) == (0, 2 * MIB, MIB, MIB - 5)
    assert (
        second.device,
        second.reserved_bytes,
        second.allocated_bytes,
        second.free_space.releasable_bytes,
    ) == (3, 20 * MIB, 0, 20 * MIB)


def test_analyze_device_unknown_device_gives_zeros():
    result = analyze_device(from_python(snapshot()), 7)

    assert (
        result.reserved_bytes,
        result.n_events,
        result.n_segments,
        result.timeline,
    ) == (0, 0, 0, None)


@pytest.mark.slow
@pytest.mark.shared
def test_analyze_device_recordings_agree_with_memory_stats(shared):
    for folder in recordings(shared):
        for result in recording(folder)[1]:
            one, free = stats_of(folder, result.device), result.free_space
            assert one.get("reserved_bytes.all.current", 0) == result.reserved_bytes
            assert one.get("allocated_bytes.all.current", 0) == result.allocated_bytes
            assert one.get("active_bytes.all.current", 0) == result.active_bytes
            assert one.get("requested_bytes.all.current", 0) == result.requested_bytes
            assert result.reserved_bytes - result.active_bytes == free.free_cached_bytes
            line = result.timeline
            states = [] if line is None else [line.peak_allocated_state]
            holders = find_holders(result.trace, states, result.category)
            assert sum(h.n_bytes[0] for h in holders) == result.allocated_bytes
            if line is not None:
                assert result.allocated_bytes == int(line.allocated_bytes[-1])
                assert line.peak_allocated_bytes == sum(h.n_bytes[1] for h in holders)
