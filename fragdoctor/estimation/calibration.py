"""How far what others measured on real GPUs lay outside the bounds of the formulas.

The bounds of :func:`fragdoctor.estimation.bounds.needs_of` hold for code that does what the
formulas say, and decide whether it fits. Programs of others differ: libraries keep more, texts are
shorter than stated, figures come from ``nvidia-smi``. By how much was measured, not reasoned: of
each published figure of the half that may be looked at, its ratio to the lower and to the upper
bound; of these ratios two quantiles, where each table counts once, however many rows it has. They
are the narrowest between which nine of ten figures of a table lie that was left out.
``python benchmarks/bench_published.py --calibrate`` repeats it: 391 figures in 100 tables.

Verdicts are left to the bounds: decided by this interval, most of the runs that did fit would be
too close to call.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.estimation.bounds import Needs

LOW_FACTOR: Final = 0.915
"""Of the lower bound."""
HIGH_FACTOR: Final = 1.498
"""Of the upper bound."""


def published_range(needs: Needs) -> tuple[int, int | None]:
    """Return between which bytes nine of ten published figures of such a run would lie.

    There is no end to it where a part of the run is not known.
    """
    high = needs.high_bytes
    return int(needs.low_bytes * LOW_FACTOR), None if high is None else round(high * HIGH_FACTOR)
