"""Turns footprints into an answer: whether it fits, the largest batch, what each measure saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.measures import cheapest_combinations, savings_of
from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.memory_estimate import Estimate, Fit, FitState, Footprint, state_on
from fragdoctor.model.workload import Workload

MAX_BATCH: Final = 1 << 20


def judged(workload: Workload, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate of a workload on each of the GPUs, and what would save memory."""
    footprint = formula_footprint(workload)
    fits = tuple(_fit(workload, footprint, gpu) for gpu in gpus)
    is_open = bool(fits) and fits[0].state is not FitState.FITS
    enough = cheapest_combinations(workload, gpus[0].usable_bytes) if is_open else ()
    return Estimate(workload, footprint, fits, savings_of(workload), enough)


def _fit(workload: Workload, footprint: Footprint, gpu: GpuModel) -> Fit:
    usable, most = gpu.usable_bytes, footprint.needs_high_bytes
    state = state_on(footprint.needs_low_bytes, most, usable)
    batch = largest_batch(workload, usable)
    return Fit(gpu, state is FitState.FITS, usable - most, batch, state=state)


def largest_batch(workload: Workload, usable_bytes: int) -> int | None:
    """Return the largest batch that fits; 0 = not even one.

    Returns None if memory hardly depends on the batch. What a workload needs grows with it.
    """

    def needs(batch: int) -> int:
        return formula_needs(replace(workload, batch=batch)).high_bytes

    if needs(1) > usable_bytes:
        return 0
    high = 2
    while needs(high) <= usable_bytes:
        high *= 2
        if high > MAX_BATCH:
            return None
    low = high // 2
    while high - low > max(1, low // 64):  # to within 2%: the estimate is no finer
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= usable_bytes else (low, middle)
    return low
