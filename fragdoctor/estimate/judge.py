"""Turns footprints into an answer: fits or not, the largest batch, what each measure saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fragdoctor.model.estimate import Estimate, Fit, Footprint, GpuModel
from fragdoctor.model.workload import Workload

# Either route: formulas over a shape, or a trace of the user's model.
Footprinter = Callable[[Workload], Footprint]


def judged(workload: Workload, footprint_of: Footprinter, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate of a workload on each of the GPUs."""
    footprint = footprint_of(workload)
    fits = [
        Fit(
            gpu=gpu,
            fits=footprint.reserved_bytes <= gpu.usable_bytes,
            margin_bytes=gpu.usable_bytes - footprint.reserved_bytes,
            largest_batch=None,
        )
        for gpu in gpus
    ]
    return Estimate(workload=workload, footprint=footprint, fits=tuple(fits))
