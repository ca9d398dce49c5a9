"""Everything the page's script draws, for all devices, within one size budget."""

from __future__ import annotations

from typing import Any, Final

from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.lifetimes import Lifetimes
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.analysis.timeline import sized_lifetimes
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


MAX_DEVICES: Final = 64


class Payload:
    """What the graphics of one diagnosis draw, at any scale; what they share is worked out once."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._analyses = dict(sorted(diagnosis.analyses.items())[:MAX_DEVICES])
        snapshot = diagnosis.case.snapshot
        self._owners = None if snapshot is None else CodeOwners.of(snapshot)
        self._lifetimes: dict[int, Lifetimes] = {}

    @property
    def devices(self) -> list[int]:
        """The devices that there are graphics of."""
        return list(self._analyses)

    def encode(self, scale: float = 1.0) -> str:
        """Return the data of all graphics; "" without a snapshot. A scale below 1 is coarser."""
        snapshot = self._diagnosis.case.snapshot
        if snapshot is None or self._owners is None:
            return ""
        sink = Sink.of(snapshot, self._owners, scale)
        share = scale / max(1, len(self._analyses))
        capacity = {f.device: f.capacity_bytes for f in self._diagnosis.devices}
        devices = {
            str(device): {
                # The map and the icicle first: their stacks matter most if the tables fill up.
                "icicle": icicle_data(analysis, self._lives(snapshot, device), sink),
                "map": segment_map_data(snapshot, analysis, sink, int(MAX_BLOCKS * share)),
                "timeline": self._timeline(snapshot, analysis, sink, share),
                "capacity": capacity.get(device),
            }
            for device, analysis in self._analyses.items()
        }
        wanted = self._diagnosis.verdict.device
        head = {
            "devices": devices,
            "device": wanted if wanted in self._analyses else min(self._analyses, default=None),
            "text": sink.tables.encode(sink.blob),
        }
        return sink.blob.encode(head)

    def _timeline(
        self, snapshot: Snapshot, analysis: DeviceAnalysis, sink: Sink, share: float
    ) -> dict[str, Any] | None:
        tell("Drawing the timeline")
        return timeline_data(snapshot, analysis, sink, int(TIMELINE_BUDGET * share))

    def _lives(self, snapshot: Snapshot, device: int) -> Lifetimes:
        if device not in self._lifetimes:
            columns = device_columns(snapshot, device)
            self._lifetimes[device] = sized_lifetimes(columns, snapshot.settings)
        return self._lifetimes[device]
