"""Page-locked memory of the host: who holds it, its peak, what grows."""

from __future__ import annotations

import numpy as np
from builders import MIB, frame, pickled, snapshot

from fragdoctor.analysis.host_memory import host_memory
from fragdoctor.inputs.snapshot_reader import read_snapshot

BASE = 1 << 30
N_STEPS = 12
STEP_TIMES = np.arange(N_STEPS + 1, dtype=np.int64) * 10


def _event(action, address, size, time_us, line):
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us,
        "frames": [frame(line=line)],
    }  # fmt: skip


def _recorded(n_kept):
    """Read N_STEPS steps: line 21 stages 2 MiB and lets go, line 20 keeps the first n_kept."""
    events, segments = [], [{"address": BASE, "size": 2 * MIB, "allocated": False}]
    for i in range(N_STEPS):
        events.append(_event("alloc", BASE, 2 * MIB, 10 * i + 1, 21))
        if i < n_kept:
            kept = BASE + 4 * MIB * (i + 1)
            events.append(_event("alloc", kept, 4 * MIB, 10 * i + 2, 20))
            segments.append({"address": kept, "size": 4 * MIB, "allocated": True})
        events.append(_event("free_requested", BASE, 2 * MIB, 10 * i + 3, 21))
        events.append(_event("free_completed", BASE, 2 * MIB, 10 * i + 4, 21))
    return read_snapshot(pickled(snapshot(host_segments=segments, host_traces=events)))


def _lines(holders):
    return [(h.location.line, h.n_bytes) for h in holders]


def test_holders_and_peak_are_by_source_line():
    found = host_memory(_recorded(N_STEPS))

    assert _lines(found.holders) == [(20, 48 * MIB)]
    assert (found.held_bytes, found.peak_bytes) == (48 * MIB, 50 * MIB)


def test_holders_at_a_moment_are_those_of_that_moment():
    found = host_memory(_recorded(N_STEPS), moment_us=12)

    assert _lines(found.holders) == [(20, 8 * MIB), (21, 2 * MIB)]


def test_memory_kept_in_every_step_grows():
    found = host_memory(_recorded(N_STEPS), step_times_us=STEP_TIMES)

    assert [(g.location.line, g.bytes_per_step, g.survivor_bytes) for g in found.growth] == [
        (20, 4 * MIB, 48 * MIB)
    ]


def test_memory_kept_in_the_first_steps_only_does_not_grow():
    assert host_memory(_recorded(3), step_times_us=STEP_TIMES).growth == ()


def test_without_host_traces_there_is_nothing_to_say():
    assert host_memory(read_snapshot(pickled(snapshot()))) is None
