"""Turns footprints into an answer: whether it fits, the largest batch, what each measure saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.measures import cheapest_combinations, savings_of
from fragdoctor.estimation.request import error_of
from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.memory_estimate import Estimate, Fit, FitState, Footprint
from fragdoctor.model.workload import Workload

MAX_BATCH: Final = 1 << 20
MIN_LENGTH: Final = 128


def judged(workload: Workload, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate of a workload on each of the GPUs, and what would save memory."""
    footprint = formula_footprint(workload)
    fits = tuple(_fit(workload, footprint, gpu) for gpu in gpus)
    is_open = bool(fits) and fits[0].state is not FitState.FITS
    return Estimate(
        workload=workload,
        footprint=footprint,
        fits=fits,
        savings=savings_of(workload),
        error=error_of(workload),
        combinations=cheapest_combinations(workload, gpus[0].usable_bytes) if is_open else (),
    )


def _fit(workload: Workload, footprint: Footprint, gpu: GpuModel) -> Fit:
    def largest(seq: int) -> int | None:
        return largest_batch(replace(workload, seq=seq), formula_needs, gpu.usable_bytes)

    seq, limit = workload.seq, workload.shape.max_positions or 4 * workload.seq
    lengths = (s for s in (seq // 2, 2 * seq, 4 * seq) if MIN_LENGTH <= s <= limit)
    others = [(length, largest(length)) for length in lengths]
    state = footprint.state_on(gpu.usable_bytes)
    return Fit(
        gpu=gpu,
        fits=state is FitState.FITS,
        margin_bytes=gpu.usable_bytes - footprint.needs_high_bytes,
        largest_batch=largest(workload.seq),
        other_lengths=tuple((n, batch) for n, batch in others if batch is not None),
        state=state,
    )


def largest_batch(
    workload: Workload,
    needs_of: Callable[[Workload], Needs],
    usable_bytes: int,
) -> int | None:
    """Return the largest batch that fits; 0 = not even one.

    Returns None if memory hardly depends on the batch.

    Args:
        workload: the workload; its own batch does not matter.
        needs_of: returns what a workload needs, which grows with the batch.
        usable_bytes: the GPU's usable memory.
    """

    def needs(batch: int) -> int:
        return needs_of(replace(workload, batch=batch)).high_bytes

    if needs(1) > usable_bytes:
        return 0
    high = 2
    while needs(high) <= usable_bytes:
        high *= 2
        if high > MAX_BATCH:
            return None
    low = high // 2
    while high - low > max(1, low // 64):  # to within 2 %: the estimate is no finer
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= usable_bytes else (low, middle)
    return low
