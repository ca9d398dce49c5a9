"""One replay: the requests of a trace, served by the allocator model under given conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fragdoctor._native import _ext
from fragdoctor.model.settings import AllocatorSettings, Era, parse_version
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.trace.allocator import native_config
from fragdoctor.units import MIB

PAGE_BYTES = 2 * MIB  # the driver's granularity


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a trace is replayed under.

    Attributes:
        settings: of the allocator.
        era: how free blocks of equal size are ordered.
        capacity_bytes: what PyTorch could have of the device; None = unlimited.
        allowed_bytes: what a memory fraction allows of it; None = no fraction set.
        device_total_bytes: base of the reservations of expandable segments; None = the capacity.
        memory_fraction: the fraction itself, where it is known; for people.
        torch_version: version asked for, "" for the recording's own.
    """

    settings: AllocatorSettings
    era: Era
    capacity_bytes: int | None = None
    allowed_bytes: int | None = None
    device_total_bytes: int | None = None
    memory_fraction: float | None = None
    torch_version: str = ""

    def with_less(self, share: float) -> Conditions:
        """Return the same with a share less memory."""
        capacity, allowed = (
            None if limit is None else int(limit * (1 - share))
            for limit in (self.capacity_bytes, self.allowed_bytes)
        )
        return replace(self, capacity_bytes=capacity, allowed_bytes=allowed)

    def native(self) -> _ext.AllocatorConfig:
        """Return them as the native model takes them.

        Raises:
            SimulationError: the settings choose another allocator than the native one.
        """
        total = self.device_total_bytes or self.capacity_bytes or 0
        config = native_config(
            self.settings,
            era=self.era,
            capacity_bytes=self.capacity_bytes,
            device_total_bytes=total or None,
        )
        config.memory_fraction = -1.0
        if self.allowed_bytes is not None:
            # The model takes allowed = floor(fraction * total): make that come out exactly.
            total = max(total, self.allowed_bytes, 1)
            config.device_total_bytes = total
            config.memory_fraction = min((self.allowed_bytes + 0.5) / total, 1.0)
            config.fraction_of_one_counts = True
        return config


def allowed_by(fraction: float, total_bytes: int, torch_version: str) -> int | None:
    """Return floor(fraction x total), or None where that fraction counts as not set.

    From 2.10 on a fraction of 1.0 switches the limit off; before, it limits to the whole device
    (and makes garbage collection work).
    """
    if fraction >= 1.0 and (not torch_version or parse_version(torch_version) >= (2, 10, 0)):
        return None
    return int(fraction * total_bytes)


def result_of(
    raw: Mapping[str, Any], conditions: Conditions, *, edit: str = "", note: str = ""
) -> ReplayResult:
    """Return what the native replay said as a result.

    ``capacity_bytes`` of the result is what the run could have: the lesser of the capacity and
    what the memory fraction allows.
    """
    if raw["is_cut_short"]:
        stop = "stopped early: it flushes more often than a genuine run does"
        note = f"{note}; {stop}" if note else stop
    limits = [b for b in (conditions.capacity_bytes, conditions.allowed_bytes) if b is not None]
    return ReplayResult(
        conf=conditions.settings.conf,
        capacity_bytes=min(limits, default=None),
        fits=raw["fits"] and not raw["is_cut_short"],
        oom_event=raw["oom_event"],
        peak_reserved_bytes=raw["peak_reserved_bytes"],
        peak_allocated_bytes=raw["peak_allocated_bytes"],
        final_reserved_bytes=raw["final_reserved_bytes"],
        retries=raw["retries"],
        ooms=raw["ooms"],
        driver_calls=raw["driver_calls"],
        edit=edit,
        peak_active_bytes=raw["peak_active_bytes"],
        oom_bytes=raw["oom_bytes"],
        n_replayed=raw["n_replayed"],
        memory_fraction=conditions.memory_fraction,
        torch_version=conditions.torch_version,
        note=note,
    )
