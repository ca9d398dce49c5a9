"""Budgets: limits that a team sets, compared with what one case measured."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from fragdoctor.errors import SimulationError
from fragdoctor.future.simulator import simulate
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis
from fragdoctor.model.finding import Finding, Location, Severity
from fragdoctor.model.snapshot import Action, Snapshot
from fragdoctor.units import Amount, format_count, format_size, plural


class Measures(Struct, frozen=True):
    """Figures of one device; None means "this input does not say".

    Attributes:
        peak_bytes: highest memory in use that the input knows.
        peak_kind: what was counted: ``active`` (tensors, and frees that wait for other streams)
            or ``allocated`` (tensors).
        reserved_bytes: highest reserved memory: reported, never judged.
        is_only: no other device has memory, so sentences need not name this one.
    """

    device: int
    peak_bytes: int | None = None
    peak_kind: str = "active"
    stranded_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None
    capacity_bytes: int | None = None
    reserved_bytes: int | None = None
    is_only: bool = True

    @property
    def has_any(self) -> bool:
        """Whether anything is known."""
        known = (self.peak_bytes, self.stranded_bytes, self.retries, self.ooms, self.reserved_bytes)
        return any(value is not None for value in known)

    @property
    def where(self) -> str:
        """The device as the end of what is said of it; "" where it is the only one."""
        return "" if self.is_only else f" on GPU {self.device}"


def measured(diagnosis: Diagnosis) -> tuple[Measures, ...]:
    """Return the figures of each device that has memory, or of at least one if there are any."""
    figures = [d for d in diagnosis.devices if d.reserved_bytes or d.peak_reserved_bytes]
    figures = figures or [d for d in diagnosis.devices if d.reserved_bytes is not None]
    figures = figures or list(diagnosis.devices)
    return tuple(_measure(d, is_only=len(figures) == 1) for d in figures)


def _measure(d: DeviceFigures, *, is_only: bool) -> Measures:
    active, allocated = d.highest("active"), d.highest("allocated")
    is_active = active is not None and (allocated is None or active >= allocated)
    return Measures(
        device=d.device,
        peak_bytes=active if is_active else allocated,
        peak_kind="active" if is_active else "allocated",
        stranded_bytes=d.stranded_free_bytes,
        retries=d.alloc_retries,
        ooms=d.ooms,
        capacity_bytes=d.capacity_bytes,
        reserved_bytes=d.highest("reserved"),
        is_only=is_only,
    )


class Outcome(StrEnum):
    """The result of a budget. SKIP: this input cannot say."""

    KEPT = "kept"
    EXCEEDED = "exceeded"
    SKIP = "skip"


class BudgetResult(Struct, frozen=True):
    """One budget compared with one case.

    Attributes:
        budget: the option's name, for example ``max-peak``.
        text: one sentence with both numbers, or the reason why it cannot be judged.
        device: the device that decided, or None if the budget is not about a device.
        measured, limit: the two numbers (bytes or counts), or None if it was skipped.
    """

    budget: str
    outcome: Outcome
    text: str
    device: int | None = None
    measured: int | None = None
    limit: int | None = None


def fits_on(case: Case, capacity_bytes: int) -> list[BudgetResult]:
    """Return for each device with a trace whether its run fits into ``capacity_bytes``.

    The recorded settings are kept. The size is what PyTorch could have: the device without the
    context and other processes.
    """
    snapshot = case.snapshot
    if snapshot is None:
        return [_skip(_FITS_ON, "only the trace of a snapshot can be replayed")]
    events = snapshot.events
    devices = [
        d for d in snapshot.devices if np.any(events.action[events.device_slice(d)] == Action.ALLOC)
    ]
    if case.overrides.device is not None:
        devices = [d for d in devices if d == case.overrides.device]
    if not devices:
        device = case.overrides.device or 0
        return [_skip(_FITS_ON, "the snapshot holds no trace that could be replayed", device)]
    return [_fit_of(case, snapshot, d, capacity_bytes, len(devices) == 1) for d in devices]


def _fit_of(
    case: Case, snapshot: Snapshot, device: int, capacity_bytes: int, is_only: bool
) -> BudgetResult:
    try:
        simulation = simulate(
            snapshot,
            device=device,
            capacity_bytes=capacity_bytes,
            memory_fraction=case.overrides.memory_fraction,
            torch_version=case.overrides.torch_version,
        )
    except SimulationError as e:
        return _skip(_FITS_ON, f"it cannot be replayed: {e.message}", device)
    result = simulation.results[0]
    how = "by replay" if simulation.method == "replay" else "estimated by replay"
    size = format_size(capacity_bytes)
    if result.fits:
        text = f"it fits on {size}: peak reserved {format_size(result.peak_reserved_bytes)}"
    elif simulation.lower_bound_bytes > capacity_bytes:
        bound = format_size(simulation.lower_bound_bytes)
        text = f"it does not fit on {size}: {bound} is active at the peak"
    else:
        asked = "a request" if result.oom_bytes is None else format_size(result.oom_bytes)
        row = "" if result.oom_event is None else f" at event {format_count(result.oom_event)}"
        peak = format_size(result.peak_reserved_bytes)
        text = f"it does not fit on {size}: {asked} is refused{row} with {peak} reserved"
    needed = max(result.peak_reserved_bytes, simulation.lower_bound_bytes)
    outcome = Outcome.KEPT if result.fits else Outcome.EXCEEDED
    text += f" ({how})" if is_only else f" on GPU {device} ({how})"
    return BudgetResult(_FITS_ON, outcome, text, device, needed, capacity_bytes)


_FITS_ON: Final = "fits-on"

RESERVED_NOTE: Final = (
    "Budgets gate on allocated, active and stranded memory. Reserved memory is reported but not "
    "judged: how much the allocator keeps cached varies from run to run."
)

GROWTH_CODES: Final = frozenset({"FD401", "FD402"})
"""Rules that say that memory grows and does not come back."""


class Budgets(Struct, frozen=True):
    """Limits on one case; None or False means "no limit".

    Attributes:
        max_peak: highest active memory over the recording; a share is relative to the capacity.
        max_stranded: free memory that live blocks keep from being returned; a share is relative to
            reserved memory.
        max_retries: allocations that had to flush the cache first.
        min_headroom: capacity minus peak active memory; a share is relative to the capacity.
        fits_on: bytes that PyTorch could have on the device to fit on; answered by replay.
        no_growth: no line may grow step by step.
    """

    max_peak: Amount | None = None
    max_stranded: Amount | None = None
    max_retries: int | None = None
    min_headroom: Amount | None = None
    fits_on: int | None = None
    no_growth: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Options of the limits that are set, spelled as on the command line."""
        return tuple(
            name.replace("_", "-")
            for name in self.__struct_fields__
            if getattr(self, name) is not None and getattr(self, name) is not False
        )


