"""The figures of every run side by side, their curves, and the peaks that a gate judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.result import Timeline
from fragdoctor.comparison.reading import DeviceReading, Reading
from fragdoctor.model.comparison import Curve, DevicePeaks, Figure, RunSide
from fragdoctor.model.diagnosis import DeviceFigures
from fragdoctor.model.snapshot import I64

MAX_COLUMNS: Final = 1200

# id, title, unit, attribute of DeviceFigures
_FIGURES: Final = (
    ("peak_allocated", "peak allocated", "bytes", "peak_allocated_bytes"),
    ("peak_active", "peak active", "bytes", "peak_active_bytes"),
    ("peak_reserved", "peak reserved", "bytes", "peak_reserved_bytes"),
    ("allocated", "allocated now", "bytes", "allocated_bytes"),
    ("active", "active now", "bytes", "active_bytes"),
    ("reserved", "reserved now", "bytes", "reserved_bytes"),
    ("pinned_free", "pinned free memory", "bytes", "pinned_free_bytes"),
    ("largest_free_block", "largest free block", "bytes", "largest_free_block_bytes"),
    ("capacity", "capacity", "bytes", "capacity_bytes"),
    ("alloc_retries", "allocation retries", "count", "alloc_retries"),
    ("ooms", "out-of-memory failures", "count", "ooms"),
)

Pairing = tuple[int | None, ...]
"""The device of each run that is compared; None where a run has none."""


def choose_devices(readings: Sequence[Reading]) -> tuple[Pairing, list[str]]:
    """Return which device of each run is compared, and what has to be said about it.

    The device that the last run's verdict is about, if all have it; else one that all have; runs
    of one device each are compared whatever its number.
    """
    held = [[f.device for f in r.diagnosis.devices] for r in readings]
    if not all(held):
        return tuple(h[0] if h else None for h in held), []
    common = [d for d in held[-1] if all(d in h for h in held)]
    if not common:
        chosen = tuple(h[0] for h in held)
        told = ", ".join(f"GPU {d} of {letter(i)}" for i, d in enumerate(chosen))
        return chosen, [f"The runs have no device number in common: {told} are compared."]
    wanted = readings[-1].diagnosis.verdict.device
    first = readings[0].diagnosis.verdict.device
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
    """Return what a run is called: A to Z, then R27, R28, ..."""
    return chr(ord("A") + index) if index < 26 else f"R{index + 1}"


def figures_of(reading: Reading, device: int | None) -> DeviceFigures | None:
    """Return the figures of one device of a run."""
    return next((f for f in reading.diagnosis.devices if f.device == device), None)


def all_figures(readings: Sequence[Reading], chosen: Pairing) -> tuple[Figure, ...]:
    """Return the figures that any run knows, over all runs."""
    rows = [figures_of(r, d) for r, d in zip(readings, chosen, strict=True)]
    found = [
        Figure(name, title, unit, tuple(None if f is None else getattr(f, key) for f in rows))
        for name, title, unit, key in _FIGURES
    ]
    devices = [_device(r, d) for r, d in zip(readings, chosen, strict=True)]
    steps = tuple(None if d is None else d.n_steps for d in devices)
    n_requests = tuple(
        None if d is None or d.timeline is None else len(d.requests) for d in devices
    )
    found.append(Figure("steps", "steps in the trace", "count", steps))
    found.append(Figure("requests", "requests in the trace", "count", n_requests))
    return tuple(f for f in found if any(v is not None for v in f.values))


def device_peaks(readings: Sequence[Reading]) -> tuple[DevicePeaks, ...]:
    """Return the peaks of every device that both the first and the last run have."""
    first, last = readings[0].diagnosis.devices, readings[-1].diagnosis.devices
    old = {f.device: f for f in first}
    if len(first) == len(last) == 1:
        old = {last[0].device: first[0]}
    pairs = [(old[f.device], f) for f in last if f.device in old]
    return tuple(
        DevicePeaks(
            b.device,
            (_peak(a, "allocated"), _peak(b, "allocated")),
            (_peak(a, "active"), _peak(b, "active")),
            (a.ooms, b.ooms),
        )
        for a, b in pairs
    )


def _peak(figures: DeviceFigures, name: str) -> int | None:
    values = (getattr(figures, f"peak_{name}_bytes"), getattr(figures, f"{name}_bytes"))
    return max((v for v in values if v is not None), default=None)


def side(reading: Reading, index: int, device: int | None) -> RunSide:
    """Return one run as reports show it."""
    verdict = reading.diagnosis.verdict
    own = _device(reading, device)
    figures = figures_of(reading, device)
    timeline = None if own is None else own.timeline
    return RunSide(
        letter=letter(index),
        name=reading.name,
        cause=verdict.cause,
        confidence=verdict.confidence,
        summary=verdict.summary,
        device=device,
        devices=tuple(f.device for f in reading.diagnosis.devices),
        torch_version=reading.torch_version,
        conf=reading.conf,
        has_snapshot=bool(reading.devices),
        has_trace=timeline is not None,
        has_stacks=own is not None and own.capture.has_stacks > 0,
        is_cut=own is not None and own.capture.is_truncated,
        n_events=None if figures is None else figures.n_events,
        n_steps=None if own is None else own.n_steps,
        capacity_bytes=None if figures is None else figures.capacity_bytes,
        peak_place=None if own is None else own.peak_place,
        curve=None if timeline is None else curve_of(timeline),
    )


def _device(reading: Reading, device: int | None) -> DeviceReading | None:
    return None if device is None else reading.devices.get(device)


def curve_of(timeline: Timeline) -> Curve:
    """Return the highest state of each column, so that no peak is lost."""
    n = len(timeline.allocated_bytes)
    starts = np.unique(np.linspace(0, n, min(n, MAX_COLUMNS), endpoint=False).astype(np.int64))

    def highest(states: I64) -> tuple[int, ...]:
        return tuple(np.maximum.reduceat(states, starts).tolist())

    return Curve(n - 1, highest(timeline.allocated_bytes), highest(timeline.reserved_bytes))
