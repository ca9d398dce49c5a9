"""Everything the page's script draws, for all devices, within one size budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.hooks import tell
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report.page.icicle_data import icicle_data
from fragdoctor.report.page.segment_map_data import MAX_BLOCKS, segment_map_data
from fragdoctor.report.page.sink import Sink
from fragdoctor.report.page.text_tables import CodeOwners
from fragdoctor.report.page.timeline_data import timeline_data

TIMELINE_BUDGET: Final = 1_500_000
"""Compressed bytes of all timelines; 1.33 times that in the file, as base64."""


def build_payload(
    diagnosis: Diagnosis,
    analyses: Mapping[int, DeviceAnalysis],
    owners: CodeOwners | None = None,
    scale: float = 1.0,
) -> str:
    """Return the data of all graphics; "" without a snapshot.

    ``owners`` are worked out where None; ``scale`` below 1 makes the graphics coarser.
    """
    snapshot = diagnosis.case.snapshot
    if snapshot is None:
        return ""
    sink = Sink.of(snapshot, owners, scale)
    share = scale / max(1, len(analyses))
    devices = {
        str(device): _device(snapshot, analysis, sink, share)
        for device, analysis in sorted(analyses.items())
    }
    for figures in diagnosis.devices:
        if str(figures.device) in devices:
            devices[str(figures.device)]["capacity"] = figures.capacity_bytes
    head = {
        "devices": devices,
        "device": _first_device(diagnosis, analyses),
        "text": sink.tables.encode(sink.blob),
    }
    return sink.blob.encode(head)


def _first_device(diagnosis: Diagnosis, analyses: Mapping[int, DeviceAnalysis]) -> int | None:
    wanted = diagnosis.verdict.device
    return wanted if wanted in analyses else min(analyses, default=None)


def _device(
    snapshot: Snapshot, analysis: DeviceAnalysis, sink: Sink, share: float
) -> dict[str, Any]:
    return {
        # The map and the icicle first: their stacks matter most if the text tables fill up.
        "icicle": icicle_data(analysis, sink),
        "map": segment_map_data(snapshot, analysis, sink, int(MAX_BLOCKS * share)),
        "timeline": _timeline(snapshot, analysis, sink, int(TIMELINE_BUDGET * share)),
        "capacity": None,
    }


def _timeline(
    snapshot: Snapshot, analysis: DeviceAnalysis, sink: Sink, budget_bytes: int
) -> dict[str, Any] | None:
    tell("Drawing the timeline")
    return timeline_data(snapshot, analysis, sink, budget_bytes)
