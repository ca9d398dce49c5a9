from __future__ import annotations

import json

import numpy as np
import pytest
from builders import BASE, MIB, block, segment, snapshot
from stock import from_python, load_stock

from fragdoctor.analysis.device import analyze_device, analyze_devices


def test_analyze_devices_gives_each_device_its_own_memory():
    read = from_python(
        snapshot(
            segment(BASE, block(MIB, "active_allocated", requested=MIB - 5), block(MIB)),
            segment(BASE, block(20 * MIB), device=3),
        )
    )

    first, second = analyze_devices(read)

    assert (
        first.device,
        first.reserved_bytes,
        first.allocated_bytes,
        first.requested_bytes,
        first.requested_waste_bytes,
    ) == (0, 2 * MIB, MIB, MIB - 5, 5)
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
        result.peak_row,
    ) == (0, 0, 0, None, None)


@pytest.mark.shared
def test_analyze_devices_recordings_agree_with_memory_stats(shared):
    for name in json.loads((shared / "snapshots" / "expected.json").read_text()):
        read = load_stock(shared / "snapshots" / name / "snapshot.pickle")
        stats = json.loads((shared / "snapshots" / name / "stats.json").read_text())
        for result in analyze_devices(read):
            one = stats[result.device] if isinstance(stats, list) else stats
            free = result.free_space
            assert one["reserved_bytes.all.current"] == result.reserved_bytes
            assert one["allocated_bytes.all.current"] == result.allocated_bytes
            assert one["active_bytes.all.current"] == result.active_bytes
            assert one["requested_bytes.all.current"] == result.requested_bytes
            assert result.reserved_bytes - result.active_bytes == free.free_cached_bytes
            assert sum(h.now_bytes for h in result.holders) == result.allocated_bytes
            if result.timeline is not None:
                assert result.allocated_bytes == int(result.timeline.allocated_bytes[-1])
                assert sum(h.peak_bytes for h in result.holders) == int(
                    np.max(result.timeline.allocated_bytes)
                )
