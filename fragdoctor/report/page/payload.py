"""Everything the page's script draws, for all devices, within one size budget."""

from __future__ import annotations

from typing import Any, Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.hooks import report_progress
from fragdoctor.report.page.icicle_data import icicle_data
from fragdoctor.report.page.lives_data import lives_data
from fragdoctor.report.page.segment_map_data import MAX_BLOCKS, segment_map_data
from fragdoctor.report.page.text_tables import Sink
from fragdoctor.report.page.timeline_data import timeline_data
from fragdoctor.report.page.whatif_data import whatif_data

TIMELINE_BUDGET: Final = 1_500_000
"""Compressed bytes of all timelines; 1.33 times that in the file, as base64."""

LIVES_BUDGET: Final = 2_200_000
"""Compressed bytes of all blocks over time."""

MAX_DEVICES: Final = 64


def encode_payload(diagnosis: Diagnosis, scale: float = 1.0, *, is_live: bool = False) -> str:
    """Return the data of all graphics; "" without a recording. A scale below 1 is coarser."""
    analyses = shown_analyses(diagnosis)
    if not analyses:
        return ""
    first = next(iter(analyses.values())).trace
    sink = Sink.of(first.snapshot, first.stacks, scale)
    share = scale / len(analyses)
    capacity = {f.device: f.capacity_bytes for f in diagnosis.devices}
    report_progress("Drawing the page")
    devices: dict[str, Any] = {}
    for device, analysis in analyses.items():
        # The map and the icicle first: their stacks matter most if the tables fill up.
        data: dict[str, Any] = {
            "icicle": icicle_data(analysis, sink),
            "map": segment_map_data(analysis, sink, int(MAX_BLOCKS * share)),
            "lives": lives_data(analysis, sink, int(LIVES_BUDGET * share)),
            "capacity": capacity.get(device),
        }
        budget = None if data["lives"] and data["lives"]["complete"] else TIMELINE_BUDGET * share
        data["timeline"] = timeline_data(analysis, sink, budget)
        devices[str(device)] = data
    wanted = diagnosis.verdict.device
    head = {
        "devices": devices,
        "device": wanted if wanted in analyses else min(analyses),
        "whatif": whatif_data(diagnosis, is_live=is_live),
        "text": sink.tables.encode(sink.blob),
    }
    return sink.blob.encode(head)


def shown_analyses(diagnosis: Diagnosis) -> dict[int, DeviceAnalysis]:
    """Return the devices that there are graphics of."""
    return dict(sorted(diagnosis.analyses.items())[:MAX_DEVICES])
