"""What a reader should know about the inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.snapshot import HostSegment
from fragdoctor.units import GIB

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
    assert f"{note}: it is in no figure here." in found.notes
    assert found.devices == diagnose(Case(snapshot=plain)).devices


def test_nothing_is_said_where_no_host_memory_is_recorded():
    found = diagnose(Case(snapshot=read_snapshot(SAMPLE)))

    assert not any("page-locked" in note for note in found.notes)
