"""What one run says, ready to be compared: its diagnosis, its steps, the memory of every line.

A line is the user's own line of a stack (``analysis.attribution``). For each line all blocks of
the trace are kept as sums: bytes at the peak and now, the sizes asked for, the stacks behind it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fragdoctor.analysis.attribution import user_frames
from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import CaptureQuality, DeviceAnalysis, Timeline
from fragdoctor.analysis.timeline import undo
from fragdoctor.comparison.line_uses import LineUse, line_uses, location_of
from fragdoctor.diagnosis.contexts import primary_message
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Location
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, I64, Action, Snapshot

_FEATURES: Final = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\](checkpoint)|optim[/\\]((?!optimizer|lr_scheduler|__)\w+))\.py$"
)


@dataclass(frozen=True, slots=True)
class GrowingLine:
    """A line that keeps memory step by step within one run."""

    place: Location | None
    slope_bytes: int
    n_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceReading:
    """One device of one run.

    Attributes:
        peak_row: events until the peak; None without a trace.
        n_lines_merged: the smallest lines, which are one in ``lines``.
        requests: ``int64``, sizes asked for, in the order of the trace; failed requests are not
            among them.
        request_rows: ``int64``, the event row (within the device) of each request.
        features: library parts that the requests went through: ``checkpoint``, optimizers.
        capacity_bytes: what PyTorch could have, where a failed request shows it.
    """

    device: int
    capture: CaptureQuality
    timeline: Timeline | None
    peak_row: int | None
    n_steps: int | None
    lines: tuple[LineUse, ...]
    n_lines_merged: int
    growth: tuple[GrowingLine, ...]
    requests: I64
    request_rows: I64
    features: frozenset[str]
    peak_place: Location | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One run: its diagnosis, and its devices where it has a snapshot.

    The diagnosis is kept without the snapshot, so that a long series fits into memory.
    """

    name: str
    diagnosis: Diagnosis
    devices: dict[int, DeviceReading]
    settings: AllocatorSettings | None
    torch_version: str
    conf: str | None


def read_run(case: Case, name: str) -> Reading:
    """Return what one run says."""
    snapshot = case.snapshot
    devices: dict[int, DeviceReading] = {}
    analyses: dict[int, DeviceAnalysis] = {}
    if snapshot is not None:
        wanted = case.overrides.device
        lines = user_frames(snapshot)
        for d in snapshot.devices:
            if wanted in (None, d):
                devices[d], analyses[d] = read_device(snapshot, d, lines)
    diagnosis = diagnose(case, analyses=analyses)
    is_recorded = snapshot is not None and snapshot.settings.is_recorded
    return Reading(
        name=name,
        diagnosis=replace(diagnosis, case=replace(case, snapshot=None), analyses={}),
        devices=devices,
        settings=snapshot.settings if snapshot is not None and is_recorded else None,
        torch_version=_version(case),
        conf=snapshot.settings.conf if snapshot is not None and is_recorded else None,
    )


def _version(case: Case) -> str:
    """Return the PyTorch versions that fit the inputs: ``2.12``, ``2.4 to 2.6``, or ""."""
    told = case.overrides.torch_version
    if told:
        return told
    message = primary_message(case)
    low = high = ""
    if case.snapshot is not None and case.snapshot.provenance.version_low:
        origin = case.snapshot.provenance
        low, high = origin.version_low, origin.version_high
    elif message is not None:
        low, high = message.version_low, message.version_high
    if not low or low == high:
        return low or high
    return f"{low} to {high}" if high else f"{low} or newer"


def read_device(
    snapshot: Snapshot, device: int, lines: I32
) -> tuple[DeviceReading, DeviceAnalysis]:
    """Return what one device of a snapshot says, and its analysis for the diagnosis.

    Args:
        snapshot: the columns of a file.
        device: number of the device.
        lines: user frame of each stack (``attribution.user_frames``).
    """
    columns = device_columns(snapshot, device)
    undone = undo(columns, snapshot.settings)
    analysis = analyze_device(snapshot, device, undone=undone)
    timeline = analysis.timeline
    peak = None if timeline is None else int(timeline.allocated_bytes.argmax())
    growing = tuple(
        GrowingLine(location_of(snapshot, g.frame), g.slope_bytes, g.n_steps)
        for g in analysis.growth
    )
    uses, n_merged = line_uses(snapshot, undone.lifetimes, peak, lines)
    asked = np.flatnonzero(columns.action == Action.ALLOC)
    reading = DeviceReading(
        device=device,
        capture=analysis.capture,
        timeline=timeline,
        peak_row=peak,
        n_steps=None if timeline is None else int(analysis.extras["n_steps"]) or None,
        lines=uses,
        n_lines_merged=n_merged,
        growth=growing,
        requests=columns.size[asked],
        request_rows=asked,
        features=_features(snapshot, undone.lifetimes.stack),
        peak_place=_peak_place(snapshot, columns.stack, peak, lines),
        capacity_bytes=analysis.capacity_estimate_bytes,
    )
    return reading, analysis


def _features(snapshot: Snapshot, stack: I32) -> frozenset[str]:
    """Return the library parts that requests went through."""
    used = np.unique(stack[stack >= 0])
    if not len(used):
        return frozenset()
    offsets = snapshot.stacks.offsets
    mark = np.zeros(len(snapshot.stacks.frames) + 1, np.int64)
    np.add.at(mark, offsets[used], 1)
    np.add.at(mark, offsets[used + 1], -1)
    inside = np.cumsum(mark[:-1]) > 0
    names = np.unique(snapshot.frames.filename[np.unique(snapshot.stacks.frames[inside])])
    found = (_FEATURES.search(snapshot.strings[int(i)][-500:]) for i in names if i >= 0)
    return frozenset(m.group(1) or f"optim.{m.group(2)}" for m in found if m is not None)


def _peak_place(snapshot: Snapshot, stack: I32, peak: int | None, lines: I32) -> Location | None:
    """Return the line whose request made the peak."""
    if not peak:
        return None
    at = int(stack[peak - 1])
    return None if at < 0 else location_of(snapshot, int(lines[at]))
