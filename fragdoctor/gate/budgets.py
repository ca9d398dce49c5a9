"""Budgets: limits that a team sets, held against what one case measured.

They gate on memory that tensors occupy (allocated, active) and on free memory that live blocks pin.
Reserved memory is reported but never judged: how much the allocator keeps cached depends on the
order of requests, on the settings and on what else runs, and it comes back on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from fragdoctor.gate.amount import Amount
from fragdoctor.gate.fit import Fit
from fragdoctor.gate.measures import Measures, measured
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Finding, Severity
from fragdoctor.units import format_count, format_size

RESERVED_NOTE: Final = (
    "Budgets gate on allocated, active and pinned memory. Reserved memory is reported but not "
    "judged: what the allocator keeps cached is noise from run to run."
)

GROWTH_CODES: Final = frozenset({"FD401", "FD402"})
"""Rules that say that memory grows and does not come back."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits on one case; None or False is "no limit".

    Attributes:
        max_peak: highest active memory over the recording; a share is of the capacity.
        max_pinned: free memory that live blocks keep from being returned; a share is of reserved.
        max_retries: allocations that had to flush the cache first.
        min_headroom: capacity less peak active memory; a share is of the capacity.
        fits_on: bytes that PyTorch could have on the device to fit on; answered by replay.
        no_growth: no line may grow step by step.
    """

    max_peak: Amount | None = None
    max_pinned: Amount | None = None
    max_retries: int | None = None
    min_headroom: Amount | None = None
    fits_on: int | None = None
    no_growth: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Options of the limits that are set, as the command line spells them."""
        return tuple(
            f.name.replace("_", "-")
            for f in fields(self)
            if getattr(self, f.name) is not None and getattr(self, f.name) is not False
        )


class Outcome(StrEnum):
    """How a budget came out. SKIP: this input cannot say."""

    KEPT = "kept"
    EXCEEDED = "exceeded"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """One budget held against one case.

    Attributes:
        budget: the option's name, for example ``max-peak``.
        text: one sentence with both numbers, or the reason why it cannot be judged.
        device: the device that decided, None where it is not about one.
        measured, limit: the two numbers (bytes, or counts); None where it was skipped.
    """

    budget: str
    outcome: Outcome
    text: str
    device: int | None = None
    measured: int | None = None
    limit: int | None = None


def check_budgets(
    diagnosis: Diagnosis, budgets: Budgets, fits: Sequence[Fit] = ()
) -> tuple[BudgetResult, ...]:
    """Return one result for each budget that is set, in the order of the options.

    Args:
        diagnosis: of one case.
        budgets: the limits.
        fits: answers of the replay for ``fits_on``, one a device.
    """
    results: list[BudgetResult] = []
    devices = measured(diagnosis)
    if budgets.max_peak is not None:
        results.append(_worst([_peak(m, budgets.max_peak) for m in devices], "max-peak"))
    if budgets.max_pinned is not None:
        results.append(_worst([_pinned(m, budgets.max_pinned) for m in devices], "max-pinned"))
    if budgets.max_retries is not None:
        results.append(_worst([_retries(m, budgets.max_retries) for m in devices], "max-retries"))
    if budgets.min_headroom is not None:
        results.append(
            _worst([_headroom(m, budgets.min_headroom) for m in devices], "min-headroom")
        )
    if budgets.fits_on is not None:
        results.append(_worst([_fit(f, budgets.fits_on) for f in fits], "fits-on"))
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


def _peak(m: Measures, limit: Amount) -> BudgetResult:
    budget = "max-peak"
    bound = limit.of(m.capacity_bytes)
    if m.peak_bytes is None:
        return _skip(budget, "the input does not say how much memory was live", m)
    if bound is None:
        return _skip(budget, _no_capacity("a percentage"), m)
    what = f"peak {m.peak_kind} memory is {format_size(m.peak_bytes)}{_on(m)}"
    limit_text = _bound(bound, limit, "the capacity")
    return _judged(budget, m, m.peak_bytes, bound, what, limit_text)


