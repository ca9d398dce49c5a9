"""Everything the page's script draws, for all devices, within one size budget.

Here also its small parts: who holds the memory, by call stack, at the peak and at the end; and what
was replayed for the diagnosis, for the page to compare.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.frozen import frozen
from fragdoctor.model.diagnosis import Diagnosis, Recommendation
from fragdoctor.model.hooks import report_progress
from fragdoctor.report import escape
from fragdoctor.report.page.lives_data import lives_data
from fragdoctor.report.page.segment_map_data import MAX_BLOCKS, segment_map_data
from fragdoctor.report.page.text_tables import Sink
from fragdoctor.report.page.timeline_data import timeline_data
from fragdoctor.trace.lives import Lives

I64 = npt.NDArray[np.int64]

TIMELINE_BUDGET: Final = 1_500_000
"""Compressed bytes of all timelines; 1.33 times that in the file, as base64."""

LIVES_BUDGET: Final = 2_200_000
"""Compressed bytes of all blocks over time."""

MAX_DEVICES: Final = 64

MAX_STACKS: Final = 4000
"""Stacks in one picture; what the others hold is summed up and named as such."""

_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF="
_MAX_TEXT: Final = 200


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


@frozen
class HeldByStack:
    """Live bytes and blocks per stack id (-1: no stack recorded), largest first."""

    stack: I64
    n_bytes: I64
    n_blocks: I64

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return int(self.n_bytes.sum())


def held_at(lives: Lives, state: int) -> HeldByStack:
    """Return what was allocated after ``state`` events, by stack."""
    rows = lives.allocated_at(state)
    used, inverse = np.unique(lives.stack[rows], return_inverse=True)
    held = np.zeros(len(used), np.int64)
    np.add.at(held, inverse, lives.size_bytes[rows])
    count = np.bincount(inverse, minlength=len(used)).astype(np.int64)
    order = np.argsort(-held, kind="stable")
    return HeldByStack(used[order].astype(np.int64), held[order], count[order])


def icicle_data(analysis: DeviceAnalysis, sink: Sink) -> dict[str, Any] | None:
    """Return the JSON part of one device's icicles; None where nothing was ever live."""
    states = {"end": analysis.n_events}
    if analysis.timeline is not None and analysis.n_events:
        states = {"peak": analysis.timeline.peak_allocated_state, **states}
    moments: dict[str, Any] = {}
    for name, state in states.items():
        held = held_at(analysis.trace.lives, state)
        if held.total_bytes:
            moments[name] = {"state": state, **_encode(held, sink)}
    return moments or None


def _encode(held: HeldByStack, sink: Sink) -> dict[str, Any]:
    rest = slice(MAX_STACKS, None)
    return {
        "total": held.total_bytes,
        "n_blocks": int(held.n_blocks.sum()),
        "rest_bytes": int(held.n_bytes[rest].sum()),
        "rest_stacks": len(held.stack[rest]),
        "stack": sink.blob.add([sink.stacks.page_stack(int(s)) for s in held.stack[:MAX_STACKS]]),
        "bytes": sink.blob.add(held.n_bytes[:MAX_STACKS]),
        "blocks": sink.blob.add(held.n_blocks[:MAX_STACKS]),
    }


def whatif_data(diagnosis: Diagnosis, *, is_live: bool) -> dict[str, Any] | None:
    """Return the recorded run and every variant that was replayed; None where nothing was.

    The page of a server (``is_live``) can ask for more, so that it needs no variants.
    """
    device = diagnosis.verdict.device
    if device is None and diagnosis.devices:
        device = diagnosis.devices[0].device
    figures = next((f for f in diagnosis.devices if f.device == device), None)
    tried = [r for r in (*diagnosis.recommendations, *diagnosis.rejected) if _is_replayed(r)]
    if figures is None or device not in diagnosis.analyses or not (tried or is_live):
        return None
    return {
        "device": device,
        "live": is_live,
        "capacity": figures.capacity_bytes,
        "recorded": {
            "name": "as recorded",
            "fits": not figures.ooms,
            "peak": figures.peak_reserved_bytes,
            "retries": figures.alloc_retries,
        },
        "least": figures.peak_allocated_bytes,
        "variants": [_variant(r) for r in tried],
    }


def _is_replayed(one: Recommendation) -> bool:
    return one.predicted.method in {"replay", "estimate"} and bool(
        one.predicted.peak_reserved_bytes
    )


def _variant(one: Recommendation) -> dict[str, Any]:
    name = one.setting.removeprefix(_VARIABLE) or one.title
    p = one.predicted
    return {
        "name": escape.visible(name[:_MAX_TEXT]),
        "fits": p.fits,
        "peak": p.peak_reserved_bytes,
        "retries": p.retries,
        "margin": p.margin_bytes,
        "calls": p.driver_calls,
        "outlook": p.outlook.state.value if p.outlook is not None else None,
    }