class Reason(Struct, frozen=True):
    """Why a file fails.

    Attributes:
        code: the option of the budget (``max-peak``), the rule (``FD101``), or ``verdict``.
        text: one sentence with its numbers; hostile text.
        locations: the user's lines, innermost first; empty if none is known.
        fingerprint: stable name without addresses.
    """

    code: str
    text: str
    severity: Severity = Severity.ERROR
    device: int | None = None
    locations: Sequence[Location] = ()
    fingerprint: str = ""

    @classmethod
    def of(cls, finding: Finding, text: str = "") -> Reason:
        """Return a finding as the reason, in its own words if no others are given."""
        return cls(
            code=finding.code,
            text=text or finding.message,
            severity=finding.severity,
            device=finding.device,
            locations=finding.locations,
            fingerprint=finding.fingerprint,
        )


def check_budgets(
    diagnosis: Diagnosis, budgets: Budgets, fits: Sequence[BudgetResult]
) -> tuple[BudgetResult, ...]:
    """Return one result for each budget that is set, in the order of the options.

    ``fits`` are the replay's answers for ``fits_on``, one per device.
    """
    devices = measured(diagnosis)
    results: list[BudgetResult] = []
    for budget in ("max-peak", "max-stranded", "max-retries", "min-headroom"):
        limit = getattr(budgets, budget.replace("-", "_"))
        if limit is not None:
            results.append(_worst([_judged(budget, m, limit) for m in devices], budget))
    if budgets.fits_on is not None:
        results.append(_worst(fits, _FITS_ON))
    if budgets.no_growth:
        results.append(_growth(diagnosis))
    return tuple(results)


