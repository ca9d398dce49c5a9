"""What a gate measures of a case: one row of figures for each device."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one device; None is "this input does not say".

    Attributes:
        peak_bytes: highest memory in use that the input knows.
        peak_kind: what was counted: ``active`` (tensors, and frees that wait for other streams)
            or ``allocated`` (tensors).
        reserved_bytes: highest reserved memory: reported, never judged.
        is_only: no other device has memory, so that a sentence need not name it.
    """

    device: int
    peak_bytes: int | None = None
    peak_kind: str = "active"
    pinned_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None
    capacity_bytes: int | None = None
    reserved_bytes: int | None = None
    is_only: bool = True


def measured(diagnosis: Diagnosis) -> tuple[Measures, ...]:
    """Return the figures of each device that has any memory; of one at least if there is any."""
    figures = [d for d in diagnosis.devices if d.reserved_bytes or d.peak_reserved_bytes]
    figures = figures or [d for d in diagnosis.devices if d.reserved_bytes is not None]
    figures = figures or list(diagnosis.devices)
    return tuple(_measure(d, is_only=len(figures) == 1) for d in figures)


def _measure(d: DeviceFigures, *, is_only: bool) -> Measures:
    active = _highest(d.peak_active_bytes, d.active_bytes)
    allocated = _highest(d.peak_allocated_bytes, d.allocated_bytes)
    peak = _highest(active, allocated)
    return Measures(
        device=d.device,
        peak_bytes=peak,
        peak_kind="active" if active is not None and active == peak else "allocated",
        pinned_bytes=d.pinned_free_bytes,
        retries=d.alloc_retries,
        ooms=d.ooms,
        capacity_bytes=d.capacity_bytes,
        reserved_bytes=_highest(d.peak_reserved_bytes, d.reserved_bytes),
        is_only=is_only,
    )


def _highest(*values: int | None) -> int | None:
    return max((v for v in values if v is not None), default=None)
