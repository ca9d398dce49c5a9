"""Turns footprints into an answer: fits or not, the largest batch, what each measure saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fragdoctor.estimate.savings import Measure, measures_for
from fragdoctor.model.estimate import Estimate, Fit, Footprint, GpuModel, Saving
from fragdoctor.model.workload import Workload

# Either route: formulas over a shape, or a trace of the user's model.
Footprinter = Callable[[Workload], Footprint]

MAX_BATCH: Final = 1 << 20
MIN_LENGTH: Final = 128


def judged(
    workload: Workload,
    footprint_of: Footprinter,
    gpus: Sequence[GpuModel],
    *,
    error: str = "",
    with_savings: bool = True,
    varies_length: bool = True,
) -> Estimate:
    """Return the estimate of a workload on each of the GPUs, and what would save memory.

    Args:
        workload: what is to run.
        footprint_of: either route; called for other batches, lengths and settings too.
        gpus: what to compare with; may be empty.
        error: how far off the route was on recordings, one sentence.
        with_savings: whether to try the measures (each costs a few calls).
        varies_length: whether the route can answer for another sequence length.
    """
    footprint = footprint_of(workload)
    savings = _savings(workload, footprint, footprint_of, gpus) if with_savings else ()
    return Estimate(
        workload=workload,
        footprint=footprint,
        fits=tuple(
            _fit(workload, footprint, footprint_of, gpu, varies_length=varies_length)
            for gpu in gpus
        ),
        savings=tuple(savings),
        error=error,
    )


def _fit(
    workload: Workload,
    footprint: Footprint,
    footprint_of: Footprinter,
    gpu: GpuModel,
    *,
    varies_length: bool,
) -> Fit:
    lengths = _other_lengths(workload) if varies_length else ()
    return Fit(
        gpu=gpu,
        fits=footprint.reserved_bytes <= gpu.usable_bytes,
        margin_bytes=gpu.usable_bytes - footprint.reserved_bytes,
        largest_batch=largest_batch(workload, footprint_of, gpu.usable_bytes),
        other_lengths=tuple(
            (seq, batch)
            for seq in lengths
            if (
                batch := largest_batch(replace(workload, seq=seq), footprint_of, gpu.usable_bytes)
            )
            is not None
        ),
    )


def _other_lengths(workload: Workload) -> Sequence[int]:
    seq = workload.seq
    if not seq:
        return ()
    limit = workload.shape.max_positions or 4 * seq
    return tuple(s for s in (seq // 2, 2 * seq, 4 * seq) if MIN_LENGTH <= s <= limit)


def largest_batch(
    workload: Workload, footprint_of: Footprinter, usable_bytes: int
) -> int | None:
    """Return the largest batch whose reserved memory fits; 0 = not even one.

    None where memory does not depend on the batch, as when the layers are not known.
    """

    def fits(batch: int) -> bool:
        return footprint_of(replace(workload, batch=batch)).reserved_bytes <= usable_bytes

    if not fits(1):
        return 0
    high = 2
    while fits(high):
        high *= 2
        if high > MAX_BATCH:
            return None
    low = high // 2
    while high - low > max(1, low // 64):  # to within 2 %: the estimate is no finer
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _savings(
    workload: Workload,
    footprint: Footprint,
    footprint_of: Footprinter,
    gpus: Sequence[GpuModel],
) -> list[Saving]:
    gpu = gpus[0] if gpus else None
    found = [
        _saving(measure, footprint, footprint_of(measure.workload), gpu)
        for measure in measures_for(workload)
    ]
    return sorted(found, key=lambda s: -s.saved_bytes)


def _saving(
    measure: Measure, before: Footprint, after: Footprint, gpu: GpuModel | None
) -> Saving:
    return Saving(
        id=measure.id,
        title=measure.title,
        option=measure.option,
        peak_bytes=after.peak_allocated_bytes,
        reserved_bytes=after.reserved_bytes,
        saved_bytes=before.peak_allocated_bytes - after.peak_allocated_bytes,
        cost=measure.cost,
        fits=None if gpu is None else after.reserved_bytes <= gpu.usable_bytes,
        source=measure.source,
    )