def _pinned(m: Measures, limit: Amount) -> BudgetResult:
    budget = "max-pinned"
    if m.pinned_bytes is None:
        return _skip(budget, "only a snapshot or statistics say what is pinned", m)
    bound = limit.of(m.reserved_bytes)
    if bound is None:
        return _skip(budget, "the reserved memory is unknown, so is a percentage of it", m)
    what = f"live blocks pin {format_size(m.pinned_bytes)} of free memory{_on(m)}"
    limit_text = _bound(bound, limit, "reserved memory")
    return _judged(budget, m, m.pinned_bytes, bound, what, limit_text)


def _retries(m: Measures, limit: int) -> BudgetResult:
    if m.retries is None:
        return _skip("max-retries", "only a trace or statistics count retries", m)
    count = format_count(m.retries)
    what = f"{count} {'allocation' if m.retries == 1 else 'allocations'} had to flush the cache"
    return _judged("max-retries", m, m.retries, limit, what + _on(m), format_count(limit))


def _headroom(m: Measures, limit: Amount) -> BudgetResult:
    budget = "min-headroom"
    bound = limit.of(m.capacity_bytes)
    if m.capacity_bytes is None or bound is None:
        return _skip(budget, _no_capacity("headroom"), m)
    if m.peak_bytes is None:
        return _skip(budget, "the input does not say how much memory was live", m)
    room = m.capacity_bytes - m.peak_bytes
    what = (
        f"peak {m.peak_kind} memory of {format_size(m.peak_bytes)} leaves {format_size(room)} of "
        f"{format_size(m.capacity_bytes)}{_on(m)}"
    )
    # Negated, so that "above the limit" means the same for all budgets.
    outcome = Outcome.EXCEEDED if room < bound else Outcome.KEPT
    relation = "less than" if outcome is Outcome.EXCEEDED else "at least"
    text = f"{what}, {relation} {_bound(bound, limit, 'the capacity')}"
    return BudgetResult(budget, outcome, text, m.device, room, bound)


def _fit(fit: Fit, size: int) -> BudgetResult:
    if fit.fits is None:
        return BudgetResult("fits-on", Outcome.SKIP, fit.text, fit.device)
    outcome = Outcome.KEPT if fit.fits else Outcome.EXCEEDED
    return BudgetResult("fits-on", outcome, fit.text, fit.device, fit.needed_bytes, size)


def _growth(diagnosis: Diagnosis) -> BudgetResult:
    found = [f for f in diagnosis.findings if _is_growth(f)]
    if found:
        worst = max(found, key=lambda f: f.n_bytes)
        text = f"memory grows: {worst.message}"
        return BudgetResult("no-growth", Outcome.EXCEEDED, text, worst.device, worst.n_bytes, 0)
    skipped = {s.code: s.reason for s in diagnosis.skipped if s.code in GROWTH_CODES}
    if skipped.keys() >= GROWTH_CODES:
        reason = skipped[min(skipped)]
        return BudgetResult("no-growth", Outcome.SKIP, f"growth cannot be seen: {reason}")
    return BudgetResult("no-growth", Outcome.KEPT, "no line grows step by step", None, 0, 0)


def _is_growth(finding: Finding) -> bool:
    return finding.code in GROWTH_CODES and finding.severity >= Severity.WARNING


def _judged(  # noqa: PLR0913, PLR0917 - the parts of one sentence
    budget: str, m: Measures, value: int, bound: int, what: str, limit_text: str
) -> BudgetResult:
    outcome = Outcome.EXCEEDED if value > bound else Outcome.KEPT
    relation = "more than" if outcome is Outcome.EXCEEDED else "within"
    return BudgetResult(budget, outcome, f"{what}, {relation} {limit_text}", m.device, value, bound)


def _skip(budget: str, reason: str, m: Measures) -> BudgetResult:
    return BudgetResult(budget, Outcome.SKIP, reason, m.device)


def _no_capacity(what: str) -> str:
    return f"the capacity is unknown, so is {what}; give --capacity"


def _bound(bound: int, limit: Amount, whole: str) -> str:
    share = "" if limit.share is None else f" ({limit} of {whole})"
    return format_size(bound) + share


def _on(m: Measures) -> str:
    return "" if m.is_only else f" on GPU {m.device}"


def exceeded(results: Sequence[BudgetResult]) -> Iterator[BudgetResult]:
    """Yield the results that break their budget."""
    return (r for r in results if r.outcome is Outcome.EXCEEDED)
