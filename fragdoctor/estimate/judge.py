"""Turns footprints into an answer: fits or not, the largest batch, what each measure saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fragdoctor.estimate.savings import Measure, measures_for
from fragdoctor.model.estimate import Estimate, Fit, Footprint, GpuModel, Saving
from fragdoctor.model.workload import Workload

# Memory of a workload, by either route.
Footprinter = Callable[[Workload], Footprint]

MAX_BATCH: Final = 1 << 20
MIN_LENGTH: Final = 128


@dataclass(frozen=True, slots=True)
class Route:
    """How footprints are found: by formulas over a shape, or by a trace of the user's model.

    Attributes:
        footprint_of: called for the workload, and for it with other batches and settings.
        error: how far off the route was on recordings, one sentence.
        measures_of: the changes of a workload that this route can answer for.
        varies_length: whether it can answer for another sequence length.
    """

    footprint_of: Footprinter
    error: str = ""
    measures_of: Callable[[Workload], Sequence[Measure]] = measures_for
    varies_length: bool = True


def judged(workload: Workload, route: Route, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate of a workload on each of the GPUs, and what would save memory."""
    footprint = route.footprint_of(workload)
    return Estimate(
        workload=workload,
        footprint=footprint,
        fits=tuple(_fit(workload, footprint, route, gpu) for gpu in gpus),
        savings=tuple(_savings(workload, footprint, route, gpus)),
        error=route.error,
    )


def _fit(workload: Workload, footprint: Footprint, route: Route, gpu: GpuModel) -> Fit:
    usable, batches = gpu.usable_bytes, []
    for seq in _other_lengths(workload) if route.varies_length else ():
        batch = largest_batch(replace(workload, seq=seq), route.footprint_of, usable)
        if batch is not None:
            batches.append((seq, batch))
    return Fit(
        gpu=gpu,
        fits=footprint.reserved_bytes <= usable,
        margin_bytes=usable - footprint.reserved_bytes,
        largest_batch=largest_batch(workload, route.footprint_of, usable),
        other_lengths=tuple(batches),
    )


def _other_lengths(workload: Workload) -> Sequence[int]:
    seq = workload.seq
    if not seq:
        return ()
    limit = workload.shape.max_positions or 4 * seq
    return tuple(s for s in (seq // 2, 2 * seq, 4 * seq) if MIN_LENGTH <= s <= limit)


def largest_batch(workload: Workload, footprint_of: Footprinter, usable_bytes: int) -> int | None:
    """Return the largest batch whose reserved memory fits; 0 = not even one.

    None where memory does not depend on the batch, as when the layers are not known.
    """
    reserved: dict[int, int] = {}

    def needs(batch: int) -> int:
        if batch not in reserved:
            reserved[batch] = footprint_of(replace(workload, batch=batch)).reserved_bytes
        return reserved[batch]

    if needs(1) > usable_bytes:
        return 0
    low, high = 1, 2
    # Memory is nearly linear in the batch: aim where the line meets the limit, then a bit beyond.
    while needs(high) <= usable_bytes:
        slope = (needs(high) - needs(low)) / (high - low)
        room = (usable_bytes - needs(high)) / slope if slope > 0 else MAX_BATCH
        low, high = high, high + max(1, math.ceil(1.01 * room))
        if high > MAX_BATCH:
            return None
    while high - low > max(1, low // 64):  # to within 2 %: the estimate is no finer
        share = (usable_bytes - needs(low)) / max(1, needs(high) - needs(low))
        aimed = low + round(share * (high - low))
        # Never closer than an eighth to an end, so that each step narrows the range.
        edge = max(1, (high - low) // 8)
        middle = min(max(aimed, low + edge), high - edge)
        low, high = (middle, high) if needs(middle) <= usable_bytes else (low, middle)
    return low


def _savings(
    workload: Workload, footprint: Footprint, route: Route, gpus: Sequence[GpuModel]
) -> list[Saving]:
    gpu = gpus[0] if gpus else None
    found = [
        _saving(measure, footprint, route.footprint_of(measure.workload), gpu)
        for measure in route.measures_of(workload)
    ]
    return sorted(found, key=lambda s: -s.saved_bytes)


def _saving(measure: Measure, before: Footprint, after: Footprint, gpu: GpuModel | None) -> Saving:
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
