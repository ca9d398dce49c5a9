"""One run, ready to be compared: its diagnosis, its steps, the memory of every line, figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.analysis.device import analyze_trace
from fragdoctor.analysis.result import CaptureQuality, DeviceAnalysis
from fragdoctor.comparison.lines import LineUse, line_uses
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.comparison import ComparedFigure, DevicePeaks, RunSide
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Location
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, I64, Action, Snapshot
from fragdoctor.trace.lives import Totals
from fragdoctor.trace.trace import Trace, traces_of

_FEATURES: Final = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\](checkpoint)|optim[/\\]((?!optimizer|lr_scheduler|__)\w+))\.py$"
)


class ComparedDevice(Struct, frozen=True, eq=False):
    """One device of one run.

    Attributes:
        peak_allocated_bytes: the highest in the trace; None without a trace.
        totals: totals of the trace, for only the first and the last run of a series.
        n_lines_merged: number of the smallest lines, which are merged into one in ``lines``.
        growth: lines that keep memory step by step, with the bytes that each keeps per step.
        requests: ``int64``, requested sizes in the order of the trace, without failed requests.
        request_rows: ``int64``, the event row (within the device) of each request.
        features: library parts that the requests went through: ``checkpoint``, optimizers.
        capacity_bytes: what PyTorch could have, if a failed request shows it.
    """

    device: int
    capture: CaptureQuality
    peak_allocated_bytes: int | None
    totals: Totals | None
    n_steps: int | None
    lines: tuple[LineUse, ...]
    n_lines_merged: int
    growth: Mapping[Location, int]
    requests: I64
    request_rows: I64
    features: frozenset[str]
    capacity_bytes: int | None


class ComparedRun(Struct, frozen=True, eq=False):
    """One run: its diagnosis, and its devices if it has a snapshot.

    The diagnosis is kept without the snapshot, so that a long series fits in memory; ``analyses``
    of its devices are kept for the first run, and for the last one if a page shows both.
    """

    name: str
    diagnosis: Diagnosis
    devices: dict[int, ComparedDevice]
    settings: AllocatorSettings | None
    torch_version: str
    analyses: Mapping[int, DeviceAnalysis] = field(default_factory=dict)


def read_run(case: Case, name: str) -> ComparedRun:
    """Return the data of one run."""
    snapshot = case.snapshot
    devices: dict[int, ComparedDevice] = {}
    analyses: dict[int, DeviceAnalysis] = {}
    if snapshot is not None:
        wanted = case.overrides.device
        for trace in traces_of(snapshot):
            if wanted in (None, trace.device):
                devices[trace.device], analyses[trace.device] = read_device(trace)
    diagnosis = diagnose(case, analyses=analyses)
    settings = None if snapshot is None else snapshot.settings
    return ComparedRun(
        name=name,
        diagnosis=replace(diagnosis, case=replace(case, snapshot=None), analyses={}),
        devices=devices,
        settings=settings if settings is not None and settings.is_recorded else None,
        torch_version=_version(case),
        analyses=analyses,
    )


def _version(case: Case) -> str:
    """Return the PyTorch versions that fit the inputs: ``2.12``, ``2.4 to 2.6``, or ""."""
    low, high = case.torch_versions(case.primary_message)
    if not low or low == high:
        return low or high
    return f"{low} to {high}" if high else f"{low} or newer"


def read_device(trace: Trace) -> tuple[ComparedDevice, DeviceAnalysis]:
    """Return the data of one device of a snapshot, and its analysis for the diagnosis."""
    analysis = analyze_trace(trace)
    snapshot, totals = trace.snapshot, analysis.timeline
    peak = None if totals is None else totals.peak_allocated_state
    growing = {
        place: g.slope_bytes
        for g in analysis.growth
        if (place := snapshot.location(g.frame)) is not None
    }
    uses, n_merged = line_uses(trace, peak)
    asked = np.flatnonzero(trace.events.action == Action.ALLOC)
    compared = ComparedDevice(
        device=trace.device,
        capture=analysis.capture,
        peak_allocated_bytes=None if totals is None else totals.peak_allocated_bytes,
        totals=totals,
        n_steps=None if totals is None else analysis.n_steps or None,
        lines=uses,
        n_lines_merged=n_merged,
        growth=growing,
        requests=trace.events.size_bytes[asked],
        request_rows=asked,
        features=_features(snapshot, trace.lives.stack),
        capacity_bytes=analysis.capacity_estimate_bytes,
    )
    return compared, analysis


def _features(snapshot: Snapshot, stack: I32) -> frozenset[str]:
    """Return the library parts that the requests went through."""
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


# ID, title, unit, attribute of DeviceFigures
_FIGURES: Final = (
    ("peak_allocated", "peak allocated", "bytes", "peak_allocated_bytes"),
    ("peak_active", "peak active", "bytes", "peak_active_bytes"),
    ("peak_reserved", "peak reserved", "bytes", "peak_reserved_bytes"),
    ("allocated", "allocated now", "bytes", "allocated_bytes"),
    ("active", "active now", "bytes", "active_bytes"),
    ("reserved", "reserved now", "bytes", "reserved_bytes"),
    ("stranded_free", "stranded now", "bytes", "stranded_free_bytes"),
    ("largest_free_block", "largest free block", "bytes", "largest_free_block_bytes"),
    ("capacity", "capacity", "bytes", "capacity_bytes"),
    ("alloc_retries", "allocation retries", "count", "alloc_retries"),
    ("ooms", "out-of-memory failures", "count", "ooms"),
)

Pairing = tuple[int | None, ...]
"""The compared device of each run, or None for a run that has none."""


def choose_devices(compared: Sequence[ComparedRun]) -> tuple[Pairing, list[str]]:
    """Return which device of each run is compared, and notes about the choice.

    It is the device that the last run's verdict is about if all runs have it, else one that all
    have; runs with one device each are compared whatever its number.
    """
    held = [[f.device for f in r.diagnosis.devices] for r in compared]
    if not all(held):
        return tuple(h[0] if h else None for h in held), []
    common = [d for d in held[-1] if all(d in h for h in held)]
    if not common:
        chosen = tuple(h[0] for h in held)
        given = ", ".join(f"GPU {d} of {letter(i)}" for i, d in enumerate(chosen))
        return chosen, [f"The runs have no device number in common: {given} are compared."]
    wanted = compared[-1].diagnosis.verdict.device
    first = compared[0].diagnosis.verdict.device
    best = next((d for d in (wanted, first) if d in common), common[0])
    notes = []
    for i, devices in enumerate(held):
        alone = sorted(set(devices) - set(common))
        if alone:
            names = ", ".join(str(d) for d in alone)
            notes.append(f"GPU {names}: in {letter(i)}, not in all runs.")
    if len(common) > 1:
        others = ", ".join(str(d) for d in sorted(common) if d != best)
        notes.append(f"Lines are those of GPU {best}; look at GPU {others} with --device.")
    return tuple(best for _ in held), notes


def letter(index: int) -> str:
    """Return the name of a run: A to Z, then R27, R28, ..."""
    return chr(ord("A") + index) if index < 26 else f"R{index + 1}"


def all_figures(compared: Sequence[ComparedRun], chosen: Pairing) -> tuple[ComparedFigure, ...]:
    """Return the figures that any run knows, over all runs."""
    rows = [r.diagnosis.figures_of(d) for r, d in zip(compared, chosen, strict=True)]
    found = [
        ComparedFigure(
            name, title, unit, tuple(None if f is None else getattr(f, key) for f in rows)
        )
        for name, title, unit, key in _FIGURES
    ]
    devices = [device_of(r, d) for r, d in zip(compared, chosen, strict=True)]
    steps = tuple(None if d is None else d.n_steps for d in devices)
    n_requests = tuple(
        None if d is None or d.peak_allocated_bytes is None else len(d.requests) for d in devices
    )
    found.append(ComparedFigure("steps", "steps in the trace", "count", steps))
    found.append(ComparedFigure("requests", "requests in the trace", "count", n_requests))
    return tuple(f for f in found if any(v is not None for v in f.values))


def device_peaks(compared: Sequence[ComparedRun]) -> tuple[DevicePeaks, ...]:
    """Return the peaks of every device that both the first and the last run have."""
    first, last = compared[0].diagnosis.devices, compared[-1].diagnosis.devices
    old = {f.device: f for f in first}
    if len(first) == len(last) == 1:
        old = {last[0].device: first[0]}
    found = []
    for a, b in ((old[f.device], f) for f in last if f.device in old):
        allocated, active = ((a.highest(kind), b.highest(kind)) for kind in ("allocated", "active"))
        peaks = DevicePeaks(b.device, allocated, active, (a.ooms, b.ooms))
        if a.ooms != b.ooms:
            devices = compared[0].devices.get(a.device), compared[-1].devices.get(b.device)
            peaks = _over_common_requests(peaks, *devices)
        found.append(peaks)
    return tuple(found)


def _over_common_requests(
    peaks: DevicePeaks, first: ComparedDevice | None, last: ComparedDevice | None
) -> DevicePeaks:
    """Return the peaks over as many requests as both runs made, if they are known.

    A run that failed is shorter than one that did not: what the other did later is not growth.
    """
    runs = [(run.totals, run.request_rows) for run in (first, last) if run and run.totals]
    n = min(len(rows) for _, rows in runs) if len(runs) == 2 else 0
    if not n:
        return peaks
    # Memory is highest right after a request.
    states = (totals.at(np.append(0, rows[:n] + 1)) for totals, rows in runs)
    allocated, active, _ = zip(*(s.max(axis=0).tolist() for s in states), strict=True)
    return replace(peaks, allocated_bytes=allocated, active_bytes=active, n_common_requests=n)


def side(run: ComparedRun, index: int, device: int | None) -> RunSide:
    """Return one run in the form that reports show."""
    own = device_of(run, device)
    figures = run.diagnosis.figures_of(device)
    return RunSide(
        letter=letter(index),
        name=run.name,
        verdict=run.diagnosis.verdict,
        device=device,
        devices=tuple(f.device for f in run.diagnosis.devices),
        torch_version=run.torch_version,
        conf=None if run.settings is None else run.settings.conf,
        has_snapshot=bool(run.devices),
        has_trace=own is not None and own.peak_allocated_bytes is not None,
        has_stacks=own is not None and own.capture.has_stacks > 0,
        is_cut=own is not None and own.capture.is_truncated,
        n_events=None if figures is None else figures.n_events,
        n_steps=None if own is None else own.n_steps,
        capacity_bytes=None if figures is None else figures.capacity_bytes,
        moment=None if figures is None else figures.moment,
    )


def device_of(run: ComparedRun, device: int | None) -> ComparedDevice | None:
    """Return a device of a run, or None if the run has no data of it."""
    return None if device is None else run.devices.get(device)
