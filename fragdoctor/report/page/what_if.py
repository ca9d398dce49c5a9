"""The what-if table: every setting that was tried, against the run as recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis, Recommendation
from fragdoctor.model.simulation import ReplayResult, Simulation
from fragdoctor.report.phrases import METHOD_TITLES


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One row; None is "not computed".

    ``role`` is ``recorded``, ``winner``, ``helps``, ``rejected`` or ``tried``.
    """

    label: str
    role: str
    fits: bool | None
    peak_reserved_bytes: int | None
    margin_bytes: int | None
    retries: int | None
    driver_calls: int | None
    method: str
    note: str = ""
    is_setting: bool = False
    bar_percent: float | None = None


def what_ifs(
    diagnosis: Diagnosis, simulation: Simulation | None, figures: DeviceFigures | None
) -> list[WhatIf]:
    """Return the rows: as recorded, then what helps by rank, then what does not.

    The winner is the highest ranked recommendation that fits, by replay where any was replayed.
    """
    tested = [r for r in diagnosis.recommendations if r.predicted.method != "none"]
    rejected = [r for r in diagnosis.rejected if r.predicted.method != "none"]
    ranked = sorted(tested, key=lambda r: r.rank)
    fitting = [r for r in ranked if r.predicted.fits]
    replayed = [r for r in fitting if r.predicted.method in {"replay", "estimate"}]
    winner = next(iter(replayed or fitting), None)
    rows = [_of_advice(r, "winner" if r is winner else "helps") for r in ranked]
    rows += [_of_advice(r, "rejected") for r in rejected]
    if simulation is not None:
        known = {r.label for r in rows}
        rows += [r for r in map(_of_replay, simulation.results) if r.label not in known]
    if not rows:
        return []
    rows.insert(0, _recorded(simulation, figures))
    capacity = None if figures is None else figures.capacity_bytes
    peaks = [r.peak_reserved_bytes for r in rows if r.peak_reserved_bytes is not None]
    whole = max([*peaks, capacity or 0], default=0)
    return [_with_bar(r, whole) for r in rows]


def _of_advice(advice: Recommendation, role: str) -> WhatIf:
    p = advice.predicted
    return WhatIf(
        label=_label(advice),
        role=role,
        fits=p.fits,
        peak_reserved_bytes=p.peak_reserved_bytes,
        margin_bytes=p.margin_bytes,
        retries=p.retries,
        driver_calls=p.driver_calls,
        method=METHOD_TITLES.get(p.method, p.method),
        is_setting=bool(advice.setting),
    )


def _label(advice: Recommendation) -> str:
    """Return the setting without its variable, or what else is to be done."""
    if not advice.setting:
        return advice.title
    name, is_assigned, value = advice.setting.partition("=")
    return value or ("default settings" if is_assigned else name)


def _of_replay(result: ReplayResult) -> WhatIf:
    return WhatIf(
        label=", ".join(t for t in (result.conf, result.edit) if t) or "default settings",
        role="tried",
        fits=result.fits,
        peak_reserved_bytes=result.peak_reserved_bytes,
        margin_bytes=result.margin_bytes,
        retries=result.retries,
        driver_calls=result.driver_calls,
        method=METHOD_TITLES["replay"],
        note=result.note,
        is_setting=bool(result.conf),
    )


def _recorded(simulation: Simulation | None, figures: DeviceFigures | None) -> WhatIf:
    if figures is None:
        figures = DeviceFigures(device=0)
    ooms, peak, capacity = figures.ooms, figures.peak_reserved_bytes, figures.capacity_bytes
    return WhatIf(
        label="as recorded",
        role="recorded",
        fits=None if ooms is None else ooms == 0,
        peak_reserved_bytes=peak,
        margin_bytes=None if capacity is None or peak is None else capacity - peak,
        retries=figures.alloc_retries,
        driver_calls=None if simulation is None else simulation.baseline.driver_calls,
        method="recorded",
    )


def _with_bar(row: WhatIf, whole: int) -> WhatIf:
    if row.peak_reserved_bytes is None or whole <= 0:
        return row
    return replace(row, bar_percent=100 * row.peak_reserved_bytes / whole)
