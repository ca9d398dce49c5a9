"""How far what others measured on real GPUs lay outside the bounds of the formulas.

The bounds of :func:`fragdoctor.estimation.tape.needs_of` hold for code that does what the formulas
say. Real programs differ: libraries keep more, texts are shorter than stated, figures come from
``nvidia-smi``. By how much was measured, not reasoned: of each published figure of the half that
may be looked at, its ratio to the lower and to the upper bound; of these ratios the 5 % and 95 %
quantiles, where each table counts once, however many rows it has. Two kinds of run are told apart:
so did 90 % of the figures of a table that was left out lie inside; with quantised bases or sharded
states as kinds of their own 86 % and 85 % did.
``python benchmarks/bench_published.py --calibrate`` repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.estimation.tape import Needs
from fragdoctor.frozen import frozen
from fragdoctor.model.memory_estimate import Doubt
from fragdoctor.model.workload import Workload


@frozen
class Spread:
    """What the bounds are multiplied by, so that nine of ten published figures lie between them.

    Attributes:
        low: of the lower bound, at most 1.
        high: of the upper bound, at least 1.
    """

    low: float
    high: float


INFERENCE: Final = Spread(low=0.877, high=1.080)
"""Of 30 figures in 4 tables."""
TRAINING: Final = Spread(low=0.921, high=1.247)
"""Of 89 figures in 17 tables."""


def spread_of(workload: Workload) -> Spread:
    """Return the spread of published figures of runs of this kind."""
    return INFERENCE if workload.inference else TRAINING


def calibrated(needs: Needs, workload: Workload) -> Needs:
    """Return bounds between which nine of ten published figures lay.

    Where a part of the run is not known there is no upper bound to widen, and both stay.
    """
    if needs.high_bytes is None:
        return needs
    spread = spread_of(workload)
    low, high = int(needs.low_bytes * spread.low), round(needs.high_bytes * spread.high)
    doubt = Doubt(
        "published",
        "programs of others: nine of ten published figures lay in bounds so much wider",
        needs.low_bytes - low + high - needs.high_bytes,
    )
    return replace(needs, low_bytes=low, high_bytes=high, doubts=(*needs.doubts, doubt))
