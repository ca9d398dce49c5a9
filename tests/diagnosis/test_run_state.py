"""What a reader should know about the inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from builders import columns, oom, small
from msgspec.structs import replace
from oom_messages import case_of

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.snapshot import Action, EventTable, HostSegment
from fragdoctor.units import GIB, MIB

SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "fragmentation_oom.pickle"


def test_page_locked_memory_is_noted_and_counts_in_no_figure():
    plain = read_snapshot(SAMPLE)
    segments = (
        HostSegment(4096, 3 * GIB, True),
        HostSegment(8192, GIB, False),
        HostSegment(-1, -1, None),
    )

    found = diagnose(Case(snapshot=replace(plain, host_segments=segments)))

    note = "The host has 4.00 GiB page-locked (pinned), 1.00 GiB of it cached for reuse"
    assert f"{note}: no figure here includes it." in found.notes
    assert found.devices == diagnose(Case(snapshot=plain)).devices


def test_nothing_is_said_where_no_host_memory_is_recorded():
    found = diagnose(Case(snapshot=read_snapshot(SAMPLE)))

    assert not any("page-locked" in note for note in found.notes)


def test_holders_of_page_locked_memory_are_named_with_the_moment_and_the_peak():
    plain = read_snapshot(SAMPLE)
    first, last = plain.events.time_us[0], plain.events.time_us[-1]
    stack = int(plain.events.stack[plain.events.stack >= 0][0])
    one = np.array([stack, stack], np.int32)
    host = EventTable(
        action=np.array([Action.ALLOC, Action.ALLOC], np.uint8),
        address=np.array([1 << 30, 1 << 31], np.uint64),
        size_bytes=np.array([GIB // 2, GIB], np.uint64),
        stream=np.zeros(2, np.int32),
        time_us=np.array([first, last + 1]),
        stack=one,
        pool=one * 0 - 1,
        compile_context=one * 0 - 1,
        user_metadata=one * 0 - 1,
        offsets=np.array([0, 2]),
    )
    segments = (HostSegment(1 << 30, GIB // 2, True), HostSegment(1 << 31, GIB, True))

    found = diagnose(Case(snapshot=replace(plain, host_segments=segments, host_events=host)))

    [note] = [n for n in found.notes if n.startswith("Host tensors")]
    assert note.startswith("Host tensors held 512.00 MiB of page-locked memory at the failure (")
    assert note.endswith("), and 1.50 GiB at most.")
    assert found.host is not None
    assert (found.host.moment, found.host.held_bytes) == ("failure", GIB // 2)
    assert found.host.peak_bytes == found.host.reserved_bytes == 3 * GIB // 2
    assert sum(h.n_bytes for h in found.host.holders) == found.host.held_bytes
    assert found.devices == diagnose(Case(snapshot=plain)).devices


def test_page_locked_memory_is_that_of_the_failure_which_the_message_is_about():
    data = small()
    data["device_traces"][0].append(oom(32 * MIB, MIB, time_us=9))
    blocks = ((1 << 30, MIB, 2), (1 << 31, 4 * MIB, 8))
    host = [
        {"action": "alloc", "addr": at, "size": n, "stream": 0, "time_us": t, "frames": []}
        for at, n, t in blocks
    ]
    held = [{"address": at, "size": n, "allocated": True} for at, n, _ in blocks]
    recorded = columns(data | {"host_segments": held, "host_traces": host})
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total"

    first, last = (
        diagnose(replace(case_of(said.format(n)), snapshot=recorded)).host for n in (64, 32)
    )

    assert first is not None
    assert last is not None
    assert (first.moment, first.held_bytes) == ("failure", MIB)
    assert (last.moment, last.held_bytes) == ("failure", 5 * MIB)
