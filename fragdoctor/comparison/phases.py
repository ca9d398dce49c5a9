"""The phases of training and the categories of memory at the peak, before and after."""

from __future__ import annotations

from fragdoctor.comparison.reading import Reading
from fragdoctor.model.comparison import PhaseChange
from fragdoctor.model.phases import Category, Phase, PhaseReport

_PHASES = (Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def phase_changes(
    before: Reading, after: Reading, devices: tuple[int | None, int | None]
) -> tuple[PhaseChange, ...]:
    """Return the peak of each phase, then each category at the peak; empty where a run has none."""
    old, new = _report(before, devices[0]), _report(after, devices[1])
    if old is None or new is None:
        return ()
    a, b = _peaks(old), _peaks(new)
    rows = [PhaseChange(f"{p.value} (peak)", a.get(p), b.get(p)) for p in _PHASES if p in a | b]
    held_a, held_b = _held(old), _held(new)
    rows += [
        PhaseChange(f"at the peak: {c.value.replace('_', ' ')}", held_a.get(c, 0), held_b.get(c, 0))
        for c in Category
        if held_a.get(c) or held_b.get(c)
    ]
    return tuple(rows)


def _report(reading: Reading, device: int | None) -> PhaseReport | None:
    """Return the phases of a device, None where no training step shows."""
    found = (p for p in reading.diagnosis.phases if p.device == device and p.phases)
    return next(found, None)


def _peaks(report: PhaseReport) -> dict[Phase, int]:
    return {p.phase: p.worst_peak_bytes for p in report.phases}


def _held(report: PhaseReport) -> dict[Category, int]:
    return {s.category: s.n_bytes for s in report.at_peak}
