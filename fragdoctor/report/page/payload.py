"""Everything the page's script draws, for all devices, within one size budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.analysis.timeline import undo
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report.page.blob import BlobWriter
from fragdoctor.report.page.icicle_data import icicle_data
from fragdoctor.report.page.segment_map_data import MAX_BLOCKS, segment_map_data
from fragdoctor.report.page.text_tables import SnapshotStacks, TextTables
from fragdoctor.report.page.timeline_data import timeline_data

TIMELINE_BUDGET: Final = 1_500_000
"""Compressed bytes of all timelines; 1.33 times that in the file, as base64."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The encoded blob, and which graphics each device has (for the template)."""

    encoded: str
    timelines: frozenset[int]
    maps: frozenset[int]
    icicles: frozenset[int]


def build_payload(
    diagnosis: Diagnosis, analyses: Mapping[int, DeviceAnalysis], scale: float = 1.0
) -> Payload:
    """Return the data of all graphics; ``scale`` below 1 makes them coarser."""
    blob, tables = BlobWriter(), TextTables()
    snapshot = diagnosis.case.snapshot
    devices: dict[str, Any] = {}
    if snapshot is not None:
        stacks = SnapshotStacks(snapshot, tables)
        share = scale / max(1, len(analyses))
        for device, analysis in sorted(analyses.items()):
            devices[str(device)] = _device(snapshot, analysis, blob, tables, stacks, share)
    capacity = {d.device: d.capacity_bytes for d in diagnosis.devices}
    for device, data in devices.items():
        data["capacity"] = capacity.get(int(device))
    head = {
        "devices": devices,
        "device": _first_device(diagnosis, analyses),
        "text": tables.encode(blob),
    }
    return Payload(
        blob.encode(head),
        frozenset(int(d) for d, data in devices.items() if data["timeline"]),
        frozenset(int(d) for d, data in devices.items() if data["map"]),
        frozenset(int(d) for d, data in devices.items() if data["icicle"]),
    )


def _first_device(diagnosis: Diagnosis, analyses: Mapping[int, DeviceAnalysis]) -> int | None:
    wanted = diagnosis.verdict.device
    return wanted if wanted in analyses else min(analyses, default=None)


def _device(
    snapshot: Snapshot,
    analysis: DeviceAnalysis,
    blob: BlobWriter,
    tables: TextTables,
    stacks: SnapshotStacks,
    share: float,
) -> dict[str, Any]:
    lifetimes = undo(device_columns(snapshot, analysis.device), snapshot.settings).lifetimes
    return {
        # The map and the icicle first: their stacks matter most if the text tables fill up.
        "icicle": icicle_data(analysis, lifetimes, blob, stacks),
        "map": segment_map_data(snapshot, analysis, blob, stacks, int(MAX_BLOCKS * share)),
        "timeline": timeline_data(
            snapshot, analysis, blob, tables, stacks, int(TIMELINE_BUDGET * share)
        ),
    }
