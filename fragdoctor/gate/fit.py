"""Would the recorded run fit on another device: answered by replaying its trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.errors import SimulationError
from fragdoctor.model.case import Case
from fragdoctor.model.simulation import Simulation
from fragdoctor.model.snapshot import Action, Snapshot
from fragdoctor.trace.simulate import simulate
from fragdoctor.units import format_count, format_size


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one device.

    Attributes:
        fits: None where it cannot be answered; ``text`` says why.
        needed_bytes: peak reserved memory of the replay, or at least what was live where it failed.
        text: one sentence with both numbers.
    """

    device: int
    fits: bool | None
    needed_bytes: int | None
    text: str


def fits_on(case: Case, capacity_bytes: int) -> tuple[Fit, ...]:
    """Return for each device with a trace whether its run fits into ``capacity_bytes``.

    The recorded settings are kept. The size is what PyTorch could have: the device less the
    context and other processes.
    """
    snapshot = case.snapshot
    if snapshot is None:
        return (Fit(0, None, None, "only the trace of a snapshot can be replayed"),)
    devices = _devices_with_requests(snapshot)
    if case.overrides.device is not None:
        devices = [d for d in devices if d == case.overrides.device]
    if not devices:
        device = case.overrides.device or 0
        return (Fit(device, None, None, "the snapshot holds no trace that could be replayed"),)
    return tuple(_fit(case, snapshot, d, capacity_bytes, len(devices) == 1) for d in devices)


def _devices_with_requests(snapshot: Snapshot) -> list[int]:
    events = snapshot.events
    return [
        d for d in snapshot.devices if np.any(events.action[events.device_slice(d)] == Action.ALLOC)
    ]


def _fit(case: Case, snapshot: Snapshot, device: int, capacity_bytes: int, is_only: bool) -> Fit:
    try:
        simulation = simulate(
            snapshot,
            device=device,
            capacity_bytes=capacity_bytes,
            memory_fraction=case.overrides.memory_fraction,
            torch_version=case.overrides.torch_version,
        )
    except SimulationError as e:
        return Fit(device, None, None, f"it cannot be replayed: {e.message}")
    where = "" if is_only else f" on GPU {device}"
    return _answer(simulation, capacity_bytes, where)


def _answer(simulation: Simulation, capacity_bytes: int, where: str) -> Fit:
    result = simulation.results[0]
    how = "by replay" if simulation.method == "replay" else "estimated by replay"
    size = format_size(capacity_bytes)
    if result.fits:
        text = f"it fits on {size}: peak reserved {format_size(result.peak_reserved_bytes)}"
    elif simulation.lower_bound_bytes > capacity_bytes:
        bound = format_size(simulation.lower_bound_bytes)
        text = f"it does not fit on {size}: {bound} are active at the peak"
    else:
        asked = "a request" if result.oom_bytes is None else f"{format_size(result.oom_bytes)}"
        row = "" if result.oom_event is None else f" at event {format_count(result.oom_event)}"
        peak = format_size(result.peak_reserved_bytes)
        text = f"it does not fit on {size}: {asked} is refused{row} with {peak} reserved"
    needed = max(result.peak_reserved_bytes, simulation.lower_bound_bytes)
    return Fit(simulation.device, result.fits, needed, f"{text}{where} ({how})")
