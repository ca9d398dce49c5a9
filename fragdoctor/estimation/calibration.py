"""How far what others measured on real GPUs lay outside the bounds of the formulas.

The bounds of :func:`fragdoctor.estimation.bounds.needs_of` hold for code that does what the
formulas say, and decide whether it fits. Programs of others differ: libraries keep more, texts are
shorter than stated, figures come from ``nvidia-smi``. By how much was measured, not reasoned: of
each published figure of the half that may be looked at, its ratio to the lower and to the upper
bound; of these ratios two quantiles, where each table counts once, however many rows it has. They
are the narrowest pair that holds nine of ten figures of a table that was left out.

What is said removes an unknown, so each :func:`kind_of` has quantiles of its own: inference has no
loss and no backward pass, and where it is said which logits the loss is taken from, the largest
tensors of a step are known. ``python benchmarks/bench_published.py --calibrate`` repeats it.

Verdicts are left to the bounds: decided by this interval, most of the runs that did fit would be
too close to call.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.estimation.bounds import Needs
from fragdoctor.model.workload import Workload

SPREADS: Final = MappingProxyType(
    {
        "inference": (0.921, 1.139),
        "training, loss said": (0.810, 1.173),
        "training": (0.976, 1.756),
    }
)
"""Kind of workload -> factors of the lower and of the upper bound."""


def kind_of(workload: Workload) -> str:
    """Return by what is known of a workload its key of ``SPREADS``."""
    if workload.inference:
        return "inference"
    is_said = workload.loss is not None and not workload.varying_lengths
    return "training, loss said" if is_said else "training"


def published_range(needs: Needs, workload: Workload) -> tuple[int, int | None]:
    """Return between which bytes nine of ten published figures of such a run would lie.

    There is no end to it where a part of the run is not known.
    """
    low, high = SPREADS[kind_of(workload)]
    most = needs.high_bytes
    return int(needs.low_bytes * low), None if most is None else round(most * high)