def _worst(results: Sequence[BudgetResult], budget: str) -> BudgetResult:
    """Return the result of the device that decides: exceeded, else kept, else skipped."""
    for outcome in (Outcome.EXCEEDED, Outcome.KEPT, Outcome.SKIP):
        found = [r for r in results if r.outcome is outcome]
        if found:
            return max(found, key=lambda r: (r.measured or 0) - (r.limit or 0))
    return BudgetResult(budget, Outcome.SKIP, "the input says nothing about a device's memory")


class _Figure(NamedTuple):
    """What a budget limits on one device.

    Attributes:
        value: the figure, or None; ``unsaid`` then says why it is unknown.
        said: the figure in a sentence.
        whole: what a percentage is of, and ``whole_name``; ``unknown`` says what its lack means.
    """

    value: int | None
    unsaid: str
    said: str
    whole: int | None = None
    whole_name: str = ""
    unknown: str = ""


def _figure(budget: str, m: Measures) -> _Figure:
    peak, size = f"peak {m.peak_kind} memory", format_size(m.peak_bytes or 0)
    capacity, unsaid = m.capacity_bytes, "the input does not say how much memory was live"
    no_capacity = "the capacity is unknown: give --capacity"
    if budget == "max-peak":
        said = f"{peak} is {size}"
        return _Figure(m.peak_bytes, unsaid, said, capacity, "the capacity", no_capacity)
    if budget == "max-stranded":
        said = f"live blocks strand {format_size(m.stranded_bytes or 0)} of free memory"
        unsaid = "only a snapshot or statistics say what is stranded"
        unknown = "the reserved memory is unknown, and so is a percentage of it"
        return _Figure(m.stranded_bytes, unsaid, said, m.reserved_bytes, "reserved memory", unknown)
    if budget == "max-retries":
        said = f"{plural(m.retries or 0, 'allocation')} had to flush the cache"
        return _Figure(m.retries, "only a trace or statistics count retries", said)
    if capacity is None or m.peak_bytes is None:
        return _Figure(None, no_capacity if capacity is None else unsaid, "")
    room = capacity - m.peak_bytes
    said = f"{peak} of {size} leaves {format_size(room)} of {format_size(capacity)}"
    return _Figure(room, unsaid, said, capacity, "the capacity", no_capacity)


def _judged(budget: str, m: Measures, limit: Amount | int) -> BudgetResult:
    """Return whether a device keeps a limit: the least of headroom, the most of everything else."""
    figure = _figure(budget, m)
    if figure.value is None:
        return _skip(budget, figure.unsaid, m.device)
    if isinstance(limit, int):
        bound, limited = limit, format_count(limit)
    elif (of_whole := limit.of(figure.whole)) is None:
        return _skip(budget, figure.unknown, m.device)
    else:
        bound, limited = of_whole, format_size(of_whole)
        limited += "" if limit.share is None else f" ({limit} of {figure.whole_name})"
    is_least = budget == "min-headroom"
    is_exceeded = figure.value < bound if is_least else figure.value > bound
    relations = ("at least", "less than") if is_least else ("within", "more than")
    text = f"{figure.said}{m.where}, {relations[is_exceeded]} {limited}"
    outcome = Outcome.EXCEEDED if is_exceeded else Outcome.KEPT
    return BudgetResult(budget, outcome, text, m.device, figure.value, bound)


def _growth(diagnosis: Diagnosis) -> BudgetResult:
    found = [
        f for f in diagnosis.findings if f.code in GROWTH_CODES and f.severity >= Severity.WARNING
    ]
    if found:
        worst = max(found, key=lambda f: f.n_bytes)
        text = f"memory grows: {worst.message}"
        return BudgetResult("no-growth", Outcome.EXCEEDED, text, worst.device, worst.n_bytes, 0)
    skipped = {s.code: s.reason for s in diagnosis.skipped if s.code in GROWTH_CODES}
    if skipped.keys() >= GROWTH_CODES:
        reason = skipped[min(skipped)]
        return BudgetResult("no-growth", Outcome.SKIP, f"growth cannot be seen: {reason}")
    return BudgetResult("no-growth", Outcome.KEPT, "no line grows step by step", None, 0, 0)


def _skip(budget: str, reason: str, device: int = 0) -> BudgetResult:
    return BudgetResult(budget, Outcome.SKIP, reason, device)
