"""How far figures that others measured on real GPUs lay outside the bounds of the formulas.

The bounds of :func:`fragdoctor.estimation.bounds.needs_of` hold for code that does what the
formulas say, and they decide whether it fits. Other people's programs differ: libraries keep more,
texts are shorter than stated, figures come from ``nvidia-smi``. How much they differ was measured:
for each published figure in the half that may be looked at, its ratios to the lower and to the
upper bound were taken. Two quantiles of these ratios are used, with each table counting once
however many rows it has. They are the narrowest pair that covers nine of ten figures of a table
that was left out.

Stated facts remove unknowns, so each :func:`kind_of` has its own quantiles: inference has no loss
and no backward pass, and if the logits that the loss is computed from are stated, the largest
tensors of a step are known. ``python benchmarks/bench_published.py --calibrate`` measures again.

Verdicts still follow the bounds: decided by this interval, most runs that did fit would be too
close to call.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.step import largest_tensor
from fragdoctor.model.workload import Workload

SPREADS: Final = MappingProxyType(
    {
        "inference": (0.882, 1.130),
        "training, loss said": (0.809, 1.344),
        "training": (0.936, 1.799),
    }
)
"""Kind of workload -> factors for the lower and the upper bound."""


def kind_of(workload: Workload) -> str:
    """Return the key in ``SPREADS`` that matches what is known about a workload."""
    if workload.inference:
        return "inference"
    is_said = workload.loss is not None and not workload.varying_lengths
    return "training, loss said" if is_said else "training"


def published_range(needs: Needs, workload: Workload) -> tuple[int, int]:
    """Return the range, in bytes, of nine of ten published figures for runs like this one.

    Figures are taken where memory is plentiful, so with expandable segments too they include the
    allocator's cache.
    """
    low, high = SPREADS[kind_of(workload)]
    cache = largest_tensor(workload) if workload.expandable_segments else 0
    return int(needs.low_bytes * low), round((needs.high_bytes + cache) * high)
